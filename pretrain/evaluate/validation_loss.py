"""The hook `validation_loss`: loss, perplexity and accuracy on held-out rows, the same on any number of ranks."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from data_pipeline.corpus import Corpus
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.evaluation import ValidationLossSettings
from pretrain.evaluate.hook import EvalResult, Evaluation

_METRICS = ("loss", "text_loss", "unigram_entropy")


class ValidationLoss:
    """The metrics `validation/NAME/…` of each corpus, in nats per token; NaN without tokens.

    loss: the mean over all target tokens.
    text_loss: the mean over text tokens only. Models soon predict sentinels and EOS tokens, which lower `loss`.
    perplexity: e to the power of `text_loss`.
    accuracy: the share of target tokens that are the model's likeliest ids.
    unigram_entropy: the entropy of the text tokens. Without context no prediction by token frequencies has a lower
        loss.
    damaged_rows: the number of rows without targets: rows in damaged blocks, and rows too short for the objective.
        Absent if it is 0.
    """

    def __init__(self, settings: ValidationLossSettings):
        self._rows = settings.rows

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        metrics: dict[str, float] = {}
        lines: list[str] = []
        for name, corpus in evaluation.held_out.corpora.items():
            found = _corpus_metrics(evaluation, corpus, self._rows)
            metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
            lines += _lines(name, corpus, found)
        return EvalResult(metrics, lines=lines)


def _lines(name: str, corpus: Corpus, metrics: dict[str, float]) -> Iterator[str]:
    """A line that compares the loss on text with predictions without context, and a warning of rows without targets."""
    loss, text, unigrams = (metrics[metric] for metric in _METRICS)
    size = corpus.tokenizer.vocab_size
    yield (
        f"validation on {name}: loss {loss:.4f}; text loss {text:.4f} (perplexity {_power(text):,.0f}), "
        f"unigrams {unigrams:.4f} ({_power(unigrams):,.0f}), uniform {math.log(size):.4f} ({size:,})"
    )
    if damaged := metrics.get("damaged_rows"):
        yield (
            f"warning: validation on {name}: {damaged:.0f} of {corpus.rows('validation')} rows have no targets "
            f"(damaged, or too short for the objective); data-pipeline verify {corpus.location} names damaged blocks"
        )


def _corpus_metrics(evaluation: Evaluation, corpus: Corpus, most_rows: int | None) -> dict[str, float]:
    vocabulary, device = corpus.tokenizer.vocabulary, evaluation.model.device
    # loss, targets, loss of text, targets of text, rows with targets, hits
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    counts = torch.zeros(vocabulary.size, dtype=torch.int64, device=device)
    for batch in evaluation.batches(corpus, most_rows):
        every, hit = evaluation.losses_and_hits(batch)
        losses = every["labels"].double()
        labels = batch["labels"].to(device)
        text, counted = is_text(labels, vocabulary), labels != IGNORE_INDEX
        rows = counted.any(dim=1)
        sums += torch.stack([losses.sum(), counted.sum(), (losses * text).sum(), text.sum(), rows.sum(), hit.sum()])
        counts += torch.bincount(labels[text], minlength=vocabulary.size)
    sums, counts = map(evaluation.sum, (sums, counts))
    loss, targets, text_loss, text_targets, whole_rows, hits = sums.tolist()
    metrics = dict(zip(_METRICS, (_mean(loss, targets), _mean(text_loss, text_targets), entropy(counts)), strict=True))
    metrics |= {"perplexity": _power(metrics["text_loss"]), "accuracy": _mean(hits, targets)}
    complete = most_rows is None and not evaluation.collectives.late
    if complete and (damaged := corpus.rows("validation") - whole_rows):
        metrics["damaged_rows"] = damaged
    return metrics


def _power(loss: float) -> float:
    """The perplexity of a loss in nats."""
    return math.exp(min(loss, 700.0))


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def is_text(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """True where a label is a text token, or the unknown token."""
    first, end = vocabulary.text
    text = (labels >= first) & (labels < end)
    return text if vocabulary.unk is None else text | (labels == vocabulary.unk)


def is_sentinel(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """True where a label is a sentinel."""
    return (labels >= vocabulary.sentinel_ids.start) & (labels < vocabulary.sentinel_ids.stop)


def entropy(counts: Tensor) -> float:
    """The entropy, in nats, of tokens that occur `counts` (ids,) times; NaN if all counts are 0."""
    frequencies = counts[counts > 0].double() / counts.sum()
    return float(-(frequencies * frequencies.log()).sum()) if len(frequencies) else math.nan
