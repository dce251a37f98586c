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
from scipy.special import stdtr, stdtrit

from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.directory import newest
from pretrain.models import outline
from pretrain.run.metrics_file import read_metrics
from pretrain.tools.experiment.experiment_folder import PlannedRun

_VALIDATION = re.compile(r"validation/(.+)/loss")


@dataclass(frozen=True)
class Result:
    """A finished run. Losses are in nats per target token; None where they weren't measured.

    - `train_loss`: the mean since the line of metrics before the last.
    - `validation_loss`: after the last step, on the first validation corpus. `curve`: (step, loss) of all evaluations.
    - `text_loss`: the same on text tokens alone. `input_worth`: by how much it rises with another row's input.
    - `embedding_loss`: without its coefficient, like `train_loss`. `effective_rank`: of the embedding matrix.
    - `others`: the curves of other metrics, by name.
    - `tokens`: of text that were trained on. `seconds`, `processor_seconds`: of the steps alone, by the clock
      and of all ranks' processors.
    """

    row: str
    seed: int
    steps: int
    parameters: int
    train_loss: float | None
    validation_loss: float | None
    embedding_loss: float | None
    effective_rank: float | None
    curve: list[tuple[int, float]]
    text_loss: float | None = None
    input_worth: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    processor_seconds: float | None = None
    others: Mapping[str, list[tuple[int, float]]] = field(default_factory=dict)

    def curve_of(self, metric: str | None) -> list[tuple[int, float]]:
        """(step, value) of all evaluations of `metric`; None: of the validation loss."""
        return self.curve if metric is None else self.others.get(metric, [])


def results(runs: Iterable[PlannedRun], metrics: Iterable[str] = ()) -> list[Result]:
    """The results of those of `runs` that have finished, with these `metrics` besides their own."""
    others = sorted({*metrics})
    return [_result(run, others) for run in runs if run.finished]


def ends_by_seed(results: Iterable[Result], row: str, metric: str | None = None) -> dict[int, float]:
    """The last values of a row's `metric`; None: its validation losses."""
    curves = {result.seed: result.curve_of(metric) for result in results if result.row == row}
    return {seed: curve[-1][1] for seed, curve in curves.items() if curve}


def as_csv(results: Sequence[Result]) -> str:
    """One line a run, for other programs' statistics."""
    stream = io.StringIO()
    others = sorted({name for result in results for name in result.others})
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_OWN, *others])
    for result in results:
        curves = [result.curve_of(name) for name in others]
        own = (getattr(result, name) for name in _OWN)
        writer.writerow([*own, *(curve[-1][1] if curve else "" for curve in curves)])
    return stream.getvalue()


def read_csv(path: Path) -> list[Result]:
    """The runs of a runs.csv. The curve of a metric is its end."""
    found = []
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            row, seed, steps = line.pop("row"), int(line.pop("seed")), int(line.pop("steps", "0"))
            own: dict[str, Any] = {key: _number(line.pop(key, "")) for key in _OWN[3:]}
            end, others = own["validation_loss"], {key: [(steps, float(value))] for key, value in line.items() if value}
            curve = [] if end is None else [(steps, end)]
            found.append(Result(row, seed, steps, curve=curve, others=others, **own))
    return found


_OWN = [name for name in Result.__dataclass_fields__ if name not in ("curve", "others")]


def _number(text: str) -> float | int | None:
    return None if not text else int(text) if text.isdigit() else float(text)


