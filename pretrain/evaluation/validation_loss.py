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
    """The metrics of each corpus, in nats per token; NaN if there are no such tokens.

    validation/NAME/loss: the mean over all target tokens.
    validation/NAME/text_loss: the mean over text tokens only. Sentinels and end marks are predictable and learnt
    quickly, so they lower the overall mean.
    validation/NAME/unigram_entropy: the entropy of the same text tokens, the lowest loss that word counts alone reach.
    validation/NAME/damaged_rows: the number of rows in damaged blocks, which are left out; absent if there are none.

    With next-sentence prediction, also validation/NAME/next_sentence_loss, in nats per row, and next_sentence_accuracy.
    """
    return {
        f"validation/{name}/{metric}": value
        for name, corpus in setup.validation.items()
        for metric, value in _of_corpus(engine, setup, corpus).items()
    }


def describe(corpora: dict[str, Corpus], metrics: dict[str, float]) -> Iterator[str]:
    """A line for each corpus in `metrics`, comparing its loss on text with that of predictions without context."""
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
            labelled = batch["next_sentence_labels"].to(engine.device) != IGNORED
            right = labelled & (losses < math.log(2))  # with two classes, the likelier one has a loss below ln 2
            next_sentence += torch.stack([losses.sum(), labelled.sum(), right.sum()])
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
    """Where a label is a text token, including unknown ones."""
    first, end = vocabulary.text
    text = (labels >= first) & (labels < end)
    return text if vocabulary.unk is None else text | (labels == vocabulary.unk)
