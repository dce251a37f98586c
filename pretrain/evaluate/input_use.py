"""The hook `input_use`: the held-out loss with the right input, with another row's input, and without input."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.objectives.objective import Examples
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch
from data_pipeline.loading.reader import Reader
from data_pipeline.text.vocabulary import Vocabulary
from pretrain.config.evaluation import InputUseSettings
from pretrain.evaluate.hook import EvalResult, Evaluation
from pretrain.evaluate.validation_loss import entropy, is_sentinel, is_text

_INPUT = "encoder_"
_TRAINING_ROWS = 20_000  # rows in which bigrams are counted
_DISCOUNT = 0.75  # absolute discounting takes this from each count, for unigrams (Ney et al. 1994)


class InputUse:
    """The metrics `input_use/NAME/…` of each corpus with two held-out rows or more, in nats per text token; NaN without
    text tokens.

    loss: the mean with the right input.
    other_input_loss: the mean with the input of the row half a split away.
    no_input_loss: the mean with EOS as the whole input.
    worth: other_input_loss − loss; 0 for a decoder that doesn't use its input.
    first_token_loss, first_token_worth: these for the first token of each span, if targets have sentinels. Only the
    input tells anything about a first token.
    later_token_loss, later_token_worth: these for the later tokens of a span, about which earlier tokens tell much.
    unigram_entropy: the entropy of the text tokens, by their own frequencies in the held-out rows.
    bigram_entropy: the cross-entropy of a bigram model, which predicts each token from the token before it. The bigrams
    are counted in the targets of up to 20,000 training rows. A decoder without input can reach this loss. It may be
    above unigram_entropy, which no model reaches that knows the training rows alone.
    """

    def __init__(self, settings: InputUseSettings):
        self._rows = settings.rows
        self._bigrams: dict[str, Bigrams] = {}  # by corpus; training text doesn't change

    def evaluate(self, evaluation: Evaluation) -> EvalResult:
        metrics: dict[str, float] = {}
        lines: list[str] = []
        for name, corpus in evaluation.held_out.corpora.items():
            if corpus.rows("validation") < 2:
                lines.append(f"input use on {name}: left out, since one held-out row has no other row's input")
                continue
            if name not in self._bigrams:
                self._bigrams[name] = Bigrams.of_training_rows(corpus)
            found, rows = self._of_corpus(evaluation, corpus, self._bigrams[name])
            metrics |= {f"input_use/{name}/{metric}": value for metric, value in found.items()}
            lines += _lines(name, found, rows, corpus.rows("validation"))
        return EvalResult(metrics, lines=lines)

    def _of_corpus(self, evaluation: Evaluation, corpus: Corpus, bigrams: "Bigrams") -> tuple[dict[str, float], int]:
        """The metrics by the last part of their names, and the number of rows."""
        vocabulary, device = corpus.tokenizer.vocabulary, evaluation.model.device
        sums = torch.zeros(2, 4, dtype=torch.float64, device=device)  # (first or later, three losses and tokens)
        counts = torch.zeros(vocabulary.size, dtype=torch.int64, device=device)
        bigram_loss = torch.zeros(1, dtype=torch.float64, device=device)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        others = evaluation.batches(corpus, self._rows, shift=corpus.rows("validation") // 2)
        batches = evaluation.batches(corpus, self._rows)
        for batch, other in zip(batches, others, strict=False):  # both end early once the budget is spent
            if "encoder_segment_ids" in batch:
                raise UserError("rows of several examples: their inputs can't be exchanged")
            labels = batch["labels"].to(device)
            text = is_text(labels, vocabulary)
            rows += (labels != IGNORE_INDEX).any(dim=1).sum()
            first = text & first_of_spans(labels, vocabulary)
            inputs = (batch, with_input_of(batch, other), without_input(batch, vocabulary.eos))
            losses = torch.stack([evaluation.losses(one)["labels"].double() for one in inputs])
            for group, chosen in enumerate((first, text & ~first)):
                sums[group, :3] += (losses * chosen).sum(dim=(1, 2))
                sums[group, 3] += chosen.sum()
            counts += torch.bincount(labels[text], minlength=vocabulary.size)
            bigram_loss += bigrams.losses(batch["labels"].numpy())[text.cpu().numpy()].sum()
        sums, counts, bigram_loss, rows = map(evaluation.sum, (sums, counts, bigram_loss, rows))
        tokens = float(sums[:, 3].sum())
        loss, other_loss, no_loss = _means(sums.sum(dim=0))
        metrics = {"loss": loss, "other_input_loss": other_loss, "no_input_loss": no_loss, "worth": other_loss - loss}
        for name, of_group in zip(("first", "later"), sums, strict=True) if vocabulary.sentinels else ():
            loss, other_loss, _ = _means(of_group)
            metrics |= {f"{name}_token_loss": loss, f"{name}_token_worth": other_loss - loss}
        metrics["unigram_entropy"] = entropy(counts)
        metrics["bigram_entropy"] = float(bigram_loss) / tokens if tokens else math.nan
        return metrics, int(rows)


def with_input_of(batch: Batch, other: Batch) -> Batch:
    """The targets of `batch` with the inputs of `other`."""
    targets = {name: tensor for name, tensor in batch.items() if not name.startswith(_INPUT)}
    inputs = {name: tensor for name, tensor in other.items() if name.startswith(_INPUT)}
    return inputs | targets


def without_input(batch: Batch, eos: int) -> Batch:
    """The targets of `batch` with EOS as the whole input: attention needs a key."""
    return with_input_of(batch, {"encoder_input_ids": torch.full((len(batch["labels"]), 1), eos)})


def first_of_spans(labels: Tensor, vocabulary: Vocabulary) -> Tensor:
    """True where a label in (batch, length) follows a sentinel."""
    return torch.nn.functional.pad(is_sentinel(labels, vocabulary)[:, :-1], (1, 0))


def training_examples(corpus: Corpus) -> Iterator[Examples]:
    """The examples of up to 20,000 training rows, with the first epoch's noise, 1,024 at a time."""
    reader, rows = Reader(corpus, "train", skip_damage=True), min(corpus.rows("train"), _TRAINING_ROWS)
    for start in range(0, rows, 1024):
        yield reader.examples(np.arange(start, min(start + 1024, rows)), 0)


