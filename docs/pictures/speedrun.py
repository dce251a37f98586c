"""docs/results/speedrun/mini.png and small.png: losses of the baseline and the record over processor seconds.

    .venv/bin/python -m docs.pictures.speedrun

From the logs TRACK/ROW-seed-N.jsonl beside the pictures; a row without logs is left out. Lines are losses in training,
thin for each seed and thick for their mean, dotted while a curriculum trains another objective than the track's. Points
are the held-out losses at the end. The target is the mean held-out loss of the track's baseline, which
experiments/speedrun.py names.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from checks.results.data import curves_of
from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.config_file import load
from data_pipeline.base.formatting import counted
from experiments import speedrun
from pretrain.config import RunConfig
from pretrain.evaluate.record import png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
RESULTS, CONFIGS = ROOT / "docs/results/speedrun", ROOT / "configs/speedrun"
TRACKS = {"mini": ("baseline", "narrow"), "small": ("baseline-rms", "narrow")}

Log = dict[str, list[tuple[int, float]]]  # (step, value) of each metric
Points = list[tuple[int, float, float]]  # (step, processor seconds up to it, loss in training)


def curve(log: Log) -> Points:
    seconds = accumulate(value for _, value in log["train/processor_seconds"])  # each of the steps since the last
    return [(step, until, loss) for until, (step, loss) in zip(seconds, log["train/loss"], strict=True)]


def mean(curves: Sequence[Points]) -> Points:
    """Over seeds, at the steps that all have."""
    at_step = [{step: (seconds, loss) for step, seconds, loss in one} for one in curves]
    steps = sorted(set.intersection(*map(set, at_step)))
    return [(step, fmean(one[step][0] for one in at_step), fmean(one[step][1] for one in at_step)) for step in steps]


def held_out(log: Log) -> float:
    """The last held-out loss."""
    return log["validation/loss"][-1][1]


def target(track: str) -> float | None:
    """The baseline's mean held-out loss; None where it has no logs yet."""
    losses = [held_out(log) for log in curves_of(RESULTS / track, speedrun.TRACKS[track].baseline or "")]
    return fmean(losses) if losses else None


def draw_row(axes: "Axes", track: str, row: str, color: str) -> None:
    runs = curves_of(RESULTS / track, row)
    if not runs:
        return
    curriculum = load(CONFIGS / track / f"{row}.yaml", [], RunConfig).data.curriculum
    change = curriculum[-1].until_step if curriculum else 0
    curves = [curve(log) for log in runs]
    average = mean(curves)
    for points, width, alpha in [*((one, 0.6, 0.5) for one in curves), (average, 2.2, 1.0)]:
        before = [one for one in points if one[0] <= change]
        for part, style in ((before, ":"), (points[max(len(before) - 1, 0) :], "-")):
            axes.plot([one[1] for one in part], [one[2] for one in part], style, color=color, lw=width, alpha=alpha)
    losses = [held_out(log) for log in runs]
    end = f"{fmean(losses):.3f} held out after {average[-1][1]:.0f} s"
    label = f"{row}: {end}, {counted(len(runs), 'seed')}"
    axes.plot([one[-1][1] for one in curves], losses, "o", color=color, markeredgecolor="black", zorder=3, label=label)


def draw(track: str) -> None:
    """Writes TRACK.png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    axes = figure.subplots()
    for row, color in zip(TRACKS[track], ("tab:red", "tab:blue"), strict=True):
        draw_row(axes, track, row, color)
    goal = target(track)
    if goal is not None:
        axes.axhline(goal, color="grey", linewidth=1, linestyle="--", label=f"target: {goal:.3f} held out")
    axes.plot([], [], color="black", linewidth=2.2, label="in training, mean of seeds")
    axes.plot([], [], ":", color="black", linewidth=2.2, label="in training on longer spans: another loss")
    axes.grid(linewidth=0.4, alpha=0.6)
    axes.set(xlabel="processor seconds of the steps", ylabel="loss, nats per target token", xlim=(0, None))
    axes.legend(title=f"track {track}")
    write_bytes(RESULTS / f"{track}.png", png(figure))


if __name__ == "__main__":
    for name in TRACKS:
        draw(name)
