"""Text-to-text: pairs of an input and its target (Raffel et al. 2020, section 2.4), without random numbers.

And the inputs and targets of another objective in one row, for models without an encoder (section 3.2.1, "prefix LM";
seqio's PrefixLMFeatureConverter).
"""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from data_pipeline.corpus.objectives.iid_denoising import IidDenoising
from data_pipeline.corpus.objectives.language_modelling import PrefixLM, shifted
from data_pipeline.corpus.objectives.objective import (
    LONGEST,
    Columns,
    Examples,
    Objective,
    Padded,
    Stretch,
    concatenated,
)
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption
from data_pipeline.text.vocabulary import Vocabulary


class TextToText(Objective):
    """Text-to-text: pairs of an input and its target. Longer texts are cut when rows are made.

    row      translate English to German: That is good. | Das ist gut.
    inputs   translate English to German: That is good. </s>
    targets  Das ist gut. </s>
    """

    packings = ("complete_documents", "examples")

    name: Literal["text_to_text"] = "text_to_text"
    inputs_length: int = Field(512, ge=2, le=LONGEST)
    """Maximum number of tokens of the encoder's input, EOS included."""
    targets_length: int = Field(114, ge=2, le=LONGEST)
    """Maximum number of tokens of a target, EOS included."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Tokens of a row before its target."""
        return ("target_start",)

    @property
    def raw_length(self) -> int:
        return self.inputs_length + self.targets_length - 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.inputs_length, self.targets_length

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """`columns["target_start"]` (n,) is the number of tokens of each row before its target."""
        starts, eos = columns["target_start"].astype(np.int64), vocabulary.eos
        return Examples(
            concatenated(rows, eos, Stretch(np.zeros_like(starts), starts), eos),
            concatenated(rows, eos, Stretch(starts, rows.lengths - starts), eos),
        )


class InOneRow(Objective):
    """The inputs of another objective and its targets, one after the other in a row, for decoder-only models. Only the
    targets have a loss, so a decoder learns prefix LM, spans, or a task. With `model.prefix_attention: bidirectional`,
    the tokens of the inputs see one another. Run files alone can have it, for corpora with the other objective.

        of       Thank you for inviting </s>  →  me to your party </s>
        inputs   Thank you for inviting </s> me   to your party
        targets                         me   to your party </s>
    """

    name: Literal["in_one_row"] = "in_one_row"
    of: Annotated[SpanCorruption | IidDenoising | PrefixLM | TextToText, Field(discriminator="name")]
    """The other objective, with its keys."""

    @model_validator(mode="after")
    def _has_one_example_a_row(self) -> "InOneRow":
        if isinstance(self.of, PrefixLM) and self.of.packed:
            raise ValueError("of.packed: packed rows hold two examples; their inputs and targets can't be in one row")
        return self

    @property
    def full_name(self) -> str:
        return f"{self.name} of {self.of.name}"

    @property
    def as_cut(self) -> Objective:
        return self.of

    @property
    def columns(self) -> tuple[str, ...]:
        return self.of.columns

    @property
    def raw_length(self) -> int:
        return self.of.raw_length

    @property
    def shape(self) -> tuple[int, int]:
        length = sum(self.of.shape) - 1
        return length, length

    @property
    def sentinels(self) -> int:
        return self.of.sentinels

    def for_rows_of(self, tokens: int) -> Objective | None:
        of = self.of.for_rows_of(tokens)
        return InOneRow.model_validate({"name": self.name, "of": of}) if of else None

    def problems(self, vocabulary: Vocabulary) -> list[str]:
        return self.of.problems(vocabulary)

    def accepts(self, length: int) -> bool:
        return self.of.accepts(length)

    def apply(self, rows: Padded, keys: np.ndarray, vocabulary: Vocabulary, columns: Columns) -> Examples:
        """`prefix_mask` of the result is 1 at the tokens of the inputs."""
        one = self.of.apply(rows, keys, vocabulary, columns)
        first, second = one.inputs, one.targets
        beside = Padded.full(np.concatenate([first.values, second.values], axis=1))
        start, width = np.zeros_like(first.lengths), np.full_like(first.lengths, first.values.shape[1])
        whole = concatenated(beside, vocabulary.pad, Stretch(start, first.lengths), Stretch(width, second.lengths))
        in_first = np.arange(whole.values.shape[1]) < first.lengths[:, None]
        return replace(
            shifted(whole, vocabulary.pad),
            predicted=(whole.filled & ~in_first)[:, 1:],
            prefix_mask=in_first[:, :-1].astype(np.uint8),
        )
