"""The loss on held-out rows, each counted exactly once on any number of ranks. Also the loss by groups of targets:
early or late in a row, in short or long spans, of common or rare tokens."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data_pipeline.corpus import Corpus
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.evaluation import LossBreakdownSettings, ValidationLossSettings
from pretrain.evaluate.hook import Evaluation, Findings, Row
from pretrain.evaluate.record import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_METRICS = ("loss", "text_loss", "unigram_entropy")


class ValidationLoss:
    """The metrics of each corpus, in nats per token; NaN if there are no such tokens.

    validation/NAME/loss: the mean over all target tokens.
    validation/NAME/text_loss: the mean over text tokens only. Sentinels and EOS tokens are predictable and learnt
    quickly, so they lower the overall mean.
    validation/NAME/perplexity: e to the power of the text loss.
    validation/NAME/accuracy: the share of target tokens that are the model's likeliest ids.
    validation/NAME/unigram_entropy: the entropy of the same text tokens, the lowest loss that token frequencies
    without context reach.
    validation/NAME/damaged_rows: the number of rows in damaged blocks, which are left out; absent if there are none.

    With next-sentence prediction, also validation/NAME/next_sentence_loss, in nats per row, and next_sentence_accuracy.
    """

    def __init__(self, settings: ValidationLossSettings):
        self._rows = settings.rows

    def evaluate(self, evaluation: Evaluation) -> Findings:
        metrics: dict[str, float] = {}
        lines: list[str] = []
        for name, corpus in evaluation.held_out.corpora.items():
            found = _corpus_metrics(evaluation, corpus, self._rows)
            metrics |= {f"validation/{name}/{metric}": value for metric, value in found.items()}
            lines += _lines(name, corpus, found)
        return Findings(metrics, lines=lines)


def _lines(name: str, corpus: Corpus, metrics: dict[str, float]) -> Iterator[str]:
    """Compares the loss on text with that of predictions without context."""
    loss, text, unigrams = (metrics[metric] for metric in _METRICS)
    size = corpus.tokenizer.vocab_size
    yield (
        f"validation on {name}: loss {loss:.4f}; text loss {text:.4f} (perplexity {_power(text):,.0f}), "
        f"unigrams {unigrams:.4f} ({_power(unigrams):,.0f}), uniform {math.log(size):.4f} ({size:,})"
    )
    if damaged := metrics.get("damaged_rows"):
        yield (
            f"warning: validation on {name}: {damaged:.0f} of {corpus.rows('validation')} rows are damaged and "
            f"left out; data-pipeline verify {corpus.location} names their blocks"
        )


def _corpus_metrics(evaluation: Evaluation, corpus: Corpus, most_rows: int | None) -> dict[str, float]:
    vocabulary, device = corpus.tokenizer.vocabulary, evaluation.subject.device
    # loss, targets, loss of text, targets of text, rows with targets, hits
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    next_sentence = torch.zeros(3, dtype=torch.float64, device=device)  # loss, rows, rows that are right
    counts = torch.zeros(vocabulary.size, dtype=torch.int64, device=device)
    for batch in evaluation.batches(corpus, most_rows):
        every, hit = evaluation.losses_and_hits(batch)
        losses = every["labels"].double()
        labels = batch["labels"].to(device)
        text, counted = is_text(labels, vocabulary), labels != IGNORE_INDEX
        rows = counted.any(dim=1)
        sums += torch.stack([losses.sum(), counted.sum(), (losses * text).sum(), text.sum(), rows.sum(), hit.sum()])
        counts += torch.bincount(labels[text], minlength=vocabulary.size)
        if "next_sentence_labels" in batch:
            losses = every["next_sentence_labels"].double()
            labelled = batch["next_sentence_labels"].to(device) != IGNORE_INDEX
            right = labelled & (losses < math.log(2))  # with two classes, the likelier one has a loss below ln 2
            next_sentence += torch.stack([losses.sum(), labelled.sum(), right.sum()])
    sums, next_sentence, counts = map(evaluation.sum, (sums, next_sentence, counts))
    loss, targets, text_loss, text_targets, whole_rows, hits = sums.tolist()
    metrics = dict(zip(_METRICS, (_mean(loss, targets), _mean(text_loss, text_targets), entropy(counts)), strict=True))
    metrics |= {"perplexity": _power(metrics["text_loss"]), "accuracy": _mean(hits, targets)}
    loss, rows, right_rows = next_sentence.tolist()
    if rows:
        metrics |= {"next_sentence_loss": loss / rows, "next_sentence_accuracy": right_rows / rows}
    complete = most_rows is None and not evaluation.collectives.late
    if complete and (damaged := corpus.rows("validation") - whole_rows):
        metrics["damaged_rows"] = damaged
    return metrics


def _power(loss: float) -> float:
    """The perplexity of a loss in nats."""
    return math.exp(min(loss, 700.0))


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


_POWERS = 21  # bins: [0], [1], [2, 3], [4 … 7], … up to a million


class LossBreakdown:
    """A table `loss_breakdown` and a picture of it for each corpus. All groups are by powers of two.

    - position: of a target in its row, from 0.
    - span length: of the masked span that a text token fills, in tokens, where targets have sentinels.
    - frequency: how often a text token occurs among these targets.
    """

    def __init__(self, settings: LossBreakdownSettings):
        self._settings = settings

    def evaluate(self, evaluation: Evaluation) -> Findings:
        tables: list[Row] = []
        images: dict[str, Figure] = {}
        for name, corpus in evaluation.held_out.corpora.items():
            bins = self._corpus_bins(evaluation, corpus)
            tables += [{"corpus": name, **one} for one in bins]
            if evaluation.held_out.layout.rank == 0:
                images[f"loss_breakdown/{name}"] = _figure(bins, f"{name}, step {evaluation.step}")
        return Findings(tables={"loss_breakdown": tables}, images=images)

    def _corpus_bins(self, evaluation: Evaluation, corpus: Corpus) -> list[Row]:
        vocabulary, device = corpus.tokenizer.vocabulary, evaluation.subject.device
        # (targets, their loss, those that the model finds likeliest) for each bin, and for each token
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


def is_text(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Where a label is a text token, including unknown ones."""
    first, end = vocabulary.text
    text = (labels >= first) & (labels < end)
    return text if vocabulary.unk is None else text | (labels == vocabulary.unk)


def is_sentinel(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Where a label is a sentinel."""
    return (labels >= vocabulary.sentinel_ids.start) & (labels < vocabulary.sentinel_ids.stop)


def entropy(counts: Tensor) -> float:
    """The entropy in nats of a token whose frequencies are those of `counts` (ids,); NaN if all are 0."""
    frequencies = counts[counts > 0].double() / counts.sum()
    return float(-(frequencies * frequencies.log()).sum()) if len(frequencies) else math.nan


def span_lengths(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """For each text token after a sentinel in labels (batch, length), the tokens of its span; 0 elsewhere.

    With sentinels S: [S, 7, 8, S, 9, eos, -100] → [0, 2, 2, 0, 1, 0, 0]
    """
    text = is_text(labels, vocabulary)
    span = is_sentinel(labels, vocabulary).cumsum(dim=1)  # from 1; 0 before the first sentinel
    lengths = torch.zeros(labels.size(0), labels.size(1) + 1, dtype=torch.long, device=labels.device)
    lengths.scatter_add_(1, span, text.long())
    return lengths.gather(1, span) * (text & (span > 0))


def _bins(by: str, sums: Tensor) -> Iterator[Row]:
    """The groups of targets: what they are `by`, their `bin`, number of tokens, mean loss in nats and accuracy."""
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
