"""A track of the speedrun: which rows reach its loss for certain, and how many processor seconds they train."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_pipeline.foundation import tables
from data_pipeline.foundation.tables import aligned
from pretrain.tools.experiment.experiment_file import Experiment, Speedrun
from pretrain.tools.experiment.results import Result
from pretrain.tools.experiment.statistics import Spread


@dataclass(frozen=True)
class Attempt:
    """The finished runs of a row on a track.

    `p`: the chance of losses as low if their true mean were the target, by Student's one-sided t-test, and the larger
    one of the loss and the loss on text; None for one run. `is_record`: enough runs, and `p` small enough.
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


def attempts(experiment: Experiment, results: Sequence[Result]) -> list[Attempt]:
    """The rows that have finished runs, the fastest first."""
    assert experiment.speedrun is not None, "not a track"
    found = (_attempt([one for one in results if one.row == row], experiment.speedrun) for row in experiment.rows)
    return sorted((one for one in found if one), key=lambda one: one.seconds.mean)


def _attempt(runs: Sequence[Result], track: Speedrun) -> Attempt | None:
    losses = [one.validation_loss for one in runs if one.validation_loss is not None]
    times = [one.processor_seconds if track.clock == "processor" else one.seconds for one in runs]
    seconds = Spread.of([one for one in times if one is not None])
    loss = Spread.of(losses)
    if loss is None or seconds is None:
        return None
    text_losses = [one.text_loss for one in runs if one.text_loss is not None]
    chances = [chance(losses, track.target)]
    if track.text_target is not None:
        chances.append(chance(text_losses, track.text_target))
    known = [one for one in chances if one is not None]
    p = max(known) if len(known) == len(chances) else None
    return Attempt(
        row=runs[0].row,
        parameters=runs[0].parameters,
        steps=runs[0].steps,
        tokens=runs[0].tokens or math.nan,
        seconds=seconds,
        loss=loss,
        text_loss=Spread.of(text_losses),
        input_worth=Spread.of([one.input_worth for one in runs if one.input_worth is not None]),
        p=p,
        is_record=len(losses) >= track.least_seeds and p is not None and p < track.p_value,
    )


def chance(losses: Sequence[float], target: float) -> float | None:
    """Student's one-sided t-test of a mean below `target`, with n − 1 degrees of freedom; None for one loss."""
    from scipy.special import stdtr  # slow to import

    spread = Spread.of(losses)
    if spread is None or spread.deviation is None:
        return None
    if spread.deviation == 0:
        return float(spread.mean >= target)
    return float(stdtr(spread.number - 1, (spread.mean - target) / (spread.deviation / math.sqrt(spread.number))))


_CLOCKS = {"processor": "CPU s", "wall": "s"}


def text(experiment: Experiment, results: Sequence[Result]) -> str:
    """The table for a terminal of 80 columns."""
    rows = list(_rows(attempts(experiment, results)))
    return "\n".join([*aligned([_headings(experiment), *rows]), "", _note(experiment)])


def markdown(experiment: Experiment, results: Sequence[Result]) -> str:
    """The same as a Markdown table."""
    rows = list(_rows(attempts(experiment, results)))
    return "\n".join([*tables.markdown(_headings(experiment), rows), "", _note(experiment).replace("\n", " "), ""])


def _headings(experiment: Experiment) -> tuple[str, ...]:
    assert experiment.speedrun is not None, "not a track"
    return "row", "params", "steps", "tokens", _CLOCKS[experiment.speedrun.clock], "loss", "text", "input", "p", ""


def _rows(found: Sequence[Attempt]) -> Iterator[list[str]]:
    for one in found:
        yield [
            f"{one.row} ({one.loss.number})",
            f"{one.parameters:,}",
            f"{one.steps:,}",
            f"{one.tokens / 1e6:.2f}M",
            _seconds(one.seconds),
            f"{one.loss.mean:.4f}" + ("" if one.loss.deviation is None else f"±{one.loss.deviation:.4f}"),
            str(one.text_loss or ""),
            str(one.input_worth or ""),
            "" if one.p is None else "<.001" if one.p < 0.001 else f"{one.p:.3f}",
            "record" if one.is_record else "",
        ]


def _seconds(spread: Spread) -> str:
    return f"{spread.mean:.1f}" + ("" if spread.deviation is None else f"±{spread.deviation:.1f}")


def _note(experiment: Experiment) -> str:
    track = experiment.speedrun
    assert track is not None
    of_text = "" if track.text_target is None else f", and {track.text_target} on its text tokens"
    return (
        f"The target is a held-out loss of {track.target}{of_text}.\n"
        f"A record needs {track.least_seeds} seeds (in brackets) with p < {track.p_value:g}: the one-sided t-test\n"
        f"of a mean below the target. {_CLOCKS[track.clock]}: of the steps alone. input: what it is\n"
        "worth, in nats a text token."
    )