def _result(run: PlannedRun, others: Sequence[str]) -> Result:
    checkpoint = newest(run.directory)
    assert checkpoint is not None, "a finished run has saved"
    model, curves = checkpoint_index.read(checkpoint).model, dict[str, list[tuple[int, float]]]()
    for row in read_metrics(run.directory):
        for name, value in row.metrics.items():
            curves.setdefault(name, []).append((row.step, value))
    corpus = next((found[1] for name in curves if (found := _VALIDATION.fullmatch(name))), "")

    def last(name: str) -> float | None:
        return curves[name][-1][1] if name in curves else None

    def total(name: str) -> float | None:
        return sum(value for _, value in curves[name]) if name in curves else None

    embedding_loss = last("train/embedding_loss")
    if embedding_loss is not None:
        embedding_loss /= getattr(model, "embedding_loss").coefficient  # noqa: B009 - of one family alone
    return Result(
        run.row,
        run.seed,
        run.config.run.max_steps,
        outline(model).num_parameters(),
        last("train/loss"),
        last(f"validation/{corpus}/loss"),
        embedding_loss,
        last("embedding/effective_rank"),
        curves.get(f"validation/{corpus}/loss", []),
        last(f"validation/{corpus}/text_loss"),
        last(f"input_use/{corpus}/worth"),
        last("train/tokens"),
        total("train/seconds"),
        total("train/processor_seconds"),
        {name: curves.get(name, []) for name in others},
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

    def __str__(self) -> str:
        """ "3.290±0.010" """
        return self.rounded(3)

    def rounded(self, places: int) -> str:
        return f"{self.mean:.{places}f}" + ("" if self.deviation is None else f"±{self.deviation:.{places}f}")


@dataclass(frozen=True)
class Comparison:
    """A row's mean minus its baseline's, with its standard error, 95 % interval and p-value.

    The model is additive: a value is the sum of a row's mean, what its seed adds to every row, and a normal residual
    whose variance all rows share. So each row's scatter tells about the others', and few seeds suffice where there are
    many rows; with two rows it is the paired t-test. Student's t, two-sided. None where nothing is left to estimate the
    variance from.
    """

    difference: float
    pairs: int
    error: float | None = None
    degrees_of_freedom: int = 0
    t: float | None = None
    p: float | None = None
    interval: tuple[float, float] | None = None

    def resolution(self, comparisons: int) -> float | None:
        """The least difference with a p-value below 0.05 after it is adjusted for being one of `comparisons`."""
        if self.error is None:
            return None
        return float(stdtrit(self.degrees_of_freedom, 1 - 0.025 / comparisons)) * self.error


def compare(rows: Mapping[str, Mapping[int, float]], baseline: str) -> dict[str, Comparison]:
    """Compares each row's values, by seed, with those of `baseline`. Left out: rows without a seed that it has too.

    >>> compare({"base": {0: 3.1, 1: 3.3, 2: 3.4}, "row": {0: 3.0, 1: 3.2, 2: 3.1}}, "base")["row"]
    Comparison(difference=-0.1666…, pairs=3, error=0.0666…, degrees_of_freedom=2, t=-2.5, p=0.1296…,
    interval=(-0.4535…, 0.1201…))
    """
    own = rows.get(baseline, {})
    pairs = {name: len(values.keys() & own.keys()) for name, values in rows.items() if name != baseline}
    names = [baseline, *(name for name, number in pairs.items() if number)]
    cells = [(name, seed) for name in names for seed in rows.get(name, ())]
    if len(names) == 1:
        return {}
    effects = (*names, *sorted({seed for _, seed in cells}))
    design = np.array([[float(one in cell) for one in effects] for cell in cells])
    values, inverse = np.array([rows[name][seed] for name, seed in cells]), np.linalg.pinv(design)
    free = len(cells) - int(np.linalg.matrix_rank(design))
    scatter = float(np.linalg.norm(values - design @ inverse @ values)) / math.sqrt(max(free, 1))
    if scatter <= 1e-12 * float(np.linalg.norm(values)):  # rounding alone
        scatter = 0.0
    found = {}
    for place, name in enumerate(names[1:], start=1):
        weights = inverse[place] - inverse[0]  # of the values, in the difference of the rows
        difference, error = float(weights @ values), float(np.linalg.norm(weights)) * scatter
        found[name] = Comparison(difference, pairs[name])
        if free:
            certain = math.copysign(math.inf, difference) if abs(difference) >= 1e-12 else 0.0
            t = difference / error if error else certain
            p, half = 2 * float(stdtr(free, -abs(t))), float(stdtrit(free, 0.975)) * error
            interval = difference - half, difference + half
            found[name] = Comparison(difference, pairs[name], error, free, t, p, interval)
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
