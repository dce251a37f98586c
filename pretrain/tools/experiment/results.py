"""The results of an experiment's runs, from their own files: means, spreads and comparisons over seeds."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy.special import stdtr

from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.index import newest
from pretrain.models import meta_model
from pretrain.run.metrics_file import read_metrics
from pretrain.tools.experiment.experiment_folder import PlannedRun

_VALIDATION = re.compile(r"validation/(.+)/loss")
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Result:
    """A finished run. Losses are in nats per target token; None where they weren't measured.

    - `parameters`: their number; None if the run's checkpoints were deleted.
    - `train_loss`: the mean since the line of metrics before the last.
    - `validation_loss`: after the last step, on the first validation corpus.
    - `text_loss`: the same on text tokens alone. `input_worth`: by how much it rises with another row's input.
    - `tokens`: of text that were trained on. `seconds`, `processor_seconds`: of the steps alone, by the clock
      and of all ranks' processors.
    - `others`: the last values of all metrics, by name.
    """

    row: str
    seed: int
    steps: int
    parameters: int | None
    train_loss: float | None
    validation_loss: float | None
    text_loss: float | None = None
    input_worth: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    processor_seconds: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)


_OWN = [name for name in Result.__dataclass_fields__ if name != "others"]


def results(runs: Iterable[PlannedRun]) -> list[Result]:
    """The results of the finished `runs`."""
    return [_result(run) for run in runs if run.finished]


def ends_by_seed(results: Iterable[Result], row: str, metric: str | None = None) -> dict[int, float]:
    """The last values of a row's `metric`; None: its validation losses."""
    of_row = [result for result in results if result.row == row]
    ends = {one.seed: one.others.get(metric) if metric else one.validation_loss for one in of_row}
    return {seed: end for seed, end in ends.items() if end is not None}


def as_csv(results: Sequence[Result]) -> str:
    """One line a run, for other programs' statistics."""
    others = sorted({name for result in results for name in result.others})
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_OWN, *others])
    for result in results:
        own = (getattr(result, name) for name in _OWN)
        writer.writerow([*own, *map(result.others.get, others)])
    return stream.getvalue()


def read_csv(path: Path) -> list[Result]:
    """The runs of a runs.csv."""
    found = []
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            row = line.pop("row")
            numbers: dict[str, Any] = {
                key: int(cell) if cell.isdigit() else float(cell) for key, cell in line.items() if cell
            }
            own = {key: numbers.pop(key, None) for key in _OWN[1:]}
            found.append(Result(row, **own, others=numbers))
    return found


def _result(run: PlannedRun) -> Result:
    checkpoint = newest(run.directory)
    lines = [line.metrics for line in read_metrics(run.directory)]
    ends = {name: value for metrics in lines for name, value in metrics.items()}
    seconds, of_processors = (
        [metrics[name] for metrics in lines if name in metrics] for name in ("train/seconds", "train/processor_seconds")
    )
    corpus = next((found[1] for name in ends if (found := _VALIDATION.fullmatch(name))), "")
    return Result(
        run.row,
        run.seed,
        run.config.run.max_steps,
        parameters=meta_model(checkpoint_index.read(checkpoint).model).num_parameters() if checkpoint else None,
        train_loss=ends.get("train/loss"),
        validation_loss=ends.get(f"validation/{corpus}/loss"),
        text_loss=ends.get(f"validation/{corpus}/text_loss"),
        input_worth=ends.get(f"input_use/{corpus}/worth"),
        tokens=ends.get("train/tokens"),
        seconds=sum(seconds) if seconds else None,
        processor_seconds=sum(of_processors) if of_processors else None,
        others=ends,
    )


@dataclass(frozen=True)
class Spread:
    """The mean of some runs, and their sample standard deviation (n − 1); None for one run."""

    mean: float
    deviation: float | None
    number: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None without values."""
        if not values:
            return None
        return cls(fmean(values), stdev(values) if len(values) > 1 else None, len(values))

    def __format__(self, form: str) -> str:
        """f"{spread:.3f}" -> "3.290±0.010"."""
        return format(self.mean, form) + ("" if self.deviation is None else f"±{self.deviation:{form}}")


def shown(value: float | Spread | None, form: str) -> str:
    """A cell of a table, which is empty for None."""
    return "" if value is None else format(value, form)


@dataclass(frozen=True)
class Comparison:
    """A row's mean minus its baseline's, with its standard error.

    The model is additive: a value is the sum of a row's mean, what its seed adds to every row, and a normal residual
    whose variance all rows share. So each row's scatter tells about the others', and few seeds suffice where there are
    many rows; with two rows it is the paired t-test. Without degrees of freedom nothing is left to estimate the
    variance from.
    """

    difference: float
    error: float
    degrees_of_freedom: int

    @property
    def p(self) -> float | None:
        """The p-value by Student's t, two-sided."""
        if not self.degrees_of_freedom:
            return None
        if not self.error:
            return float(abs(self.difference) < _ROUNDING)
        return 2 * float(stdtr(self.degrees_of_freedom, -abs(self.difference / self.error)))


def compare(rows: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Comparison]:
    """Compares each row's values, by seed, with the values of `baseline`. Rows without a common seed are left out.

    >>> compare({"base": {0: 3.1, 1: 3.3, 2: 3.4}, "row": {0: 3.0, 1: 3.2, 2: 3.1}}, "base")["row"]
    Comparison(difference=-0.1666…, error=0.0666…, degrees_of_freedom=2)
    """
    own = rows.get(baseline, {})
    names = [baseline, *(name for name, values in rows.items() if name != baseline and values.keys() & own.keys())]
    if len(names) == 1:
        return {}
    cells = [(name, seed) for name in names for seed in rows[name]]
    effects = (*names, *sorted({seed for _, seed in cells}))
    design = np.array([[float(one in cell) for one in effects] for cell in cells])
    values, inverse = np.array([rows[name][seed] for name, seed in cells]), np.linalg.pinv(design)
    free = len(cells) - int(np.linalg.matrix_rank(design))
    scatter = float(np.linalg.norm(values - design @ inverse @ values)) / math.sqrt(max(free, 1))
    if scatter <= _ROUNDING * float(np.linalg.norm(values)):
        scatter = 0.0
    found = {}
    for place, name in enumerate(names[1:], start=1):
        weights = inverse[place] - inverse[0]  # of the values, in the difference of the rows
        found[name] = Comparison(float(weights @ values), float(np.linalg.norm(weights)) * scatter, free)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, adjusted for being one of several (Holm 1979): below α, the chance of any false one is below α.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        highest = adjusted[number] = max(highest, min(1.0, (len(p_values) - place) * p_values[number]))
    return adjusted
