"""Time series as tokens: Chronos' scaling and bins (Ansari et al. 2024), on series drawn as its KernelSynth draws them.

A series is a sample of a Gaussian process, whose kernel is a sum or a product of up to five kernels of a bank. So the
best forecast of a held-out series is known: the conditional mean. Here a series has 144 points. The first 72, which are
in every input, give the scale: Chronos takes the whole context.

    python -m examples.recipes.time_series data data/time-series
    python -m examples.recipes.time_series measure runs/time-series data/time-series
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from data_pipeline.base.command import path_argument, path_option, run_command
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import parse_json
from examples.recipes.masked_spans import others, show
from pretrain.cli.app import Checkpoint
from pretrain.engine.checkpoint.index import checkpoint_in
from pretrain.engine.checkpoint.trained import TrainedModel
from pretrain.evaluate.generation.settings import GenerationSettings
from pretrain.evaluate.generation.texts import Answers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

LENGTH, SCALED, HORIZON = 144, 72, 24  # points of a series, of which the first give the scale and the last are forecast
PERIODS = (4, 6, 7, 12, 24, 30)
_PATHS = 4  # series of one kernel in training
_MOST_KERNELS = 5
_NOISE = 0.01  # of each point, as a share of the variance; Chronos' series may have none
_SAMPLES = 20  # futures, of which the forecast is the median, as Chronos'

Kernel = Callable[[np.ndarray], np.ndarray]
"""A covariance (points, points), from times (points,) in 0 … 1."""


@dataclass(frozen=True)
class Process:
    """A Gaussian process. `period`: of its longest periodic kernel, in points; 1: no such kernel."""

    covariance: np.ndarray
    period: int

    @classmethod
    def drawn(cls, random: np.random.Generator) -> "Process":
        """A random combination of 1 to 5 kernels, as in Chronos' appendix."""
        times = np.linspace(0, 1, LENGTH)
        total, period = np.zeros((LENGTH, LENGTH)), 1
        for number in range(random.integers(1, _MOST_KERNELS + 1)):
            kernel, points = _kernel(random)
            matrix, period = kernel(times), max(period, points)
            total = matrix if number == 0 else total + matrix if random.random() < 0.5 else total * matrix
        return cls(total + _NOISE * np.trace(total) / LENGTH * np.eye(LENGTH), period)

    def draw(self, random: np.random.Generator, number: int) -> np.ndarray:
        """(number, points)."""
        root = np.linalg.cholesky(self.covariance + 1e-9 * np.eye(LENGTH))
        return random.standard_normal((number, LENGTH)) @ root.T

    def expected(self, context: np.ndarray) -> np.ndarray:
        """The mean of the points behind the `context` (points,)."""
        seen = len(context)
        weights = np.linalg.solve(self.covariance[:seen, :seen], context)
        return self.covariance[seen:, :seen] @ weights


def _kernel(random: np.random.Generator) -> tuple[Kernel, int]:
    """A kernel of the bank, and its period; 1: not periodic."""
    kind = random.choice(["constant", "noise", "linear", "rbf", "quadratic", "periodic", "periodic"])
    if kind == "periodic":
        points = int(random.choice(PERIODS))
        return lambda t: np.exp(-2 * np.sin(math.pi * _apart(t) * (LENGTH - 1) / points) ** 2), points
    scale = float(random.choice([0.1, 1.0, 10.0]))
    kernels: dict[str, Kernel] = {
        "constant": lambda t: np.ones((len(t), len(t))),
        "noise": lambda t: min(scale, 1.0) * np.eye(len(t)),
        "linear": lambda t: min(scale, 1.0) + np.outer(t, t),
        "rbf": lambda t: np.exp(-(_apart(t) ** 2) / (2 * (scale / 10) ** 2)),
        "quadratic": lambda t: 1 / (1 + _apart(t) ** 2 / (2 * scale / 10)),
    }
    return kernels[str(kind)], 1


def _apart(times: np.ndarray) -> np.ndarray:
    return np.abs(times[:, None] - times)


def scale_of(series: np.ndarray) -> float:
    """The mean of the first absolute values; 1 if all are 0."""
    return float(np.abs(series[:SCALED]).mean()) or 1.0


@dataclass(frozen=True)
class Bins:
    """`number` equal bins between −`limit` and `limit` times the scale."""

    number: int
    limit: float = 5.0

    def of(self, series: np.ndarray, scale: float) -> list[int]:
        """The bin of each value, from 0; values beyond the limit are in the outermost bins."""
        bins = np.floor((series / scale + self.limit) * self.number / (2 * self.limit)).astype(int)
        return np.clip(bins, 0, self.number - 1).tolist()

    def middles(self, ids: Sequence[int], scale: float) -> np.ndarray:
        return ((np.asarray(ids) + 0.5) * 2 * self.limit / self.number - self.limit) * scale


BINS = Bins(1022)  # Chronos has 4,094 up to 15


