"""Reads rows of one split of a corpus by their ids and applies the objective."""

from collections.abc import Iterable

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.blocks import Block, column_in, examples_in, rows_in
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.loading.store import BlockStore
from data_pipeline.objectives.objective import Examples, Objective, Padded, together
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

        An objective of shorter rows gets each row cut into `parts` of its length, so that there are n × `parts`
        examples, those of a row one after the other. A part that is too short for it, at the end of a tail, is empty.

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
        parts = self.parts(objective)
        if not chosen:
            return _empty(len(ids) * parts, self._vocabulary.eos)
        some = self._examples(chosen, inside[whole], ids[whole], epochs[whole], objective)
        return self._with_empty(some, np.repeat(whole, parts))

    def tokens(self, rows: np.ndarray) -> Padded:
        """The rows with these ids (n,) as they were cut, without the objective. Rows of damaged blocks are left out.

        Raises UserError if the objective was applied at build, since the text is gone then.
        """
        if self.corpus.manifest.rows.apply_at == "build":
            raise UserError(f"{self.corpus.directory}: built with apply_at: build, so that its rows are no longer text")
        numbers = np.searchsorted(self.blocks.first_row, rows, side="right") - 1
        blocks = self._blocks(numbers)
        inside = rows - self.blocks.first_row[numbers]
        there = [(block, int(row)) for block, row in zip(blocks, inside, strict=True) if block is not None]
        return rows_in([block for block, _ in there], [row for _, row in there])

    def parts(self, objective: Objective | None) -> int:
        """Into how many rows `objective` has each row cut."""
        return self.corpus.manifest.rows.raw_length // objective.raw_length if objective else 1

    def _with_empty(self, examples: Examples, where: np.ndarray) -> Examples:
        """`examples` at the rows where `where` (n,) is True, and empty rows elsewhere."""
        empty = _empty(int((~where).sum()), self._vocabulary.eos, examples)
        return together([(np.flatnonzero(where), examples), (np.flatnonzero(~where), empty)], self._vocabulary.pad)

    def _examples(
        self, blocks: list[Block], inside: np.ndarray, ids: np.ndarray, epochs: np.ndarray, objective: Objective | None
    ) -> Examples:
        rows, parts, objective = inside.tolist(), self.parts(objective), objective or self.corpus.objective
        if self.corpus.manifest.rows.apply_at == "build":
            return examples_in(blocks, rows)
        whole = rows_in(blocks, rows)
        if parts > 1:
            return self._examples_of_parts(whole, ids, epochs, objective, parts)
        columns = {name: column_in(blocks, rows, name) for name in objective.columns}
        return objective.apply(whole, self._keys(epochs, ids), self._vocabulary, columns)

    def _examples_of_parts(
        self, rows: Padded, ids: np.ndarray, epochs: np.ndarray, objective: Objective, parts: int
    ) -> Examples:
        length = objective.raw_length
        values = np.zeros((len(ids), parts * length), dtype=rows.values.dtype)
        values[:, : rows.values.shape[1]] = rows.values[:, : parts * length]
        lengths = np.clip(rows.lengths[:, None] - length * np.arange(parts), 0, length).ravel()
        keys = self._keys(np.repeat(epochs, parts), np.repeat(ids, parts) * parts + np.tile(np.arange(parts), len(ids)))
        long_enough = np.array([objective.accepts(int(one)) for one in lengths])
        if not long_enough.any():
            return _empty(len(lengths), self._vocabulary.eos)
        cut = Padded(values.reshape(-1, length)[long_enough], lengths[long_enough])
        examples = objective.apply(cut, keys[long_enough], self._vocabulary, {})
        return examples if long_enough.all() else self._with_empty(examples, long_enough)

    def _keys(self, epochs: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return noise_keys(self.corpus.manifest.seed, self.split, epochs, ids)

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
