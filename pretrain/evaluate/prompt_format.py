"""Prompts, in the format that a model was trained on, and the likelihood of a text given another text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from data_pipeline.base.errors import UserError
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.model_config import ModelConfig
from pretrain.evaluate.generation.texts import first_ids, padded
from pretrain.evaluate.hook import Evaluation
from pretrain.models import FAMILIES
from pretrain.run import watchdog

Form = Literal["answer", "blank", "copy", "continuation"]
FORMS: dict[str, str] = {
    "answer": "context </s> → continuation </s>, as in text-to-text",
    "blank": "context <extra_id_0> </s> → <extra_id_0> continuation </s>, as in span corruption",
    "copy": "<s> context <mask> </s> → <s> context continuation </s>, as in BART's denoising",
}
"""The forms of an encoder-decoder's prompt. In a target, the part before the continuation isn't scored."""
_OBJECTIVE_FORMS = {
    "span_corruption": "blank",
    "iid_denoising": "blank",
    "infilling": "blank",
    "ul2": "blank",
    "denoising": "copy",
}
_FIRST, _PIECE, _PREFIX = 16, 128, 384  # see `windows`
_PARTS = 3  # sentinels that `causal_infilling` needs


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        encoder: ids for the encoder; empty for a causal model.
        prefix: ids that the decoder reads first.
        scored: ids that the decoder reads next, whose probabilities are the score.
        starts: True if the decoder reads its start token before `prefix`; the same for all prompts of a batch.
    """

    encoder: list[int]
    prefix: list[int]
    scored: list[int]
    starts: bool = True

    @property
    def length(self) -> int:
        return len(self.encoder) + len(self.prefix) + len(self.scored)


