"""The order of training rows, and how far a run has consumed them. The row at each position is computed, not stored.

A mixture is exact at every position p: each corpus has given round(p × share) rows. With a share of 1e-6, its first row
is at position 500,000.

In each epoch of a corpus, the blocks are permuted by (seed, epoch) and concatenated. This sequence of rows is cut into
equal ranges, the lanes, whose rows alternate: neighbours in a batch come from different blocks. Lanes begin at
different rows of their blocks, so no two lanes need a new block at the same moment. Rows are also permuted inside each
block.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from data_pipeline.base.errors import UserError
from data_pipeline.corpus import Blocks, Corpus
from data_pipeline.corpus.objectives.objective import Objective
from data_pipeline.corpus.objectives.randomness import permutation, row_keys

_UNIT = 2**64  # shares are fixed-point numbers, exact to half a row at position 2^63
_HALF = 2**63


def rates(sizes: Sequence[int], weights: Sequence[float], limit: int | None, temperature: float) -> list[float]:
    """T5's mixing rates (Raffel et al. 2020, section 3.5.2), relative to one another.

    Each corpus has weight · min(size, limit)^(1 / temperature). Sizes are in rows.

    Sizes [900, 100] with a limit of 400  ->  [400, 100]; at temperature 2  ->  [20, 10]
    """
    return [weight * min(size, limit or size) ** (1 / temperature) for size, weight in zip(sizes, weights, strict=True)]


class Mixture:
    """Assigns positions to corpora in proportion to `weights`, each as evenly as possible.

    The first corpus gets ⌊n · share + 1/2⌋ of the first n positions. The second corpus gets positions of the rest by
    the same rule, with its share among the remaining corpora, and so on. Shares are exact fractions of the weights,
    rounded down to multiples of 2^-64.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(weight) for weight in weights]
        left = list(accumulate(reversed(exact)))[::-1]  # the weights of a corpus and of all behind it
        self._shares = [max(1, int(weight / rest * _UNIT)) for weight, rest in zip(exact[:-1], left, strict=False)]

    def consumed(self, position: int) -> list[int]:
        """The number of rows of each corpus before `position`."""
        counts, left = [], position
        for share in self._shares:
            counts.append((left * share + _HALF) // _UNIT)
            left -= counts[-1]
        return [*counts, left]

    def miscount(self, consumed: list[int], position: int) -> str | None:
        """How `consumed` differs from the rows of each corpus before `position`; None if it doesn't."""
        expected = self.consumed(position)
        if consumed == expected:
            return None
        return f"{consumed} rows consumed, one number for each corpus, expected {expected} at position {position}"

    def deal(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(corpus (n,), position within that corpus's sequence (n,)) for each of `positions` (n,)."""
        within = np.array(positions, dtype=np.int64)
        corpora = np.full(len(within), len(self._shares), dtype=np.int64)
        left = np.arange(len(within))  # positions that no corpus has taken yet
        for corpus, share in enumerate(self._shares):
            index = within[left]
            before = _times(index, share)
            taken = _times(index + 1, share) > before
            corpora[left[taken]] = corpus
            within[left] = np.where(taken, before, index - before)
            left = left[~taken]
        return corpora, within


def _times(numbers: np.ndarray, share: int) -> np.ndarray:
    """(n,): ⌊numbers · share / 2^64 + 1/2⌋, in Python's integers, since the product has 127 bits."""
    return ((numbers.astype(object) * share + _HALF) // _UNIT).astype(np.int64)


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
        keys = row_keys(seed, "order/rows", epoch, np.arange(count))

        @lru_cache(maxsize=2 * lanes + 2)
        def within(block: int) -> np.ndarray:
            return permutation(int(keys[block]), int(blocks.rows[block]))

        self._within = within

    def row_ids(self, positions: np.ndarray) -> np.ndarray:
        """(n,) int64: ids of the rows at `positions` (n,), each below the number of rows.

        Position p is row `p div n` of lane `p mod n`, of n lanes. If the rows don't divide evenly, the first lanes have
        one more row, and these rows come last.
        """
        share, longer = divmod(self._total, self._lanes)
        tail = positions >= share * self._lanes
        lane = np.where(tail, positions - share * self._lanes, positions % self._lanes)
        depth = np.where(tail, share, positions // self._lanes)
        sequence = lane * share + np.minimum(lane, longer) + depth  # indices in the sequence of permuted blocks
        index = np.searchsorted(self._ends, sequence, side="right")
        blocks = self._permuted[index]
        inside = sequence - (self._ends[index] - self._rows[blocks])
        rows = [self._within(int(block))[offset] for block, offset in zip(blocks, inside, strict=True)]
        return self._first_row[blocks] + np.array(rows, dtype=np.int64)


@dataclass(frozen=True)
class Skipped:
    """A skipped, damaged block. Its rows have no loss for the rest of the run."""

    corpus: str
    shard: str
    offset: int
    reason: str


def each_once(skipped: Iterable[Skipped]) -> list[Skipped]:
    """The skipped blocks in order, each of them once."""
    found = {(one.corpus, one.shard, one.offset): one for one in skipped}
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True)
class Stream:
    """Corpora, weights, and everything else that decides the order of rows.

    Attributes:
        lanes: the number of sequences of blocks of an epoch whose rows alternate.
        on_damage: what happens at a damaged block: `stop`, or `skip`, which gives its rows no loss.
        pack: the average number of examples of a micro-batch in a row.
        curriculum: (position, objective) pairs, in order: up to this position, rows have this objective, not their
            corpus's.
    """

    corpora: list[Corpus]
    weights: list[float]
    seed: int
    lanes: int
    on_damage: Literal["stop", "skip"] = "stop"
    pack: int = 1
    curriculum: tuple[tuple[int, Objective], ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that must not change during a run. The sizes of batches, ranks, workers and packing may."""
        objective = self.corpora[0].other_objective  # the same for all corpora of a run
        return {
            "corpora": [
                {"fingerprint": corpus.fingerprint, "weight": weight}
                for corpus, weight in zip(self.corpora, self.weights, strict=True)
            ],
            "objective": objective and objective.model_dump(mode="json"),
            "curriculum": [
                {"until_row": end, "objective": objective.model_dump(mode="json")} for end, objective in self.curriculum
            ],
            "seed": self.seed,
            "lanes": self.lanes,
        }

    @property
    def mixture(self) -> Mixture:
        return Mixture(self.weights)

    def objectives(self, positions: np.ndarray) -> Iterator[tuple[np.ndarray, Objective | None]]:
        """(indices (m,) into `positions` (n,), objective of these rows); None: the objective of their corpora."""
        stages = np.searchsorted([end for end, _ in self.curriculum], positions, side="right")
        objectives = [*(objective for _, objective in self.curriculum), None]
        for stage in np.unique(stages).tolist():
            yield np.flatnonzero(stages == stage), objectives[stage]


@dataclass(frozen=True)
class StreamState:
    """How far a stream was consumed, as a checkpoint stores it in plain JSON.

    `position`: rows of all corpora. `consumed`: rows of each corpus. `skipped`: the damaged blocks so far.
    """

    position: int = 0
    consumed: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    identity: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, stream: Stream, position: int, skipped: list[Skipped]) -> "StreamState":
        return cls(position, stream.mixture.consumed(position), skipped, stream.identity)

    def check(self, stream: Stream) -> None:
        """Raises UserError, with a line for each difference, if this state belongs to another stream."""
        if problems := differences(self.identity, stream.identity):
            raise UserError("\n".join(f"the data state belongs to another stream: {line}" for line in problems))
        if problem := stream.mixture.miscount(self.consumed, self.position):
            raise UserError(f"the data state is inconsistent: {problem}")

    def skipped_blocks(self, corpus: Corpus, split: str) -> list[int]:
        """The numbers of the skipped blocks of `corpus`."""
        blocks = corpus.blocks(split)
        known = {(skipped.shard, skipped.offset) for skipped in self.skipped if skipped.corpus == corpus.fingerprint}
        return [
            block
            for shard, offset in sorted(known)
            for block in blocks.of_shard(shard).tolist()
            if blocks.offset[block] == offset
        ]


def differences(there: Any, here: Any) -> list[str]:
    """One line for each key that differs between two nested values: "corpora.0.weight is 1.0 there, 2.0 here"."""
    return [f"{key} is {_shown(old)} there, {_shown(new)} here" for key, old, new in changed(there, here)]


def changes(before: Any, now: Any) -> list[str]:
    """Like `differences`, worded as changes: "run.max_steps: 8 → 9"."""
    return [f"{key}: {_shown(old)} → {_shown(new)}" for key, old, new in changed(before, now)]


def _shown(value: Any) -> str:
    """A value as a run file has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def changed(there: Any, here: Any) -> list[tuple[str, Any, Any]]:
    """(key, value there, value here) of each key that differs between two nested values; None where it is missing."""
    old, new = flat(there), flat(here)
    keys = sorted(old.keys() | new.keys())
    return [(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": [{"b": 1}]}  ->  {"a.0.b": 1}"""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        name: leaf
        for key, inner in value.items()
        for name, leaf in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
