"""Batches for one rank: the same global batches for every number of ranks and workers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat, tee

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.example_rows import balanced, width_of
from data_pipeline.corpus.objectives.objective import Examples, together
from data_pipeline.loading.batch_layout import IGNORE_INDEX, LABELS, BatchLayout
from data_pipeline.loading.prefetch import items
from data_pipeline.loading.reader import Reader
from data_pipeline.loading.stream import EpochOrder, Skipped, Stream, StreamState, each_once

Batch = dict[str, torch.Tensor]
_PREFETCH = 4


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, and the damaged blocks that its process has found so far."""

    batch: Batch
    skipped: list[Skipped]

    def pin_memory(self) -> "MicroBatch":
        return MicroBatch({name: tensor.pin_memory() for name, tensor in self.batch.items()}, self.skipped)


class TrainingBatches(Dataset):
    """Micro-batches of one rank, indexed by the position of their first row.

    Each position of a stream is always the same row. A step with a global batch of G rows takes the next G positions,
    and each rank a contiguous range of them. So one number records what was consumed, and a resumed run may use other
    batch sizes and numbers of ranks.

    `longest`: the greatest lengths of inputs and targets, for batches in few widths. None: as wide as their rows.
    """

    def __init__(
        self,
        stream: Stream,
        layout: BatchLayout,
        start: StreamState | None = None,
        longest: tuple[int, int] | None = None,
    ):
        start = start or StreamState.at(stream, 0, [])
        start.check(stream)
        self._arguments = (stream, layout, start, longest)
        self._stream = stream
        self._layout = layout
        self._start = start
        self._longest = longest
        self._readers = [
            Reader(
                corpus,
                "train",
                cached=stream.lanes + 2,
                skip_damage=stream.on_damage == "skip",
                damaged=start.skipped_blocks(corpus, "train"),
            )
            for corpus in stream.corpora
        ]
        self._pad = stream.corpora[0].tokenizer.vocabulary.pad
        self._rows = np.array([corpus.rows("train") for corpus in stream.corpora])
        self._mixture = stream.mixture
        self._order = lru_cache(maxsize=2 * len(stream.corpora))(self._epoch_order)  # a batch may be of two epochs
        self.skipped = start.skipped
        """Damaged blocks known from the start state, and those that this rank has found since."""

    def __reduce__(self) -> tuple[type, tuple]:
        """Each worker process makes its own readers and caches."""
        return type(self), self._arguments

    def __getitem__(self, first: int) -> MicroBatch:
        batch = self._batch(np.arange(first, first + self._layout.micro_batch))
        return MicroBatch(batch, [one for reader in self._readers for one in reader.skipped])

    def loader(
        self, steps: int | Iterable[int], workers: int, prefetch: int = _PREFETCH, pin: bool = False
    ) -> Iterator[list[Batch]]:
        """The micro-batches of each step from `start` on, with `pin` in page-locked memory.

        `steps` is a number of steps, or the accumulation of each step.
        """
        # workers are a few steps ahead
        accumulations, ahead = tee(repeat(self._layout.accumulation, steps) if isinstance(steps, int) else steps)
        micro_batches = items(self, self._row_offsets(ahead), workers, prefetch, pin)
        for accumulation in accumulations:
            step = [next(micro_batches) for _ in range(accumulation)]
            if found := [one for micro in step for one in micro.skipped]:
                self.skipped = each_once([*self.skipped, *found])
            yield [micro.batch for micro in step]

    def _row_offsets(self, accumulations: Iterable[int]) -> Iterator[int]:
        position = self._start.position
        for accumulation in accumulations:
            yield from self._layout.row_offsets(position, accumulation)
            position += self._layout.rows(accumulation)

    def row_ids(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(corpus, epoch, row id), each (n,), at `positions` (n,) of the stream."""
        corpora, rows_before = self._mixture.deal(positions)
        epochs, inside = np.divmod(rows_before, self._rows[corpora])
        ids = np.empty(len(positions), dtype=np.int64)
        for corpus, epoch in set(zip(corpora.tolist(), epochs.tolist(), strict=True)):
            chosen = (corpora == corpus) & (epochs == epoch)
            ids[chosen] = self._order(corpus, epoch).row_ids(inside[chosen])
        return corpora, epochs, ids

    def _batch(self, positions: np.ndarray) -> Batch:
        corpora, epochs, ids = self.row_ids(positions)
        found = [
            (chosen, reader.parts(objective), reader.examples(ids[chosen], epochs[chosen], objective))
            for stage, objective in self._stream.objectives(positions)
            for corpus, reader in enumerate(self._readers)
            if len(chosen := stage[corpora[stage] == corpus])
        ]
        counts = np.ones(len(positions), dtype=np.int64)  # of examples of each row
        for chosen, of_each, _ in found:
            counts[chosen] = of_each
        first = np.cumsum(counts) - counts
        parts = [((first[chosen, None] + np.arange(of_each)).ravel(), examples) for chosen, of_each, examples in found]
        examples = parts[0][1] if len(parts) == 1 else together(parts, self._pad)
        batch = as_batch(balanced(examples, self._stream.pack) if self._stream.pack > 1 else examples, self._pad)
        return in_few_widths(batch, self._longest, self._pad) if self._longest else batch

    def _epoch_order(self, corpus: int, epoch: int) -> EpochOrder:
        return EpochOrder(self._readers[corpus].blocks, self._stream.lanes, self._stream.seed, epoch)


class _ValidationBatches(Dataset):
    """Batches of one rank, indexed by their first row over all ranks."""

    def __init__(self, corpus: Corpus, layout: BatchLayout, skip_damage: bool, shift: int):
        self._arguments = (corpus, layout, skip_damage, shift)
        self._layout, self._shift, self._total = layout, shift, corpus.rows("validation")
        self._reader = Reader(corpus, "validation", skip_damage=skip_damage)
        self._pad = corpus.tokenizer.vocabulary.pad

    def __reduce__(self) -> tuple[type, tuple]:
        """Each worker process makes its own reader."""
        return type(self), self._arguments

    def __getitem__(self, first: int) -> Batch:
        size, total = self._layout.micro_batch, self._total
        ids = first + self._layout.rank * size + np.arange(size)
        rows = (np.minimum(ids, total - 1) + self._shift) % total
        batch = as_batch(self._reader.examples(rows, 0), self._pad)
        for name in LABELS:
            if name in batch:
                batch[name][torch.from_numpy(ids >= total)] = IGNORE_INDEX
        return batch


def validation_batches(
    corpus: Corpus,
    layout: BatchLayout,
    skip_damage: bool = False,
    shift: int = 0,
    start: int = 0,
    workers: int = 0,
) -> Iterator[Batch]:
    """Each held-out row exactly once over all ranks, always with the noise of epoch 0. `workers` prepare batches.

    The first batch begins with row `shift`, and row 0 follows the last one. The first `start` rows are skipped.

    Every rank gets the same number of batches. In rows that only fill the last batches, all labels are `IGNORE_INDEX`.
    """
    batches = _ValidationBatches(corpus, layout, skip_damage, shift)
    row_offsets = range(start, corpus.rows("validation"), layout.ranks * layout.micro_batch)
    yield from items(batches, row_offsets, workers, _PREFETCH) if workers else map(batches.__getitem__, row_offsets)


def as_batch(examples: Examples, pad: int) -> Batch:
    """The examples as int64 tensors.

    Every batch has `encoder_input_ids` (n, inputs), padded with `pad`, and `labels` (n, targets), padded with
    `IGNORE_INDEX`. Others are present only when needed: `encoder_attention_mask` (n, inputs), 1 at real tokens, if
    there is padding; for packed examples `encoder_segment_ids` and `encoder_positions` (n, inputs), and
    `decoder_segment_ids` and `decoder_positions` (n, targets), where positions restart in each example;
    `prefix_mask` (n, inputs), 1 at tokens that all tokens of their example may see.
    """
    filled = examples.inputs.filled
    counted = examples.targets.filled
    if examples.predicted is not None:
        counted &= examples.predicted
    arrays = {
        "encoder_input_ids": np.where(filled, examples.inputs.values, pad),
        "labels": np.where(counted, examples.targets.values.astype(np.int64), IGNORE_INDEX),
        "prefix_mask": examples.prefix_mask,
    }
    if not filled.all():
        arrays["encoder_attention_mask"] = filled
    for side, segments in (("encoder", examples.input_segments), ("decoder", examples.target_segments)):
        if segments is not None:
            arrays[f"{side}_segment_ids"] = segments
            arrays[f"{side}_positions"] = _positions(segments)
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items() if array is not None}


def _positions(segments: np.ndarray) -> np.ndarray:
    """(n, width): each token's position in its segment. [[1, 1, 1, 2, 2, 0]]  ->  [[0, 1, 2, 0, 1, 0]]"""
    indices = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    begins = np.ones(segments.shape, dtype=bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return np.where(segments > 0, indices - np.maximum.accumulate(np.where(begins, indices, 0), axis=1), 0)


def in_few_widths(batch: Batch, longest: tuple[int, int], pad: int) -> Batch:
    """The batch with the widths of its inputs and targets rounded up to multiples of 64, up to the `longest` of each: a
    new shape takes a new CUDA graph and a new plan of cuDNN, which take long to make.

    The added columns are padding, as behind shorter rows: losses change only by rounding.
    """
    widths = batch["encoder_input_ids"].size(1), batch["labels"].size(1)
    inputs, targets = (max(width, min(width_of(width), most)) for width, most in zip(widths, longest, strict=True))
    if inputs > widths[0]:
        batch = {"encoder_attention_mask": torch.ones_like(batch["encoder_input_ids"]), **batch}
    return widened(batch, inputs, targets, {"encoder_input_ids": pad, "labels": IGNORE_INDEX})


def widened(batch: Batch, inputs: int, targets: int, fill: Mapping[str, int]) -> Batch:
    """The batch with inputs and targets padded to these widths. `fill`: the padding of a tensor, by its name, if not
    0."""
    found = {}
    for name, tensor in batch.items():
        width = targets if name == "labels" or name.startswith("decoder") else inputs
        added = max(0, width - tensor.size(1)) if tensor.dim() > 1 else 0
        found[name] = F.pad(tensor, (0, added), value=fill.get(name, 0)) if added else tensor
    return found
