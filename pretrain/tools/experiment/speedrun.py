"""A track of the speedrun: which rows reach its loss for certain, and how many processor seconds they train."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipeline.foundation import formatting
from pretrain.tools.experiment.experiment_file import Experiment, Speedrun
from pretrain.tools.experiment.results import Result
from pretrain.tools.experiment.statistics import Spread, Welch


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
    p: float | None
    is_record: bool
    times_less: tuple[float, float, float] | None


def attempts(experiment: Experiment, results: Sequence[Result]) -> list[Attempt]:
    """The rows that have finished runs, the fastest first."""
    track = experiment.speedrun
    assert track is not None, "not a track"
    baseline = [one for one in results if one.row == track.baseline]
    of_rows = ([one for one in results if one.row == row] for row in experiment.rows)
    found = (_attempt(runs, baseline, track) for runs in of_rows)
    return sorted((one for one in found if one), key=lambda one: one.seconds.mean)


def _attempt(runs: Sequence[Result], baseline: Sequence[Result], track: Speedrun) -> Attempt | None:
    loss, seconds = Spread.of(_losses(runs)), Spread.of(_seconds(runs, track))
    if loss is None or seconds is None:
        return None
    text_loss = Spread.of(_text_losses(runs))
    is_baseline = runs[0].row == track.baseline
    targets: list[tuple[Spread | None, Spread | None]]
    if track.target is not None:
        targets = [(loss, Spread(track.target, 0.0, 2))]
    else:
        targets = [(loss, Spread.of(_losses(baseline))), (text_loss, Spread.of(_text_losses(baseline)))]
    chances = [] if is_baseline else [welch.p for own, target in targets if (welch := _welch(own, target)) is not None]
    p = max(chances) if chances and len(chances) == len(targets) else None
    fewest = min(loss.number, len(baseline)) if track.baseline else loss.number
    times = _welch(_logarithms(baseline, track), _logarithms(runs, track))
    return Attempt(
        row=runs[0].row,
        parameters=runs[0].parameters,
        steps=runs[0].steps,
        tokens=runs[0].tokens or math.nan,
        seconds=seconds,
        loss=loss,
        text_loss=text_loss,
        input_worth=Spread.of([one.input_worth for one in runs if one.input_worth is not None]),
        p=p,
        is_record=fewest >= track.least_seeds and p is not None and p < track.p_value,
        times_less=None
        if times is None or is_baseline
        else (math.exp(times.difference), math.exp(times.interval[0]), math.exp(times.interval[1])),
    )


def _losses(runs: Sequence[Result]) -> list[float]:
    return [one.validation_loss for one in runs if one.validation_loss is not None]


def _text_losses(runs: Sequence[Result]) -> list[float]:
    return [one.text_loss for one in runs if one.text_loss is not None]


def _seconds(runs: Sequence[Result], track: Speedrun) -> list[float]:
    times = [one.processor_seconds if track.clock == "processor" else one.seconds for one in runs]
    return [one for one in times if one is not None]


def _logarithms(runs: Sequence[Result], track: Speedrun) -> Spread | None:
    return Spread.of([math.log(one) for one in _seconds(runs, track)])


def _welch(first: Spread | None, second: Spread | None) -> Welch | None:
    return None if first is None or second is None else Welch.of(first, second)


_CLOCKS = {"processor": "CPU s", "wall": "s"}


def text(experiment: Experiment, results: Sequence[Result]) -> str:
    """The table for a terminal of 80 columns."""
    found = list(rows(attempts(experiment, results)))
    return "\n".join([*formatting.aligned([_headings(experiment), *found]), "", _note(experiment)])


def markdown(experiment: Experiment, results: Sequence[Result]) -> str:
    """The same as a Markdown table."""
    found = list(rows(attempts(experiment, results)))
    return "\n".join([*formatting.markdown(_headings(experiment), found), "", _note(experiment).replace("\n", " "), ""])


def _headings(experiment: Experiment) -> tuple[str, ...]:
    assert experiment.speedrun is not None, "not a track"
    clock = _CLOCKS[experiment.speedrun.clock]
    return "row", "params", "steps", "tokens", clock, "times less", "loss", "text", "input", "p", ""


def rows(found: Sequence[Attempt]) -> Iterator[list[str]]:
    """The cells of a table, below its headings."""
    for one in found:
        yield [
            f"{one.row} ({one.loss.number})",
            f"{one.parameters:,}",
            f"{one.steps:,}",
            f"{one.tokens / 1e6:.2f}M",
            f"{one.seconds.mean:.1f}" + ("" if one.seconds.deviation is None else f"±{one.seconds.deviation:.1f}"),
            "" if one.times_less is None else "{:.1f} ({:.1f}–{:.1f})".format(*one.times_less),
            f"{one.loss.mean:.4f}" + ("" if one.loss.deviation is None else f"±{one.loss.deviation:.4f}"),
            str(one.text_loss or ""),
            str(one.input_worth or ""),
            "" if one.p is None else "<.001" if one.p < 0.001 else f"{one.p:.3f}",
            "record" if one.is_record else "",
        ]


def _note(experiment: Experiment) -> str:
    track = experiment.speedrun
    assert track is not None
    clock = _CLOCKS[track.clock]
    if track.baseline is None:
        target = f"The target is a held-out loss of {track.target}."
    else:
        target = f"The target is the mean losses of `{track.baseline}`, on all and on text tokens."
    return (
        f"{target}\n"
        f"A record needs {track.least_seeds} seeds (in brackets) with p < {track.p_value:g}: Welch's one-sided\n"
        f"t-test of a mean below the target. {clock}: of the steps alone; how many times\n"
        "less than the baseline, with the ratio's 95 % interval. input: what it is worth,\n"
        "in nats a text token."
    )
