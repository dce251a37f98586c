"""UL2: a mixture of denoisers (Tay et al. 2022). A token before the inputs may tell the model which one."""

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, field_validator, model_validator

from data_pipeline.base.config_file import Section
from data_pipeline.corpus.objectives.infilling import Infilling
from data_pipeline.corpus.objectives.language_modelling import PrefixLM
from data_pipeline.corpus.objectives.objective import (
    Columns,
    Examples,
    Objective,
    Padded,
    Stretch,
    concatenated,
    together,
)
from data_pipeline.corpus.objectives.randomness import random_bits
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.text.vocabulary import Vocabulary

Mode = Literal["R", "S", "X"]
_DENOISER = 100  # stream of random numbers; the denoisers use the same keys, with other streams


class Denoiser(Section):
    """One objective of the mixture, drawn in proportion to its `rate`."""

    mode: Mode | None = None
    """R: regular. S: sequential. X: extreme. Selects the token before the inputs. null: no token."""
    denoiser: Annotated[SpanCorruption | PrefixLM | Infilling, Field(discriminator="name")]
    """The objective, `span_corruption`, `prefix_lm` or `infilling`, with its keys."""
    rate: float = Field(1.0, gt=0, le=1e9, allow_inf_nan=False)
    """The denoiser's share of the rows, relative to the other rates."""

    @field_validator("denoiser")
    @classmethod
    def _has_one_example_a_row(cls, denoiser: Objective) -> Objective:
        if isinstance(denoiser, PrefixLM) and denoiser.packed:
            raise ValueError("packed rows hold two examples; only the first would begin with the mode's token")
        return denoiser


def _spans(mode: Mode, mean_span_length: float, noise_density: float) -> Denoiser:
    settings = SpanCorruption(mean_span_length=mean_span_length, noise_density=noise_density)
    return Denoiser(mode=mode, denoiser=settings)


TABLE_1 = (
    _spans("R", 3, 0.15),
    _spans("R", 8, 0.15),
    Denoiser(mode="S", denoiser=PrefixLM(noise_density=0.25)),
    _spans("X", 3, 0.5),
    _spans("X", 8, 0.5),
    _spans("X", 64, 0.15),
    _spans("X", 64, 0.5),
)  # of the paper, equally often, for inputs of 512 tokens


def _as_tuple(given: Any) -> Any:
    """A list of a manifest, whose types are checked strictly, as a tuple."""
    return tuple(given) if isinstance(given, list) else given


Denoisers = Annotated[tuple[Denoiser, ...], Field(min_length=1, max_length=256), BeforeValidator(_as_tuple)]


