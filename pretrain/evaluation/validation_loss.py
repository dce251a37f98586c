"""Loss on held-out rows, each exactly once whatever the number of ranks."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data_pipeline.corpus import Corpus
from data_pipeline.loading.batches import IGNORED, validation_batches
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.run import watchdog
from pretrain.setup import Setup

if TYPE_CHECKING:
    from pretrain.zero.engine import Engine

_METRICS = ("loss", "text_loss", "unigram_entropy")


def validation_loss(engine: "Engine", setup: Setup) -> dict[str, float]:
    """For each corpus, in nats per token, not a number where there is none:

    validation/NAME/loss: mean over all target tokens.
    validation/NAME/text_loss: over text tokens alone. Sentinels and end marks stand where they always stand and are
    learnt at once, so they flatter the mean.
    validation/NAME/unigram_entropy: of the same text tokens, the least that word counts alone can reach.
    validation/NAME/damaged_rows: rows of damaged blocks, which are left out; only where there are any.

    With next-sentence prediction also validation/NAME/next_sentence_loss, in nats per row, and next_sentence_accuracy.
    """
    return {
        f"validation/{name}/{metric}": value
        for name, corpus in setup.validation.items()
        for metric, value in _of_corpus(engine, setup, corpus).items()
    }


def describe(corpora: dict[str, Corpus], metrics: dict[str, float]) -> Iterator[str]:
    """One line for each corpus that `metrics` tell of: its loss on text beside what knows no context."""
    for name, corpus in corpora.items():
        if f"validation/{name}/loss" in metrics:
            loss, text, entropy = (metrics[f"validation/{name}/{metric}"] for metric in _METRICS)
            yield (
                f"validation on {name}: loss {loss:.4f}; on text tokens alone {text:.4f} "
                f"(word counts alone give {entropy:.4f}, ln(vocabulary) is {math.log(corpus.tokenizer.pieces):.4f})"
            )
        if damaged := metrics.get(f"validation/{name}/damaged_rows"):
            yield (
                f"warning: validation on {name}: {damaged:.0f} of {corpus.rows('validation')} rows are damaged and "
                f"left out; data-pipeline verify {corpus.directory} names their blocks"
            )


def _of_corpus(engine: "Engine", setup: Setup, corpus: Corpus) -> dict[str, float]:
    vocabulary = corpus.tokenizer.vocabulary
    # loss, targets, loss of text, targets of text, rows with targets
    sums = torch.zeros(5, dtype=torch.float64, device=engine.device)
    next_sentence = torch.zeros(3, dtype=torch.float64, device=engine.device)  # loss, rows, rows that are right
    counts = torch.zeros(vocabulary.size, dtype=torch.int64, device=engine.device)
    data = setup.config.data
    for batch in validation_batches(corpus, setup.cut, data.objective, data.on_damage == "skip"):
        watchdog.alive()
        every = engine.losses(batch)
        losses = every["labels"].double()
        labels = batch["labels"].to(engine.device)
        text, counted = _is_text(labels, vocabulary), labels != IGNORED
        rows = counted.any(dim=1)
        sums += torch.stack([losses.sum(), counted.sum(), (losses * text).sum(), text.sum(), rows.sum()])
        counts += torch.bincount(labels[text], minlength=vocabulary.size)
        if "next_sentence_labels" in batch:
            losses = every["next_sentence_labels"].double()
            told = batch["next_sentence_labels"].to(engine.device) != IGNORED
            right = told & (losses < math.log(2))  # of two classes, the likelier one has a loss below ln 2
            next_sentence += torch.stack([losses.sum(), told.sum(), right.sum()])
    for sum_ in (sums, next_sentence, counts):
        dist.all_reduce(sum_)
    loss, targets, text_loss, text_targets, whole_rows = sums.tolist()
    frequencies = counts[counts > 0].double() / text_targets
    entropy = float(-(frequencies * frequencies.log()).sum()) if text_targets else math.nan
    metrics = dict(zip(_METRICS, (_mean(loss, targets), _mean(text_loss, text_targets), entropy), strict=True))
    loss, rows, right_rows = next_sentence.tolist()
    if rows:
        metrics |= {"next_sentence_loss": loss / rows, "next_sentence_accuracy": right_rows / rows}
    if damaged := corpus.rows("validation") - whole_rows:
        metrics["damaged_rows"] = damaged
    return metrics


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _is_text(labels: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Where a label stands for text, be it unknown."""
    first, end = vocabulary.text
    text = (labels >= first) & (labels < end)
    return text if vocabulary.unk is None else text | (labels == vocabulary.unk)
