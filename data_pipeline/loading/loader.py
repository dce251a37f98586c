"""A loader for other training loops, with the state methods of torchdata's StatefulDataLoader."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import repeat
from typing import Any

from data_pipeline.base import arguments
from data_pipeline.base.arguments import integer
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import adapter
from data_pipeline.corpus import Corpus
from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import Batch, TrainingBatches, validation_batches
from data_pipeline.loading.stream import Stream, StreamState

_SPLIT = "split"


class Loader:
    """Batches of one rank, as dicts of int64 tensors; docs/reference/batches.md has their names and shapes.

    The split `train` has no end: epoch follows epoch, each in its own order, and another `iter()` continues after the
    last batch. Each `iter()` passes any other split once, from its first row; only the first `iter()` after
    `load_state_dict()` continues there. Rows that only fill up the last batches of the ranks have no labels. `len()` is
    the number of batches that hold each row of the split once.

    `state_dict()` is plain JSON. After `load_state_dict()`, the next batch begins with the row after the last returned
    batch, also with another number of ranks or another batch size. Batches that worker processes have made ahead don't
    count.

    Iteration raises DamagedInput, a FailedError, at a damaged block, and FailedError if a worker process dies.
    """

    def __init__(
        self, corpus: Corpus, split: str, batch_size: int, rank: int, ranks: int, workers: int, seed: int, lanes: int
    ):
        """Raises UserError for a number out of range."""
        batch_size, ranks = integer("batch_size", batch_size, 1), integer("ranks", ranks, 1)
        rank, self._workers = integer("rank", rank, 0), integer("workers", workers, 0, 2**10)
        if rank >= ranks:
            raise UserError(f"rank: expected 0 to {ranks - 1}, as there are {ranks} ranks, got {rank}")
        if not corpus.rows(split):
            raise UserError(f"{corpus.location} has no {split} rows")
        self._corpus, self._split = corpus, split
        self._layout = BatchLayout(rank, ranks, batch_size, 1)
        self._stream = Stream([corpus], [1.0], arguments.seed(seed), integer("lanes", lanes, 1, 2**20))
        self._state = StreamState.at(self._stream, 0, [])
        self._continues = False  # whether the next pass of held-out rows begins at `_state`

    def __repr__(self) -> str:
        of = self._layout
        return f"Loader({self._split} of {self._corpus!r}: {of.micro_batch:,} rows for rank {of.rank} of {of.ranks})"

    def __len__(self) -> int:
        return -(-self._corpus.rows(self._split) // self._layout.rows(1))

    def __iter__(self) -> Iterator[Batch]:
        if self._split == "train":
            made = TrainingBatches(self._stream, self._layout, self._state).loader(repeat(1), self._workers)
            for (batch,) in made:
                self._advance(self._state.position + self._layout.rows(1))
                yield batch
            return
        if not self._continues:
            self._advance(0)
        self._continues = False
        rows, position = self._corpus.rows(self._split), self._state.position
        for batch in validation_batches(self._corpus, self._layout, start=position, workers=self._workers):
            position = min(position + self._layout.rows(1), rows)
            self._advance(position)
            yield batch
        self._advance(0)

    def _advance(self, position: int) -> None:
        self._state = StreamState.at(self._stream, position, self._state.skipped)

    def state_dict(self) -> dict[str, Any]:
        """The split, and the number of rows up to the last returned batch, over all ranks and epochs."""
        return {_SPLIT: self._split, **asdict(self._state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch of the loader whose `state_dict()` gave `state`.

        Raises UserError for a state of another split, corpus, objective, seed or number of lanes.
        """
        if not isinstance(state, Mapping):
            raise UserError(f"state: expected what a loader's state_dict() gave, got {state!r}")
        given = dict(state)
        if (split := given.pop(_SPLIT, None)) != self._split:
            raise UserError(f"the data state is of the split {split!r}, this loader of {self._split!r}")
        try:
            found = adapter(StreamState).validate_python(given)
        except ValueError:
            raise UserError("the data state is damaged: expected what a loader's state_dict() gave") from None
        found.check(self._stream)
        self._state, self._continues = found, True
