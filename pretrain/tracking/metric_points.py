"""Rows of metrics as MLflow's points: which of them it lacks, and what they are called there.

MLflow's page of a run sorts its sections by name, and a section is all of a name before its last slash. So losses come
first, then evaluations, and seconds and sizes last; each name of metrics.jsonl is taken apart by the first pattern that
fits it.
"""

import math
import re
from collections.abc import Callable, Iterator

from pretrain.run.metrics_file import Row
from pretrain.tracking.store import safe_key

PICTURES = "pictures"
_NAMES = [
    (r"train/loss", "loss/train"),
    (r"train/(\w+_loss|cross_entropy)", r"loss/train.\1"),
    (r"validation/(.+)/loss", r"loss/validation.\1"),
    (r"validation/(.+)/(\w+_loss|unigram_entropy)", r"loss/validation.\1.\2"),
    (r"validation/(.+)/(\w+)", r"metrics/\1.\2"),
    (r"evaluation/(.+)/seconds", r"usage/evaluation.\1.seconds"),
    (r"checkpoint/(\w+)", r"usage/checkpoint.\1"),
    (r"stragglers/(\w+)", r"usage/stragglers.\1"),
    (r"train/(peak_memory_gigabytes)", r"usage/\1"),
    (r"((?:train|system)/.+)", r"\1"),
    (r"((?:embedding|norms)/.+)", r"model/\1"),
    (r"(.+/.+)", r"metrics/\1"),
]


def in_mlflow(name: str) -> str:
    """The name in MLflow of a metric of metrics.jsonl: "validation/c4/loss" -> "loss/validation.c4"."""
    for pattern, replacement in _NAMES:
        if found := re.fullmatch(pattern, name):
            return safe_key(found.expand(replacement))
    return safe_key(name)


class RepeatedSteps:
    """Recognises steps that an attempt repeats.

    After a resume, the steps between the checkpoint and the crash are logged twice. If the losses are bitwise equal, as
    on CPU, MLflow has the step already. If they differ, the new point is sent too and follows the old one at its step,
    since MLflow can't delete a point.

    `rows` reads all rows of the file, or of the steps in question.
    """

    def __init__(self, rows: Callable[[], Iterator[Row]]):
        self._rows = rows
        self._attempt: int | None = None
        self._earlier: dict[int, dict[str, float]] = {}

    def new_metrics(self, row: Row) -> dict[str, float]:
        """The metrics of `row` that MLflow doesn't have from an earlier attempt. Rows come in the order of the file."""
        if row.attempt != self._attempt:
            self._attempt, self._earlier = row.attempt, {}
            for other in self._rows():
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
