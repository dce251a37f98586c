"""What goes into a packing and what comes out of it."""

from dataclasses import dataclass, field

import numpy as np

from data_pipeline.objectives import Examples, Objective
from data_pipeline.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Documents:
    """Documents of one bucket in shuffled order: document i is `tokens[starts[i] : starts[i + 1]]`.

    `starts` (n + 1,). `targets` (n,): of text-to-text pairs, tokens of the document before its target begins.
    """

    tokens: np.ndarray
    starts: np.ndarray
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class Rules:
    """`keep_tail`: what doesn't fill a row is a shorter one, if the objective can make an example of it.

    `key`: of the bucket, for what is drawn while rows are cut.
    """

    objective: Objective
    vocabulary: Vocabulary
    keep_tail: bool
    key: str
    seed: int


@dataclass(frozen=True)
class Rows:
    """Row i is `tokens[offsets[i] : offsets[i + 1]]`; or, where rows are packed examples, row i of `examples`.

    `documents`: where documents start in `tokens`. `columns`: an array (rows,) by name. `dropped`: tokens of the
    documents that are in no row.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    dropped: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    examples: Examples | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1
