"""Batches for one rank: the same global batches for every number of ranks and workers."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.loading.cut import Cut
from data_pipeline.loading.mixing import Mixture
from data_pipeline.loading.order import EpochOrder
from data_pipeline.loading.reader import Reader
from data_pipeline.manifest import Corpus
from data_pipeline.objectives import Examples, Objective, together

Batch = dict[str, torch.Tensor]
IGNORED = -100  # a label that counts for nothing


class TrainingBatches(Dataset):
    """Micro-batches of one rank, by number: number `step` × accumulation + k is the k-th of that step.

    Position p of the run is a row for good: step s takes positions s·G … (s+1)·G − 1 of a global batch size G, each
    rank a stretch of them.
    """

    def __init__(
        self,
        corpora: list[Corpus],
        weights: list[float],
        cut: Cut,
        seed: int,
        lanes: int,
        objective: Objective | None = None,
    ):
        self._arguments = (corpora, weights, cut, seed, lanes, objective)
        self._readers = [Reader(corpus, "train", objective, cached=lanes + 2) for corpus in corpora]
        self._pad = corpora[0].tokenizer.vocabulary.pad
        self._rows = np.array([corpus.rows("train") for corpus in corpora])
        self._mixture = Mixture(weights)
        self._cut, self._seed, self._lanes = cut, seed, lanes
        self._orders: dict[tuple[int, int], EpochOrder] = {}

    def __reduce__(self) -> tuple[type, tuple]:
        """A worker process makes readers and caches of its own."""
        return type(self), self._arguments

    def __getitem__(self, number: int) -> Batch:
        step, micro = divmod(number, self._cut.accumulation)
        start = step * self._cut.global_batch
        start += (self._cut.rank * self._cut.accumulation + micro) * self._cut.micro_batch
        return self._batch(np.arange(start, start + self._cut.micro_batch))

    def loader(self, first_step: int, last_step: int, workers: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step from `first_step` up to, not including, `last_step`."""
        accumulation = self._cut.accumulation
        micro_batches = iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=range(first_step * accumulation, last_step * accumulation),
                num_workers=workers,
                multiprocessing_context="forkserver" if workers else None,
                prefetch_factor=4 if workers else None,
                generator=torch.Generator(),  # its own: the global generator is not touched
                pin_memory=torch.cuda.is_available(),
            )
        )
        for _ in range(first_step, last_step):
            yield [next(micro_batches) for _ in range(accumulation)]

    def consumed(self, step: int) -> list[int]:
        """Rows of each corpus that stand before `step`: the whole state of the order."""
        return self._mixture.consumed(step * self._cut.global_batch)

    def row_ids(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(corpus, epoch, row id), each (n,), at `positions` (n,) of the run."""
        corpora, places = self._mixture.deal(positions)
        epochs, inside = np.divmod(places, self._rows[corpora])
        ids = np.empty(len(positions), dtype=np.int64)
        for corpus, epoch in set(zip(corpora.tolist(), epochs.tolist(), strict=True)):
            chosen = (corpora == corpus) & (epochs == epoch)
            ids[chosen] = self._order(corpus, epoch).row_ids(inside[chosen])
        return corpora, epochs, ids

    def _batch(self, positions: np.ndarray) -> Batch:
        corpora, epochs, ids = self.row_ids(positions)
        parts = [
            (chosen, reader.examples(ids[chosen], epochs[chosen]))
            for corpus, reader in enumerate(self._readers)
            if len(chosen := np.flatnonzero(corpora == corpus))
        ]
        return as_batch(together(parts, self._pad), self._pad)

    def _order(self, corpus: int, epoch: int) -> EpochOrder:
        if (corpus, epoch) not in self._orders:
            self._orders = {
                key: order for key, order in self._orders.items() if key[0] != corpus or key[1] == epoch - 1
            }
            self._orders[corpus, epoch] = EpochOrder(self._readers[corpus].blocks, self._lanes, self._seed, epoch)
        return self._orders[corpus, epoch]


def validation_batches(corpus: Corpus, cut: Cut, objective: Objective | None = None) -> Iterator[Batch]:
    """Each held-out row exactly once over all ranks, noise always epoch 0's; as many batches on every rank.

    The rows that fill the last batches up have all labels `IGNORED`.
    """
    reader = Reader(corpus, "validation", objective)
    total = corpus.rows("validation")
    stride = cut.ranks * cut.micro_batch
    for start in range(0, total, stride):
        ids = np.arange(start, start + stride)[cut.rank * cut.micro_batch :][: cut.micro_batch]
        batch = as_batch(reader.examples(np.minimum(ids, total - 1), 0), corpus.tokenizer.vocabulary.pad)
        batch["labels"][torch.from_numpy(ids >= total)] = IGNORED
        yield batch


def as_batch(examples: Examples, pad: int) -> Batch:
    """`encoder_input_ids` (n, inputs), padded with `pad`, and `labels` (n, targets), padded with `IGNORED`; int64.

    The `encoder_attention_mask` (n, inputs), 1 at real tokens, is left out where nothing is padded.
    """
    filled = examples.inputs.filled
    counted = examples.targets.filled if examples.predicted is None else examples.predicted
    batch = {
        "encoder_input_ids": torch.from_numpy(np.where(filled, examples.inputs.values, pad).astype(np.int64)),
        "labels": torch.from_numpy(np.where(counted, examples.targets.values.astype(np.int64), IGNORED)),
    }
    if not filled.all():
        batch["encoder_attention_mask"] = torch.from_numpy(filled.astype(np.int64))
    return batch