@app.command("data", epilog="Example: python -m examples.recipes.time_series data data/time-series")
def _data(
    out: Annotated[Path, path_argument("OUT", "The new folder.")],
    number: Annotated[int, typer.Option(min=4, help="Number of training series.")] = 40_000,
    tested: Annotated[int, typer.Option(min=2, help="Number of test series.")] = 500,
    seed: Annotated[int, typer.Option(help="Determines the series.")] = 0,
) -> None:
    """Draw series: OUT/train.txt and OUT/held-out.txt with the bins of a series in a line, OUT/test.jsonl with values.

    A test series has its own kernel, its period, and the best forecast.
    """
    if out.exists():
        raise UserError(f"{out}: exists")
    out.mkdir(parents=True)
    for purpose, (name, processes) in enumerate((("train", number // _PATHS), ("held-out", tested))):
        with (out / f"{name}.txt").open("w", encoding="ascii") as file:
            for index in range(processes):
                random = np.random.default_rng([seed, purpose, index])
                for series in Process.drawn(random).draw(random, _PATHS):
                    file.write(" ".join(map(str, BINS.of(series, scale_of(series)))) + "\n")
    with (out / "test.jsonl").open("w", encoding="utf-8") as file:
        for index in range(tested):
            random = np.random.default_rng([seed, 2, index])
            process = Process.drawn(random)
            (series,) = process.draw(random, 1)
            line = {"period": process.period, "values": series.tolist()}
            file.write(json.dumps({**line, "best": process.expected(series[:-HORIZON]).tolist()}) + "\n")


@dataclass(frozen=True)
class HeldOut:
    """A series to forecast: its period in points, its values, and the best forecast of the last 24."""

    period: int
    values: list[float]
    best: list[float]

    @property
    def context(self) -> np.ndarray:
        return np.array(self.values[:-HORIZON])

    def mase(self, forecast: np.ndarray) -> float:
        return mase(self.context, np.array(self.values[-HORIZON:]), forecast, self.period)


def mase(context: np.ndarray, future: np.ndarray, forecast: np.ndarray, period: int) -> float:
    """The mean absolute scaled error (Hyndman and Koehler 2006): 1 is seasonal Naive's error in the context."""
    return float(np.abs(future - forecast).mean() / np.abs(context[period:] - context[:-period]).mean())


def naive(context: np.ndarray, period: int, horizon: int = HORIZON) -> np.ndarray:
    """The last `period` values again and again."""
    return np.resize(context[-period:], horizon)


def autoregressive(context: np.ndarray, order: int = 24) -> np.ndarray:
    """Of a linear model of the values before, by ridge regression on the context alone."""
    mean, spread = context.mean(), context.std() or 1.0
    scaled = list((context - mean) / spread)
    past = np.lib.stride_tricks.sliding_window_view(np.array(scaled), order)
    weights = np.linalg.solve(past[:-1].T @ past[:-1] + 1e-2 * np.eye(order), past[:-1].T @ np.array(scaled[order:]))
    for _ in range(HORIZON):
        scaled.append(float(np.clip(np.dot(scaled[-order:], weights), -10, 10)))
    return np.array(scaled[-HORIZON:]) * spread + mean


def of_others(found: Sequence[np.ndarray], scales: Sequence[float]) -> list[np.ndarray]:
    """For each series the forecast of another series, divided by that series' scale and multiplied by its own."""
    scaled = [forecast / scale for forecast, scale in zip(found, scales, strict=True)]
    return [forecast * scale for forecast, scale in zip(others(scaled), scales, strict=True)]


def forecasts(
    trained: TrainedModel, contexts: Sequence[np.ndarray], scales: Sequence[float], bins: Bins, horizon: int
) -> list[np.ndarray]:
    """The median of 20 sampled futures of each context, for the next `horizon` points.

    A special token, which a model of few steps may draw, counts as the bin of 0.
    """
    texts = [" ".join(map(str, bins.of(context, scale))) for context, scale in zip(contexts, scales, strict=True)]
    settings = GenerationSettings(max_new_tokens=horizon, min_new_tokens=horizon, temperature=1.0, seed=0)
    answers = Answers(trained, texts, settings, samples=_SAMPLES)
    zero = bins.number // 2
    words = (one.generated.split() for one in answers.following(0))  # without padding, so perhaps too few
    drawn = ([int(word) if word.isdecimal() else zero for word in future] for future in words)
    futures = [[*ids, *[zero] * (horizon - len(ids))] for ids in drawn]
    return [
        np.median([bins.middles(ids, scale) for ids in futures[row * _SAMPLES : (row + 1) * _SAMPLES]], axis=0)
        for row, scale in enumerate(scales)
    ]


@app.command("measure", epilog="Example: python -m examples.recipes.time_series measure runs/time-series data")
def _measure(
    checkpoint: Checkpoint,
    folder: Annotated[Path, path_argument("DATA", "The folder that `data` has written.")],
    number: Annotated[int, typer.Option(min=2, help="Number of test series.")] = 500,
    out: Annotated[Path | None, path_option("--out", "A CSV file. Default: the table is printed.")] = None,
) -> None:
    """Forecast the last 24 points of test series, and compare with Naive, seasonal Naive and the best forecast."""
    lines = (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()[:number]
    series = [parse_json(line, HeldOut, folder / "test.jsonl") for line in lines]
    trained = TrainedModel.open(checkpoint_in(checkpoint)).on_best_device()
    contexts = [one.context for one in series]
    scales = [scale_of(one) for one in contexts]
    found = forecasts(trained, contexts, scales, BINS, HORIZON)
    by = {
        "model": found,
        "model, with another series": of_others(found, scales),
        "Naive": [naive(one, 1) for one in contexts],
        "seasonal Naive": [naive(one.context, one.period) for one in series],
        "AR(24) of each series": [autoregressive(one) for one in contexts],
        "the process's mean": [np.array(one.best) for one in series],
    }
    groups = {
        "all": series,
        "with a period": [one for one in series if one.period > 1],
        "without": [one for one in series if one.period == 1],
    }
    errors = {name: {id(one): one.mase(forecast) for one, forecast in zip(series, list_, strict=True)}
              for name, list_ in by.items()}  # fmt: skip
    rows = [
        [name, *(f"{np.mean([mase[id(one)] for one in group]):.3f}" for group in groups.values()),
         f"{np.median([*mase.values()]):.3f}"]
        for name, mase in errors.items()
    ]  # fmt: skip
    show(["forecast", *(f"{group} ({len(some)})" for group, some in groups.items()), "median of all"], rows, out)


if __name__ == "__main__":
    run_command(app)
