"""The stream of training rows, which fixes the row at every position, and how far it was consumed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.order import Mixture
from data_pipeline.objectives.objective import Objective


@dataclass(frozen=True)
class Skipped:
    """A damaged block that was skipped: its rows have no loss for the rest of the run."""

    corpus: str
    shard: str
    offset: int
    reason: str


@dataclass(frozen=True)
class Stream:
    """Corpora and weights, and all else that decides the order of rows.

    Each epoch is read as `lanes` sequences of blocks whose rows alternate. At a damaged block, `on_damage` says whether
    to stop or to give its rows weight 0. `pack` examples of a micro-batch share a row. `curriculum`: objectives of
    the first rows instead of the corpora's, in order, each up to the position beside it.
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
        """The settings that may not change during a run; sizes of batches, ranks, workers and packing may."""
        objective = self.corpora[0].other_objective  # a run has one for all
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
        """Indices (m,) into `positions` (n,), and the objective of these rows; None: that of their corpora."""
        stages = np.searchsorted([end for end, _ in self.curriculum], positions, side="right")
        objectives = [*(objective for _, objective in self.curriculum), None]
        for stage in np.unique(stages).tolist():
            yield np.flatnonzero(stages == stage), objectives[stage]


@dataclass(frozen=True)
class StreamState:
    """How far a stream was consumed. A checkpoint stores this for the loader, as plain JSON.

    `position` counts rows over all corpora, `consumed` those of each corpus. `skipped` lists the damaged blocks found
    so far.
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
        """Numbers of the blocks of `corpus` that were skipped."""
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
    return [f"{key} is {old!r} there, {new!r} here" for key, old, new in _changed(there, here)]


def changes(before: Any, now: Any) -> list[str]:
    """Like `differences`, worded as changes: "run.max_steps: 8 → 9"."""
    return [f"{key}: {old!r} → {new!r}" for key, old, new in _changed(before, now)]


def _changed(there: Any, here: Any) -> list[tuple[str, Any, Any]]:
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
