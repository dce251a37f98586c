"""Reads rows of one split of a corpus by their ids and applies the objective."""

from collections.abc import Iterable

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.blocks import Block, column_in, examples_in, rows_in
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.loading.store import BlockStore
from data_pipeline.objectives import Examples, Objective, Padded, together
from data_pipeline.objectives.randomness import noise_keys


class Reader:
    """Rows of `split`, by id.

    With `skip_damage`, rows of damaged blocks are empty and the blocks are listed in `damaged`; otherwise such a block
    is an error. `damaged` lists blocks already known to be damaged: they stay skipped, even if they are repaired.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        cached: int = 4,
        skip_damage: bool = False,
        damaged: Iterable[int] = (),
    ):
        self.corpus, self.split = corpus, split
        self.damaged = dict.fromkeys(damaged, "known")
        self._store = BlockStore(corpus, split, cached)
        self.blocks = self._store.index
        self._rows = int(self.blocks.rows.sum())
        self._skip_damage = skip_damage
        self._vocabulary = corpus.tokenizer.vocabulary

    def examples(
        self, rows: np.ndarray | list[int], epochs: np.ndarray | int, objective: Objective | None = None
    ) -> Examples:
        """Inputs and targets of the rows with these ids (n,), by `objective` instead of the corpus's, unless None.

        `epochs`, one number or (n,), selects the noise if it is applied at load; noise applied at build is fixed.
        Raises UserError for an id that the split doesn't have, and DamagedInput, which names the shard, if a block's
        checksum differs.
        """
        ids = np.asarray(rows, dtype=np.int64)
        if (beyond := ids[(ids < 0) | (ids >= self._rows)]).size:
            raise UserError(
                f"{self.corpus.directory}: the split {self.split} has {self._rows} rows, whose ids count from 0, "
                f"got row {beyond[0]}"
            )
        epochs = np.broadcast_to(epochs, ids.shape)
        numbers = np.searchsorted(self.blocks.first_row, ids, side="right") - 1
        inside = ids - self.blocks.first_row[numbers]
        blocks = self._blocks(numbers)
        whole = np.array([block is not None for block in blocks])
        chosen = [block for block in blocks if block is not None]
        if len(chosen) == len(blocks):
            return self._examples(chosen, inside, ids, epochs, objective)
        if not chosen:
            return _empty(len(ids), self._vocabulary.eos)
        some = self._examples(chosen, inside[whole], ids[whole], epochs[whole], objective)
        empty = _empty(len(ids) - len(chosen), self._vocabulary.eos, some)
        return together([(np.flatnonzero(whole), some), (np.flatnonzero(~whole), empty)], self._vocabulary.pad)

    def _examples(
        self, blocks: list[Block], inside: np.ndarray, ids: np.ndarray, epochs: np.ndarray, objective: Objective | None
    ) -> Examples:
        rows, objective = inside.tolist(), objective or self.corpus.objective
        if self.corpus.manifest.rows.apply_at == "build":
            return examples_in(blocks, rows)
        columns = {name: column_in(blocks, rows, name) for name in objective.columns}
        keys = noise_keys(self.corpus.manifest.seed, self.split, epochs, ids)
        return objective.apply(rows_in(blocks, rows), keys, self._vocabulary, columns)

    def _blocks(self, numbers: np.ndarray) -> list[Block | None]:
        """The block of each row, or None if the block is damaged and skipped."""
        found: list[Block | None] = []
        for number in numbers.tolist():
            if number in self.damaged:
                found.append(None)
                continue
            try:
                found.append(self._store[number])
            except DamagedInput as error:
                if not self._skip_damage:
                    raise
                self.damaged[number] = str(error)
                found.append(None)
        return found


def _empty(rows: int, eos: int, beside: Examples | None = None) -> Examples:
    """Rows with only an EOS token as input, since attention to padding alone has no softmax, and no targets.

    They have the same optional arrays as `beside`.
    """
    mark = np.full((rows, 1), eos)
    optional = beside.optional if beside else {}
    return Examples(
        Padded(mark, np.ones(rows, dtype=np.int64)),
        Padded(mark, np.zeros(rows, dtype=np.int64)),
        **{name: np.zeros((rows, 1)[: array.ndim], dtype=array.dtype) for name, array in optional.items()},
    )