class UL2(Objective):
    """UL2, a mixture of denoisers (Tay et al. 2022): R, regular denoising; S, sequential, a prefix and its
    continuation; X, extreme, with long or many spans.

        row      Thank you for inviting me to your party last week
        R        [R] Thank you <0> me to your party last <1> </s>   →  <0> for inviting <1> week </s>
        S        [S] Thank you for inviting me to your </s>         →  party last week </s>
        X        [X] Thank you for <0> to your <1> </s>             →  <0> inviting me <1> party last week </s>

    A row's denoiser is drawn when the row is cut, since rows of denoisers have different lengths: 568, 588, 512, 766,
    908, 600 and 1006 tokens for the paper's table 1. If rows are whole documents, they have at most the smallest of
    these lengths. As in the paper's code, a denoiser's lengths don't count the mode's token, so inputs have one token
    more than in the settings: 513.
    """

    name: Literal["ul2"] = "ul2"
    denoisers: Denoisers = TABLE_1
    """The objectives of the mixture. By default the seven of the paper's table 1, equally often."""
    mode_tokens: dict[Mode, str] = {"R": "[R]", "S": "[S]", "X": "[X]"}
    """The special token before the inputs for each mode; `tokenizer.special_tokens` must list them."""

    @model_validator(mode="after")
    def _modes_have_tokens(self) -> "UL2":
        missing = sorted(self._modes - set(self.mode_tokens))
        if missing:
            raise ValueError(f"mode_tokens: no token for mode {', '.join(missing)}")
        return self

    @property
    def _modes(self) -> set[Mode]:
        return {denoiser.mode for denoiser in self.denoisers if denoiser.mode}

    @property
    def columns(self) -> tuple[str, ...]:
        """The number of a row's denoiser."""
        return ("denoiser",)

    @cached_property
    def raw_lengths(self) -> np.ndarray:
        """(denoisers,) int64: tokens of a row of each denoiser."""
        return np.array([denoiser.denoiser.raw_length for denoiser in self.denoisers], dtype=np.int64)

    @property
    def raw_length(self) -> int:
        return int(self.raw_lengths.max())

    @property
    def whole_length(self) -> int:
        """The smallest of the denoisers' lengths: a denoiser is drawn without regard to the document's length."""
        return int(self.raw_lengths.min())

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, targets): the maximum over denoisers, with a mode's token; 513 and 512 for the paper's table 1."""
        shapes = [(denoiser.denoiser.shape, denoiser.mode is not None) for denoiser in self.denoisers]
        return max(inputs + begun for (inputs, _), begun in shapes), max(targets for (_, targets), _ in shapes)

    @property
    def sentinels(self) -> int:
        return max(denoiser.denoiser.sentinels for denoiser in self.denoisers)

    def for_rows_of(self, tokens: int) -> Objective | None:
        """The same mixture, each denoiser for rows of this many tokens; None if a denoiser has no such rows."""
        fitted = [one.denoiser.for_rows_of(tokens) for one in self.denoisers]
        if not all(fitted):
            return None
        denoisers = [one.model_copy(update={"denoiser": of}) for one, of in zip(self.denoisers, fitted, strict=True)]
        return UL2.model_validate({**self.model_dump(exclude_unset=True), "denoisers": denoisers})

    def problems(self, vocabulary: Vocabulary) -> list[str]:
        tokens = [self.mode_tokens[mode] for mode in sorted(self._modes)]
        missing = [token for token in tokens if token not in vocabulary.special]
        absent = [f"mode_tokens: the vocabulary has no special token {token}" for token in missing]
        return super().problems(vocabulary) + absent

    def accepts(self, length: int) -> bool:
        """Whether every denoiser makes an example of `length` tokens, or of its full row if this is shorter."""
        return all(
            denoiser.denoiser.accepts(min(length, raw_length))
            for denoiser, raw_length in zip(self.denoisers, self.raw_lengths.tolist(), strict=True)
        )

    def draw(self, keys: np.ndarray) -> np.ndarray:
        """(n,) uint8: denoisers drawn by their rates for rows with these keys (n,) uint64."""
        rates = np.cumsum([denoiser.rate for denoiser in self.denoisers])
        shares = (random_bits(keys, _DENOISER, 1)[:, 0] >> np.uint64(11)) / 2.0**53  # below 1, exactly
        return np.searchsorted(rates[:-1] / rates[-1], shares, side="right").astype(np.uint8)

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """Inputs and targets of `rows`, each made by its denoiser, `columns["denoiser"]` (n,), and its key."""
        numbers = columns["denoiser"]
        parts = []
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            lengths = rows.lengths[chosen]
            own = Padded(rows.values[chosen, : lengths.max()], lengths)
            made = self.denoisers[number].denoiser.apply(own, keys[chosen], vocabulary, columns)
            if mode := self.denoisers[number].mode:
                token, whole = vocabulary.special[self.mode_tokens[mode]], Stretch(0 * lengths, made.inputs.lengths)
                made = replace(made, inputs=concatenated(made.inputs, vocabulary.pad, token, whole))
            parts.append((chosen, made))
        return together(parts, vocabulary.pad)
