"""The hook `loss_breakdown`: held-out loss by position of a target, by length of its span and by frequency of the
token."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data_pipeline.corpus import Corpus
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.text.vocabulary import Vocabulary
from diagnostics.settings import LossBreakdownSettings
from pretrain.evaluate.hook import EvalResult, Evaluation, Row
from pretrain.evaluate.record import new_figure
from pretrain.evaluate.validation_loss import is_sentinel, is_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POWERS = 21  # bins: [0], [1], [2, 3], [4 … 7], … up to a million


class LossBreakdown:
    """A table `loss_breakdown`, and a picture for each corpus. Groups are bins between powers of two.

    - position: the target's position in its row, from 0.
    - span length: tokens of the masked span that a text token is in, if targets have sentinels.
    - frequency: how often a text token occurs among these targets.
    """

    def __init__(self, settings: LossBreakdownSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        tables: list[Row] = []
        images: dict[str, Figure] = {}
        for name, corpus in evaluation.held_out.corpora.items():
            bins = self._corpus_bins(evaluation, corpus)
            tables += [{"corpus": name, **one} for one in bins]
            if evaluation.held_out.layout.rank == 0:
                images[f"loss_breakdown/{name}"] = _figure(bins, f"{name}, step {evaluation.step}")
        return EvalResult(tables={"loss_breakdown": tables}, images=images)

    def _corpus_bins(self, evaluation: Evaluation, corpus: Corpus) -> list[Row]:
        vocabulary, device = corpus.tokenizer.vocabulary, evaluation.model.device
        # (targets, their loss, hits) for each bin, and for each token
        positions, spans = (torch.zeros(_POWERS, 3, dtype=torch.float64, device=device) for _ in range(2))
        tokens = torch.zeros(vocabulary.size, 3, dtype=torch.float64, device=device)
        for batch in evaluation.batches(corpus, self._settings.rows):
            losses, hits = evaluation.losses_and_hits(batch)
            labels = batch["labels"].to(device)
            values = torch.stack([torch.ones_like(losses["labels"]), losses["labels"], hits], dim=-1).double()
            counted, text = labels != IGNORE_INDEX, is_text(labels, vocabulary)
            indices = torch.arange(labels.size(1), device=device).expand_as(labels)
            positions.index_add_(0, power_of_two(indices[counted]), values[counted])
            tokens.index_add_(0, labels[text], values[text])
            if vocabulary.sentinels:
                lengths = span_lengths(labels, vocabulary)
                in_span = lengths > 0
                spans.index_add_(0, power_of_two(lengths[in_span]), values[in_span])
        positions, spans, tokens = map(evaluation.sum, (positions, spans, tokens))
        frequencies = torch.zeros_like(positions).index_add_(0, power_of_two(tokens[:, 0].long()), tokens)
        grouped = {"position": positions, "span length": spans, "frequency": frequencies}
        return [one for by, sums in grouped.items() for one in _bins(by, sums)]


def power_of_two(values: Tensor) -> Tensor:
    """The bins of whole numbers: 0 → 0, 1 → 1, 2 and 3 → 2, 4 to 7 → 3, …"""
    return torch.frexp(values.double()).exponent.long().clamp(max=_POWERS - 1)


def span_lengths(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """For each text token after a sentinel in labels (batch, length), the length of its span; 0 elsewhere.

    With sentinels S: [S, 7, 8, S, 9, eos, -100] → [0, 2, 2, 0, 1, 0, 0]
    """
    text = is_text(labels, vocabulary)
    span = is_sentinel(labels, vocabulary).cumsum(dim=1)  # from 1; 0 before the first sentinel
    lengths = torch.zeros(labels.size(0), labels.size(1) + 1, dtype=torch.long, device=labels.device)
    lengths.scatter_add_(1, span, text.long())
    return lengths.gather(1, span) * (text & (span > 0))


def _bins(by: str, sums: Tensor) -> Iterator[Row]:
    """The rows of the table for one way of grouping, with the mean loss in nats."""
    for number, (tokens, loss, hits) in enumerate(sums.tolist()):
        if tokens:
            first, last = (0, 0) if number == 0 else (2 ** (number - 1), 2**number - 1)
            label = str(first) if first == last else f"{first}–{last}"
            yield {"by": by, "bin": label, "tokens": int(tokens), "loss": loss / tokens, "accuracy": hits / tokens}


def _figure(bins: list[Row], title: str) -> "Figure":
    """Bars of loss, one panel for each way of grouping, with the accuracy above each bar."""
    ways = list(dict.fromkeys(one["by"] for one in bins))
    figure = new_figure(4.5 * max(len(ways), 1), 3.5)
    figure.suptitle(f"{title}: loss, and accuracy above the bars")
    for number, by in enumerate(ways, 1):
        axes = figure.add_subplot(1, len(ways), number)
        shown = [one for one in bins if one["by"] == by]
        bars = axes.bar([one["bin"] for one in shown], [one["loss"] for one in shown], color="tab:blue")
        axes.bar_label(bars, [f"{one['accuracy']:.0%}" for one in shown], fontsize=7)
        axes.set_xlabel(by)
        axes.tick_params(axis="x", labelrotation=60, labelsize=7)
        axes.set_ylabel("nats per token" if number == 1 else "")
    return figure
