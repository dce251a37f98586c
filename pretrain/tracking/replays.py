"""Steps that an attempt repeats."""

import math
from collections.abc import Callable, Iterator

from pretrain.run.metrics_file import Row


class Replays:
    """Recognises steps that an attempt repeats.

    After a resume, the steps between the checkpoint and the crash are logged twice. If the losses are bitwise equal, as
    on CPU, MLflow has the step already. If they differ, the new point is sent too and follows the old one at its step,
    since MLflow can't delete a point.

    `rows` reads all rows of the file, or of the steps in question.
    """

    def __init__(self, rows: Callable[[], Iterator[tuple[Row, int]]]):
        self._rows = rows
        self._attempt: int | None = None
        self._earlier: dict[int, dict[str, float]] = {}

    def unsent(self, row: Row) -> dict[str, float]:
        """The metrics of `row` that MLflow doesn't have from an earlier attempt. Rows come in the order of the file."""
        if row.attempt != self._attempt:
            self._attempt, self._earlier = row.attempt, {}
            for other, _ in self._rows():
                if other.attempt < row.attempt and other.step >= row.step:
                    self._earlier.setdefault(other.step, {}).update(other.metrics)
        before = self._earlier.get(row.step, {})
        shared = before.keys() & row.metrics.keys()
        deciding = {name for name in shared if name.endswith("loss")} or shared  # speeds are never equal
        if shared and all(_equal(before[name], row.metrics[name]) for name in deciding):
            return {name: value for name, value in row.metrics.items() if name not in before}
        return row.metrics


def _equal(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))
