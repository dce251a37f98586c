"""Loss on held-out rows, each exactly once whatever the number of ranks."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data_pipeline.corpus import Corpus
from data_pipeline.loading.batches import IGNORED, validation_batches
from data_pipeline.vocabulary import Vocabulary
from pretrain import watchdog
from pretrain.setup import Setup

if TYPE_CHECKING:
    from pretrain.engine import Engine

_METRICS = ("loss", "text_loss", "unigram_entropy")


def validation_loss(engine: "Engine", setup: Setup) -> dict[str, float]:
    """For each corpus, in nats per token:

    validation/NAME/loss: mean over all target tokens.
    validation/NAME/text_loss: over text tokens alone. Sentinels and end marks stand where they always stand and are
    learnt at once, so they flatter the mean.
    validation/NAME/unigram_entropy: of the same text tokens, the least that word counts alone can reach.

    With next-sentence prediction also validation/NAME/next_sentence_loss, in nats per row, and next_sentence_accuracy.
    """
    metrics: dict[str, float] = {}
    for corpus in setup.validation:
        metrics |= {
            f"validation/{corpus.name}/{name}": value for name, value in _of_corpus(engine, setup, corpus).items()
        }
    return metrics


def describe(corpora: list[Corpus], metrics: dict[str, float]) -> Iterator[str]:
    """One line for each corpus that `metrics` tell of: its loss on text beside what knows no context."""
    for corpus in corpora:
        if f"validation/{corpus.name}/loss" in metrics:
            loss, text, entropy = (metrics[f"validation/{corpus.name}/{name}"] for name in _METRICS)
            yield (
                f"validation on {corpus.name}: loss {loss:.4f}; on text tokens alone {text:.4f} "
                f"(word counts alone give {entropy:.4f}, ln(vocabulary) is {math.log(corpus.tokenizer.pieces):.4f})"
            )


def _of_corpus(engine: "Engine", setup: Setup, corpus: Corpus) -> dict[str, float]:
    vocabulary = corpus.tokenizer.vocabulary
    sums = torch.zeros(4, dtype=torch.float64, device=engine.device)  # loss, targets, loss of text, targets of text
    next_sentence = torch.zeros(3, dtype=torch.float64, device=engine.device)  # loss, rows, rows that are right
    counts = torch.zeros(vocabulary.size, dtype=torch.int64, device=engine.device)
    data = setup.config.data
    for batch in validation_batches(corpus, setup.cut, data.objective, data.on_damage == "skip"):
        watchdog.alive()
        every = engine.losses(batch)
        losses = every["labels"].double()
        labels = batch["labels"].to(engine.device)
        text = _is_text(labels, vocabulary)
        sums += torch.stack([losses.sum(), (labels != IGNORED).sum(), (losses * text).sum(), text.sum()])
        counts += torch.bincount(labels[text], minlength=vocabulary.size)
        if "next_sentence_labels" in batch:
            losses = every["next_sentence_labels"].double()
            told = batch["next_sentence_labels"].to(engine.device) != IGNORED
            right = told & (losses < math.log(2))  # of two classes, the likelier one has a loss below ln 2
            next_sentence += torch.stack([losses.sum(), told.sum(), right.sum()])
    for sum_ in (sums, next_sentence, counts):
        dist.all_reduce(sum_)
    loss, targets, text_loss, text_targets = sums.tolist()
    frequencies = counts[counts > 0].double() / text_targets
    entropy = float(-(frequencies * frequencies.log()).sum())
    metrics = dict(zip(_METRICS, (loss / targets, text_loss / text_targets, entropy), strict=True))
    loss, rows, right_rows = next_sentence.tolist()
    if rows:
        metrics |= {"next_sentence_loss": loss / rows, "next_sentence_accuracy": right_rows / rows}
    return metrics


def _is_text(labels: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Where a label stands for text, be it unknown."""
    first, end = vocabulary.text
    text = (labels >= first) & (labels < end)
    return text if vocabulary.unk is None else text | (labels == vocabulary.unk)
