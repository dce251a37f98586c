"""The input and output of a packing."""

from dataclasses import dataclass, field

import numpy as np

from data_pipeline.objectives.objective import Examples, Objective
from data_pipeline.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Documents:
    """Documents of one bucket in shuffled order: document i is `tokens[starts[i] : starts[i + 1]]`.

    `starts` is (n + 1,). For text-to-text pairs, `targets` (n,) has the number of tokens before each target.
    """

    tokens: np.ndarray
    starts: np.ndarray
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class Rules:
    """How rows are cut. With `keep_tail`, a tail becomes a shorter row if the objective accepts its length.

    `key` identifies the bucket to the random numbers drawn while rows are cut.
    """

    objective: Objective
    vocabulary: Vocabulary
    keep_tail: bool
    key: str
    seed: int


@dataclass(frozen=True)
class Rows:
    """Row i is `tokens[offsets[i] : offsets[i + 1]]` or, if rows are packed examples, row i of `examples`.

    `documents` has the starts of documents in `tokens`, `columns` an array (rows,) for each name. `dropped` counts the
    documents' tokens that are in no row. `cut_inputs` and `cut_targets` count the pairs whose input or target is longer
    than the objective allows and lost its end.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    dropped: int
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    examples: Examples | None = None
    cut_inputs: int = 0
    cut_targets: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1