class Bigrams:
    """A bigram model of targets, by absolute discounting: p(b | a) = max(n(a b) − ¾, 0) ÷ n(a) + the rest × p(b).

    `targets`: (rows, length), with `IGNORE_INDEX` in padding. For p(b), each of the `size` ids counts once more.
    """

    def __init__(self, targets: Iterator[np.ndarray], size: int):
        self._size, self._pairs = size, csr_array((size + 1, size), dtype=np.int64)
        unigrams = np.ones(size)
        for labels in targets:
            before, after = _pairs(labels, size)
            real = after != IGNORE_INDEX
            unigrams += np.bincount(after[real], minlength=size)
            self._pairs += csr_array((np.ones(real.sum(), np.int64), (before[real], after[real])), self._pairs.shape)
        self._unigrams = unigrams / unigrams.sum()
        self._after = self._pairs.sum(axis=1)  # how often each id comes first
        self._kinds = np.diff(self._pairs.indptr)  # and with how many different ids after it

    @classmethod
    def of_training_rows(cls, corpus: Corpus) -> "Bigrams":
        found = (examples.targets for examples in training_examples(corpus))
        targets = (np.where(one.filled, one.values.astype(np.int64), IGNORE_INDEX) for one in found)
        return cls(targets, corpus.tokenizer.vocabulary.size)

    def losses(self, labels: np.ndarray) -> np.ndarray:
        """−ln p (rows, length) of each label after the label before it; 0 in padding."""
        before, after = (ids.reshape(labels.shape) for ids in _pairs(labels, self._size))
        real = after != IGNORE_INDEX
        before, after = before[real], after[real]
        counts = np.maximum(self._pairs[before, after] - _DISCOUNT, 0.0)
        total = np.maximum(self._after[before], 1)
        left = np.where(self._after[before] > 0, _DISCOUNT * self._kinds[before] / total, 1.0)
        losses = np.zeros(labels.shape)
        losses[real] = -np.log(counts / total + left * self._unigrams[after])
        return losses


def _pairs(labels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(id before, id) of each label in (rows, length), flattened. The id before a row's first label is `size`."""
    before = np.concatenate([np.full((len(labels), 1), size), labels[:, :-1]], axis=1)
    return before.ravel(), labels.ravel()


def _means(sums: Tensor) -> list[float]:
    *losses, tokens = sums.tolist()
    return [loss / tokens if tokens else math.nan for loss in losses]


def _lines(name: str, found: dict[str, float], rows: int, held_out: int) -> list[str]:
    if math.isnan(found["loss"]):
        return [f"input use on {name}: its targets have no text"]
    worth = found.get("first_token_worth")
    of_first = f", {worth:.2f} at the first token of a span" if worth is not None else ""
    of = f"{rows:,} of {held_out:,}" if rows < held_out else f"all {held_out:,}"
    return [
        f"input use on {name}, {of} held-out rows: {found['worth']:.2f} nats/token{of_first} (text loss "
        f"{found['loss']:.4f}; with another row's input {found['other_input_loss']:.4f}, without input "
        f"{found['no_input_loss']:.4f}, bigrams of training rows {found['bigram_entropy']:.4f})"
    ]