@dataclass(frozen=True)
class PromptFormat:
    """Makes the prompts of a model in one format.

    Attributes:
        separated: True if EOS stands between a context and its continuation, and after it: the objective `in_one_row`.
        begin: the ids that a context begins with and, in an `answer`, the continuation too: BOS or none.
    """

    form: Form
    vocabulary: Vocabulary
    config: ModelConfig
    separated: bool = False
    begin: Sequence[int] = ()

    @classmethod
    def choose(
        cls, config: ModelConfig, vocabulary: Vocabulary, form: str | None, objective: str | None
    ) -> "PromptFormat":
        """The format in `form`; None: in the form that suits the training objective named `objective`.

        Raises UserError for a family without likelihoods of texts, and for a form that doesn't suit the model.
        """
        family = FAMILIES[config.family]
        if family.generates is None:
            raise UserError(f"models of the family {config.family} have no likelihood of a text")
        if form is not None and form not in FORMS:
            raise UserError(f"--form: expected one of {', '.join(FORMS)}, got {form!r}")
        if family.generates == "continuations":
            if form is not None:
                raise UserError(f"--form: models of the family {config.family} continue a text; there is one form")
            return cls("continuation", vocabulary, config, separated=objective == "in_one_row")
        chosen = form or _OBJECTIVE_FORMS.get(objective or "", "answer")
        if chosen == "blank" and not vocabulary.sentinels:
            raise UserError("--form: blank needs sentinels, but the model's tokenizer has none")
        if chosen == "copy" and (vocabulary.bos is None or vocabulary.mask is None):
            raise UserError("--form: a copy needs <s> and <mask>, but the model's tokenizer lacks one")
        return cls(chosen, vocabulary, config, begin=first_ids(vocabulary, family, objective))  # type: ignore[arg-type]

    def prompt(self, context: Sequence[int], continuation: Sequence[int], ends: bool = True) -> Prompt:
        """A prompt that scores `continuation` after `context`, both without BOS and EOS; if it `ends`, also EOS.

        A causal model's EOS is scored only if texts are `separated`. A context that is too long loses its beginning.
        """
        eos, begin = [self.vocabulary.eos], [*self.begin]
        scored = [*continuation, *(eos if ends and (self.separated or self.form != "continuation") else [])]
        if self.form == "continuation":
            end = eos if self.separated else []
            prompt = self._last(context, len(begin) + len(scored) + len(end) - 1)  # the last id isn't read
            return Prompt([], [*begin, *prompt, *end] or eos, scored)
        if self.form != "answer":
            marks = 2 if self.form == "blank" else max(3, len(scored) + 1)
            return self.infilling(self._last(context, marks), [], continuation, ends)
        return Prompt([*begin, *self._last(context, 1 + len(begin)), *eos], begin, scored)

    @property
    def has_blanks(self) -> bool:
        """True if the model fills masked spans; a decoder-only model does so after `causal_infilling`."""
        causal = self.form == "continuation" and not self.separated
        return self.form in ("blank", "copy") or (causal and self.vocabulary.sentinels >= _PARTS)

    def with_blank(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The encoder's input with a mask between two parts, in the form `blank` or `copy`."""
        vocabulary = self.vocabulary
        if self.form == "blank":
            return [*before, vocabulary.first_sentinel, *after, vocabulary.eos]
        assert vocabulary.bos is not None
        assert vocabulary.mask is not None
        return [vocabulary.bos, *before, vocabulary.mask, *after, vocabulary.eos]

    def infilling(
        self, before: Sequence[int], after: Sequence[int], middle: Sequence[int], ends: bool = False
    ) -> Prompt:
        """A prompt that scores `middle` between two parts; if it `ends`, also the next id: EOS, or in a copy the first
        id of `after`.

        A decoder-only model reads <0> before <1> after <2> middle, as in `causal_infilling`; no end is scored. Raises
        UserError if the form has no mask.
        """
        vocabulary = self.vocabulary
        if not self.has_blanks:
            raise UserError(f"--form {self.form}: this form can't fill a span")
        if self.form == "continuation":
            first, second, third = map(vocabulary.sentinel, range(_PARTS))
            return Prompt([], [first, *before, second, *after, third], [*middle])
        prefix, following = [vocabulary.first_sentinel], [vocabulary.eos]
        if self.form == "copy":
            assert vocabulary.bos is not None
            prefix, following = [vocabulary.bos, *before], [*after, vocabulary.eos][:1]
        return Prompt(self.with_blank(before, after), prefix, [*middle, *(following if ends else [])])

    def _last(self, context: Sequence[int], others: int) -> list[int]:
        """The last ids of `context`, as many as fit beside `others` ids."""
        longest = self.config.longest_sequence
        room = len(context) if longest is None else max(longest - others, 0)
        return list(context[max(len(context) - room, 0) :])

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        """The batch of some prompts. The loss of a label is −log p of a scored id; all other labels are ignored."""
        pad = self.vocabulary.pad
        wholes = [[*one.prefix, *one.scored] for one in prompts]
        targets, _ = padded(
            [[IGNORE_INDEX] * len(one.prefix) + one.scored for one in prompts], IGNORE_INDEX, left=False
        )
        if self.form == "continuation":
            inputs, mask = padded([whole[:-1] for whole in wholes], pad, left=False)
            seen = torch.arange(inputs.size(1)) < torch.tensor([[len(one.prefix)] for one in prompts])
            batch = {"encoder_input_ids": inputs, "labels": targets[:, 1:].contiguous(), "prefix_mask": seen.long()}
        else:
            inputs, mask = padded([one.encoder for one in prompts], pad, left=False)
            starts = prompts[0].starts
            start = [self.config.decoder_start_id] if starts else []
            read, _ = padded([[*start, *whole[:-1]] for whole in wholes], pad, left=False)
            labels = targets if starts else targets[:, 1:].contiguous()
            batch = {"encoder_input_ids": inputs, "decoder_input_ids": read, "labels": labels}
        return batch if mask is None else {**batch, "encoder_attention_mask": mask}

    def windows(self, ids: Sequence[int]) -> list[Prompt]:
        """Cuts a text into prompts that score each of `ids` once, given the ids before it.

        The first 16 ids follow an input without text. Then come pieces of 128 ids, each given up to 384 ids before it.
        """
        longest = self.config.longest_sequence
        room = _PREFIX + _PIECE if longest is None else min(longest - 3, _PREFIX + _PIECE)
        piece = min(_PIECE, max(room // 4, 1))
        starts = [0, *range(min(_FIRST, piece), len(ids), piece)]
        ends = [*starts[1:], len(ids)]
        return [
            self.prompt(ids[max(0, start - (room - piece)) : start], ids[start:end], ends=False)
            for start, end in zip(starts, ends, strict=True)
            if end > start
        ]


class PromptScores:
    """Scores prompts in batches, divided among the ranks. All ranks pass all prompts and get all scores.

    The model must be whole on each rank.
    """

    def __init__(self, prompt_format: PromptFormat, evaluation: Evaluation, batch_size: int):
        self._format = prompt_format
        self._evaluation = evaluation
        self._batch_size = batch_size

    def __call__(self, rows: Sequence[Prompt]) -> list[tuple[float, bool]]:
        """For each prompt, Σ log p of its `scored` ids, and whether each of these ids is the likeliest.

        Raises UserError for a prompt that is too long for the decoder.
        """
        self._check_lengths(rows)
        # the longest first: rows of a batch are alike in length, and too little memory shows at once
        order = sorted(range(len(rows)), key=lambda number: -rows[number].length)
        batches = [order[start : start + self._batch_size] for start in range(0, len(order), self._batch_size)]
        found = self._evaluation.shared(
            batches, lambda mine: [self._of_batch([rows[i] for i in one]) for one in mine], list[tuple[float, bool]]
        )
        by_row = dict(zip(order, chain.from_iterable(found), strict=True))
        return [by_row[row] for row in range(len(rows))]

    def _check_lengths(self, rows: Sequence[Prompt]) -> None:
        longest = self._format.config.longest_sequence
        if longest is None:
            return
        for row in rows:
            starts = row.starts and self._format.form != "continuation"
            if len(row.prefix) + len(row.scored) - (not starts) > longest:  # the last token isn't read
                before = f" after {len(row.prefix)} of the prompt" if row.prefix else ""
                raise UserError(f"a continuation has {len(row.scored)} tokens{before}, but the model takes {longest}")

    @torch.no_grad()
    def _of_batch(self, rows: Sequence[Prompt]) -> list[tuple[float, bool]]:
        watchdog.alive()
        batch = self._format.batch(rows)
        losses, hits = self._evaluation.losses_and_hits(batch, alone=True)
        labels = batch["labels"].to(losses["labels"].device)
        sums = losses["labels"].double().sum(dim=1).neg()
        greedy = (hits | (labels == IGNORE_INDEX)).all(dim=1)
        return list(zip(sums.tolist(), greedy.tolist(), strict=True))
