"""The order of training: the row at each position is computed, not stored.

In each epoch the blocks are permuted by (seed, epoch) and concatenated. That sequence of rows is cut into equal ranges,
and the rows of these lanes alternate: neighbours in a batch come from different blocks. Lanes begin at
different rows of their blocks, so that no two need a new block at the same moment. Rows are also permuted inside each
block.
"""

from functools import lru_cache

import numpy as np

from data_pipeline.corpus import Blocks
from data_pipeline.objectives.randomness import permutation, row_keys


class EpochOrder:
    """The row at each position of one epoch of one split."""

    def __init__(self, blocks: Blocks, lanes: int, seed: int, epoch: int):
        self._rows = blocks.rows
        self._first_row = blocks.first_row
        self._total = int(blocks.rows.sum())
        self._lanes = lanes
        count = len(blocks.rows)
        self._permuted = permutation(int(row_keys(seed, "order/blocks", epoch, np.array([0]))[0]), count)
        self._ends = np.cumsum(blocks.rows[self._permuted])
        self._block_keys = row_keys(seed, "order/rows", epoch, np.arange(count))
        self._within = lru_cache(maxsize=2 * lanes + 2)(self._permutation_of_block)

    def row_ids(self, positions: np.ndarray) -> np.ndarray:
        """(n,) int64: ids of the rows at `positions` (n,), each below the number of rows."""
        sequence = self._sequence(positions)
        index = np.searchsorted(self._ends, sequence, side="right")
        blocks = self._permuted[index]
        inside = sequence - (self._ends[index] - self._rows[blocks])
        rows = [self._within(int(block))[offset] for block, offset in zip(blocks, inside, strict=True)]
        return self._first_row[blocks] + np.array(rows, dtype=np.int64)

    def _sequence(self, positions: np.ndarray) -> np.ndarray:
        """Indices in the sequence of permuted blocks. Position p is row `p div n` of lane `p mod n`, of n.

        If the rows don't divide evenly, the first lanes are one row longer, and those rows come last.
        """
        share, longer = divmod(self._total, self._lanes)
        tail = positions >= share * self._lanes
        lane = np.where(tail, positions - share * self._lanes, positions % self._lanes)
        depth = np.where(tail, share, positions // self._lanes)
        return lane * share + np.minimum(lane, longer) + depth

    def _permutation_of_block(self, block: int) -> np.ndarray:
        return permutation(int(self._block_keys[block]), int(self._rows[block]))
