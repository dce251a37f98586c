"""How a model is asked for the likelihood of a text after another: as it was trained to read and to write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.generation.texts import padded
from pretrain.models import FAMILIES
from pretrain.models.config.base import ModelConfig

Form = Literal["answer", "blank", "copy", "continuation"]
FORMS: dict[str, str] = {
    "answer": "context </s> → continuation </s>, as in text-to-text",
    "blank": "context <extra_id_0> </s> → <extra_id_0> continuation </s>, as in span corruption",
    "copy": "<s> context <mask> </s> → <s> context continuation </s>, as in BART's denoising",
}
"""The forms that an encoder-decoder may be asked in; what stands before the continuation is given, not scored."""
_OF_OBJECTIVES = {"span_corruption": "blank", "iid_denoising": "blank", "ul2": "blank", "denoising": "copy"}


@dataclass(frozen=True)
class Asked:
    """Ids for the encoder (empty for a causal model), and those of the decoder: `given`, then `scored` after them."""

    encoder: list[int]
    given: list[int]
    scored: list[int]

    @property
    def length(self) -> int:
        return len(self.encoder) + len(self.given) + len(self.scored)


@dataclass(frozen=True)
class Asking:
    """Asks a model in one form. `longest`: the most ids that its encoder or decoder reads; None: no limit."""

    form: Form
    vocabulary: Vocabulary
    config: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: Vocabulary, form: str | None, objective: str | None) -> "Asking":
        """In `form`, or else as `objective`, the name of what the model was trained on, has it.

        Raises UserError for a family without likelihoods of texts, and for a form that the model can't be asked in.
        """
        generates = FAMILIES[config.family].generates
        if generates is None:
            raise UserError(f"--lm-eval: models of the family {config.family} have no likelihood of a text")
        if form is not None and form not in FORMS:
            raise UserError(f"--form: expected one of {', '.join(FORMS)}, got {form!r}")
        if generates == "continuations":
            if form is not None:
                raise UserError(f"--form: models of the family {config.family} continue a text; there is one form")
            return cls("continuation", vocabulary, config)
        chosen = form or _OF_OBJECTIVES.get(objective or "", "answer")
        if chosen == "blank" and not vocabulary.sentinels:
            raise UserError("--form: a blank needs sentinels, but the model's tokenizer has none")
        if chosen == "copy" and (vocabulary.bos is None or vocabulary.mask is None):
            raise UserError("--form: a copy needs <s> and <mask>, but the model's tokenizer lacks one")
        return cls(chosen, vocabulary, config)  # type: ignore[arg-type]

    @property
    def longest(self) -> int | None:
        return self.config.longest_sequence

    def asked(self, context: Sequence[int], continuation: Sequence[int], ends: bool = True) -> Asked:
        """Asks for `continuation` after `context`, both without marks, and for EOS if it `ends` there.

        A causal model isn't asked for an EOS token. A context that is too long loses its beginning.
        """
        words, end = self.vocabulary, [self.vocabulary.eos]
        scored = [*continuation, *(end if ends and self.form != "continuation" else [])]
        if self.form == "continuation":
            kept = self._last(context, len(scored) - 1)  # the last id isn't read
            return Asked([], kept or end, scored)
        if self.form == "blank":
            blank = [words.first_sentinel]
            return Asked([*self._last(context, 2), *blank, *end], blank, scored)
        if self.form == "copy":
            assert words.bos is not None
            assert words.mask is not None
            kept = self._last(context, max(3, len(scored) + 1))
            return Asked([words.bos, *kept, words.mask, *end], [words.bos, *kept], scored)
        begin = [words.bos] if FAMILIES[self.config.family].inputs_begin_with_bos and words.bos is not None else []
        return Asked([*begin, *self._last(context, 1 + len(begin)), *end], [], scored)

    def _last(self, context: Sequence[int], others: int) -> list[int]:
        """As many of the last ids of `context` as there is room for beside `others`."""
        if self.longest is None:
            return list(context)
        room = max(self.longest - others, 0)
        return list(context[len(context) - room :]) if room < len(context) else list(context)

    def batch(self, rows: Sequence[Asked]) -> Batch:
        """The batch in which the model's loss of a label is −log p of a scored id; all other labels are ignored."""
        pad = self.vocabulary.pad
        wholes = [[*row.given, *row.scored] for row in rows]
        targets, _ = padded([[IGNORE_INDEX] * len(row.given) + row.scored for row in rows], IGNORE_INDEX, left=False)
        if self.form == "continuation":
            inputs, mask = padded([whole[:-1] for whole in wholes], pad, left=False)
            batch = {"encoder_input_ids": inputs, "labels": targets[:, 1:].contiguous()}
        else:
            inputs, mask = padded([row.encoder for row in rows], pad, left=False)
            read, _ = padded([[self.config.decoder_start_id, *whole[:-1]] for whole in wholes], pad, left=False)
            batch = {"encoder_input_ids": inputs, "decoder_input_ids": read, "labels": targets}
        return batch if mask is None else {**batch, "encoder_attention_mask": mask}

    def windows(self, ids: Sequence[int]) -> list[Asked]:
        """A text of `ids` in pieces, each asked for after what stands before it; each id is scored once.

        The first 16 ids follow an input of marks alone, since nothing stands before them. Then come pieces of 128, each
        after up to 384 ids before it.
        """
        room = _PREFIX + _PIECE if self.longest is None else min(self.longest - 3, _PREFIX + _PIECE)
        piece = min(_PIECE, max(room // 4, 1))
        starts = [0, *range(min(_FIRST, piece), len(ids), piece)]
        ends = [*starts[1:], len(ids)]
        return [
            self.asked(ids[max(0, start - (room - piece)) : start], ids[start:end], ends=False)
            for start, end in zip(starts, ends, strict=True)
            if end > start
        ]


_FIRST, _PIECE, _PREFIX = 16, 128, 384  # ids of windows


def as_numbers(losses: torch.Tensor, hits: torch.Tensor, labels: torch.Tensor) -> list[tuple[float, bool]]:
    """For each row of a batch, Σ log p of its labels and whether each is the likeliest; all (rows, length)."""
    labels = labels.to(losses.device)
    sums = losses.double().sum(dim=1).neg()
    greedy = (hits | (labels == IGNORE_INDEX)).all(dim=1)
    return list(zip(sums.tolist(), greedy.tolist(), strict=True))
