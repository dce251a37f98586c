"""`python -m experiments.speedrun TRACK runs.csv`: which rows of a track reach its loss for certain, and how fast.

docs/results/speedrun.md has the rules. `pretrain experiment configs/speedrun/TRACK` trains rows and writes
runs.csv.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from scipy.stats import ttest_1samp, ttest_ind

from data_pipeline.base.command import path_argument, run_command
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import aligned
from pretrain.tools.experiment.results import Result, Spread, read_csv, shown

P_VALUE = 0.01  # of a record, at most
_CLOCKS = {"processor_seconds": "CPU s", "seconds": "s"}


@dataclass(frozen=True)
class Track:
    """What rows have to reach: the mean held-out losses, of all and of text tokens, of the row `baseline`, or a loss of
    `target` nats per target token.

    `least_seeds`: runs that a record needs. `clock`: what times the steps, the processors of all ranks or the clock.
    """

    baseline: str | None = None
    target: float = math.nan
    least_seeds: int = 5
    clock: Literal["processor_seconds", "seconds"] = "processor_seconds"


TRACKS = {
    "mini": Track("baseline"),
    "small": Track("baseline-rms", least_seeds=3),
    "gpu": Track(target=1.953, clock="seconds"),  # nanoT5's loss, after 10.2 hours of an A100
}


@dataclass(frozen=True)
class Attempt:
    """The finished runs of a row on a track.

    `p`: the chance of losses as low if their true mean were the target, by Welch's one-sided t-test, and the larger
    one of the loss and the loss on text; None for one run. `is_record`: enough runs, and `p` small enough.
    `times_less`: the baseline's seconds over the row's (geometric means), and the 95 % interval of that ratio.
    """

    row: str
    parameters: int
    steps: int
    tokens: float
    seconds: Spread
    loss: Spread
    text_loss: Spread | None
    input_worth: Spread | None
    p: float | None = None
    is_record: bool = False
    times_less: tuple[float, float, float] | None = None


def judged(track: Track, results: Sequence[Result]) -> list[Attempt]:
    """The rows that have finished runs, the fastest first."""
    by_row = {row: [one for one in results if one.row == row] for row in dict.fromkeys(one.row for one in results)}
    baseline = by_row.get(track.baseline or "", [])
    found = (_attempt(runs, baseline, track) for runs in by_row.values())
    return sorted((one for one in found if one), key=lambda one: one.seconds.mean)


def _attempt(runs: Sequence[Result], baseline: Sequence[Result], track: Track) -> Attempt | None:
    loss, seconds, text_loss, input_worth = (
        Spread.of(_values(runs, name)) for name in ("validation_loss", track.clock, "text_loss", "input_worth")
    )
    first, is_baseline = runs[0], runs[0].row == track.baseline
    if loss is None or seconds is None or first.parameters is None:
        return None
    p, fewest = None if is_baseline else _p(runs, baseline, track), loss.number
    if track.baseline:
        fewest = min(fewest, len(baseline))
    return Attempt(
        first.row,
        first.parameters,
        first.steps,
        first.tokens or math.nan,
        seconds,
        loss,
        text_loss,
        input_worth,
        p,
        is_record=fewest >= track.least_seeds and p is not None and p < P_VALUE,
        times_less=None if is_baseline else _times_less(runs, baseline, track),
    )


def _values(runs: Sequence[Result], name: str) -> list[float]:
    return [value for one in runs if (value := getattr(one, name)) is not None]


def _p(runs: Sequence[Result], baseline: Sequence[Result], track: Track) -> float | None:
    if track.baseline is None:
        losses = _values(runs, "validation_loss")
        return float(ttest_1samp(losses, track.target, alternative="less").pvalue) if len(losses) > 1 else None
    tests = [_welch(runs, baseline, name, "less") for name in ("validation_loss", "text_loss")]
    return None if None in tests else max(float(test.pvalue) for test in tests)


def _welch(runs: Sequence[Result], others: Sequence[Result], name: str, alternative: str = "two-sided") -> Any:
    """Of the means of `name`; None where either has only one value. Seconds are compared by their logarithms."""
    own, other = (_values(group, name) for group in (runs, others))
    if min(len(own), len(other)) < 2:
        return None
    if name in _CLOCKS:
        own, other = ([math.log(value) for value in values] for values in (own, other))
    return ttest_ind(own, other, equal_var=False, alternative=alternative)


def _times_less(runs: Sequence[Result], baseline: Sequence[Result], track: Track) -> tuple[float, float, float] | None:
    test = _welch(baseline, runs, track.clock)
    if test is None:
        return None
    low, high = test.confidence_interval()
    ratio = math.exp((low + high) / 2)  # the interval of Student's t is symmetric
    return ratio, math.exp(low), math.exp(high)


def text(track: Track, found: Sequence[Attempt]) -> str:
    """The table for a terminal of 80 columns."""
    clock = _CLOCKS[track.clock]
    headings = ("row", "params", "steps", "tokens", clock, "times less", "loss", "text", "input", "p", "")
    target = f"a held-out loss of {track.target}"
    if track.baseline:
        target = f"the mean losses of `{track.baseline}`, on all and on text tokens"
    note = (
        f"The target is {target}.\n"
        f"A record needs {track.least_seeds} seeds (in brackets) with p < {P_VALUE:g}: Welch's one-sided\n"
        f"t-test of a mean below the target. {clock}: of the steps alone; how many times\n"
        "less than the baseline, with the ratio's 95 % interval. input: what it is worth,\n"
        "in nats a text token."
    )
    return "\n".join([*aligned([headings, *rows(found)]), "", note])


def rows(found: Sequence[Attempt]) -> Iterator[list[str]]:
    """The cells of the table, below its headings."""
    for one in found:
        yield [
            f"{one.row} ({one.loss.number})",
            f"{one.parameters:,}",
            f"{one.steps:,}",
            f"{one.tokens / 1e6:.2f}M",
            f"{one.seconds:.1f}",
            "" if one.times_less is None else "{:.1f} ({:.1f}–{:.1f})".format(*one.times_less),
            f"{one.loss:.4f}",
            shown(one.text_loss, ".3f"),
            shown(one.input_worth, ".3f"),
            "" if one.p is None else "<.001" if one.p < 0.001 else f"{one.p:.3f}",
            "record" if one.is_record else "",
        ]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog="Example: python -m experiments.speedrun mini runs/speedrun-mini/runs.csv")
def _speedrun(
    name: Annotated[str, typer.Argument(metavar="TRACK", help=f"{', '.join(TRACKS)}.")],
    runs: Annotated[Path, path_argument("RUNS.csv", "What `pretrain experiment` wrote of the track's runs.")],
) -> None:
    """Judge the rows of a track of the speedrun."""
    if name not in TRACKS:
        raise UserError(f"{name}: no such track; choose {', '.join(TRACKS)}")
    if not runs.is_file():
        raise UserError(f"{runs}: no such file; pretrain experiment configs/speedrun/{name} --seeds 5 writes it")
    print(text(TRACKS[name], judged(TRACKS[name], read_csv(runs))))


if __name__ == "__main__":
    run_command(app)
