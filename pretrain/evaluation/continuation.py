"""How well a model continues texts: the likelihood of the second half of held-out rows after the first half."""

import math
from collections.abc import Sequence

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.reader import Reader
from data_pipeline.tokenizer import Tokenizer
from pretrain.config.evaluation import ContinuationSettings
from pretrain.evaluation.hook import Evaluation, Findings
from pretrain.evaluation.prompt_format import PromptFormat
from pretrain.evaluation.prompt_scores import PromptScores

_LEAST = 3  # tokens of a text


class Continuation:
    """The metrics of each corpus. All families are asked for the same tokens, each in the form of its training.

    continuation/NAME/loss: nats per token of the second halves, after their first halves. No EOS is scored.
    continuation/NAME/other_context_loss: the same after the first half of another row.
    continuation/NAME/bits_per_byte: the loss in bits per byte of the second halves' text.
    infilling/NAME/…: the same of the middle thirds between the first and the last, for models that fill in blanks.
    """

    def __init__(self, settings: ContinuationSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> Findings:
        metrics: dict[str, float] = {}
        lines: list[str] = []
        with evaluation.whole_model() as model:
            for name, corpus in evaluation.held_out.corpora.items():
                form = PromptFormat.choose(
                    model.config, corpus.tokenizer.vocabulary, self._settings.form, corpus.objective.name
                )
                texts = _texts(corpus, self._settings.rows)
                for task in ("continuation", "infilling") if form.has_blanks else ("continuation",):
                    score = PromptScores(form, evaluation, evaluation.held_out.layout.micro_batch)
                    found = _scored(texts, task, form, score, corpus.tokenizer)
                    metrics |= {f"{task}/{name}/{metric}": value for metric, value in found.items()}
                    losses = f"{found['loss']:.3f} nats a token, {found['other_context_loss']:.3f} with another context"
                    lines.append(f"{task} of {name}: {found['bits_per_byte']:.3f} bits a byte; {losses}")
        return Findings(metrics, lines=lines)


def _scored(
    texts: Sequence[list[int]], task: str, form: PromptFormat, score: PromptScores, tokenizer: Tokenizer
) -> dict[str, float]:
    """Of the second half or the middle third of each text, in its own context and in that of another text."""
    own = [_cut(text, task) for text in texts]
    others = [*own[len(own) // 2 :], *own[: len(own) // 2]]
    pairs = [*zip(own, own, strict=True), *zip(others, own, strict=True)]
    prompts = [
        form.prompt(before, text, ends=False) if task == "continuation" else form.infilling(before, after, text)
        for (before, _, after), (_, text, _) in pairs
    ]
    log_p = [found for found, _ in score(prompts)]
    loss, other = -sum(log_p[: len(own)]), -sum(log_p[len(own) :])
    tokens = sum(len(text) for _, text, _ in own)
    size = sum(len(tokenizer.decode(text).encode()) for _, text, _ in own)
    return {"loss": loss / tokens, "other_context_loss": other / tokens, "bits_per_byte": loss / math.log(2) / size}


def _cut(text: list[int], task: str) -> tuple[list[int], list[int], list[int]]:
    """What stands before the part to score, that part, and what stands after it."""
    start, end = (len(text) // 2, len(text)) if task == "continuation" else (len(text) // 3, 2 * len(text) // 3)
    return text[:start], text[start:end], text[end:]


def _texts(corpus: Corpus, most: int) -> list[list[int]]:
    """Up to `most` held-out rows, as ids without special tokens."""
    rows = Reader(corpus, "validation", skip_damage=True).tokens(np.arange(min(most, corpus.rows("validation"))))
    texts = [row[:length].tolist() for row, length in zip(rows.values, rows.lengths.tolist(), strict=True)]
    texts = [text for text in texts if len(text) >= _LEAST]
    if not texts:
        raise UserError(f"{corpus.directory}: no held-out row has {_LEAST} tokens")
    return texts
