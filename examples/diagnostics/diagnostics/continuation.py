"""The hook `continuation`: the likelihood of second halves of held-out texts."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.loading.reader import Reader
from diagnostics.settings import ContinuationSettings
from pretrain.evaluate.hook import EvalResult, Evaluation
from pretrain.evaluate.prompt_format import PromptFormat, PromptScores

_LEAST = 3  # tokens of a text


class Continuation:
    """The metrics of each corpus. All families are scored on the same tokens, each with prompts as in its training.

    continuation/NAME/loss: nats per token of second halves, given the first halves. EOS isn't scored.
    continuation/NAME/other_context_loss: `loss`, given the first half of another row; left out if there is no other.
    continuation/NAME/bits_per_byte: `loss` in bits per byte of the second halves' text.
    infilling/NAME/…: these for the middles of rows, given the text around them, for models that fill masked spans.

    Once the budget is spent, the metrics are those so far.
    """

    def __init__(self, settings: ContinuationSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        metrics: dict[str, float] = {}
        lines: list[str] = []
        with evaluation.whole_model() as model:
            for name, corpus in evaluation.held_out.corpora.items():
                form = PromptFormat.choose(
                    model.config, corpus.tokenizer.vocabulary, self._settings.form, corpus.objective.name
                )
                texts = _texts(corpus, self._settings.rows)
                begin = self._mode(corpus)
                score = PromptScores(form, evaluation, evaluation.held_out.layout.micro_batch)
                cuts = {"continuation": [_halves(text) for text in texts]}
                if form.has_blanks:
                    cuts["infilling"] = [_middle(text, self._settings.infilling_length) for text in texts]
                for task, parts in cuts.items():
                    found = _scored(parts, form, begin, score, corpus.tokenizer)
                    metrics |= {f"{task}/{name}/{metric}": value for metric, value in found.items()}
                    losses = f"{found['loss']:.3f} nats a token"
                    if "other_context_loss" in found:
                        losses += f", {found['other_context_loss']:.3f} with another context"
                    lines.append(f"{task} of {name}: {found['bits_per_byte']:.3f} bits a byte; {losses}")
                    if evaluation.collectives.late:
                        break
                if evaluation.collectives.late:
                    break
        return EvalResult(metrics, lines=lines)

    def _mode(self, corpus: Corpus) -> list[int]:
        """The ids before every input."""
        mode, special = self._settings.mode, corpus.tokenizer.vocabulary.special
        if mode is None:
            return []
        if mode not in special:
            raise UserError(f"{corpus.location}: the vocabulary has no special token {mode} (continuation, mode)")
        return [special[mode]]


Parts = tuple[list[int], list[int], list[int]]
"""The ids of a text in three parts: before the scored part, the scored part, after it."""


def _scored(
    own: Sequence[Parts], form: PromptFormat, begin: list[int], score: PromptScores, tokenizer: Tokenizer
) -> dict[str, float]:
    """The metrics of the scored parts, in their own contexts and in other texts', if there are several. `begin`: ids
    before an encoder's input."""
    pairs = [*zip(own, own, strict=True)]
    if len(own) > 1:
        pairs += zip([*own[len(own) // 2 :], *own[: len(own) // 2]], own, strict=True)
    prompts = [
        form.infilling(before, after, text) if after else form.prompt(before, text, ends=False)
        for (before, _, after), (_, text, _) in pairs
    ]
    prompts = [replace(prompt, encoder=[*begin, *prompt.encoder]) for prompt in prompts] if begin else prompts
    log_p = [found for found, _ in score(prompts)]
    loss = -sum(log_p[: len(own)])
    tokens = sum(len(text) for _, text, _ in own)
    size = sum(len(tokenizer.decode(text).encode()) for _, text, _ in own)
    metrics = {"loss": loss / tokens, "bits_per_byte": loss / math.log(2) / size}
    if len(own) > 1:
        metrics["other_context_loss"] = -sum(log_p[len(own) :]) / tokens
    return metrics


def _halves(text: list[int]) -> Parts:
    half = len(text) // 2
    return text[:half], text[half:], []


def _middle(text: list[int], tokens: int | None) -> Parts:
    """Cuts `tokens` out of the middle of a text, at most a third of the text. None: a third."""
    third = 2 * len(text) // 3 - len(text) // 3
    size = third if tokens is None else min(tokens, third)
    start = (len(text) - size) // 2
    return text[:start], text[start : start + size], text[start + size :]


def _texts(corpus: Corpus, most: int) -> list[list[int]]:
    """Up to `most` held-out rows as text ids."""
    rows = Reader(corpus, "validation", skip_damage=True).tokens(np.arange(min(most, corpus.rows("validation"))))
    texts = [row[:length].tolist() for row, length in zip(rows.values, rows.lengths.tolist(), strict=True)]
    texts = [text for text in texts if len(text) >= _LEAST]
    if not texts:
        raise UserError(f"{corpus.location}: no held-out row has {_LEAST} tokens")
    return texts
