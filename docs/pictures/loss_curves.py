"""docs/results/loss-curves.svg and loss-curves-faults.svg: the curves of docs/results/loss-curves/curves.csv.

.venv/bin/python -m docs.pictures.loss_curves
"""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from checks.results.data import rows_of
from data_pipeline.base.atomic import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[1] / "results"
DATA = FOLDER / "loss-curves/curves.csv"
NORMAL = {
    "span-corruption": "Span corruption",
    "ul2": "UL2",
    "bart": "BART's denoising",
    "prefix-lm": "Prefix LM",
}
FAULTS = {
    "t5": "No input is read: T5 with AdamW",
    "no-input": "The encoder's input is missing",
    "t5-large-output": "Output matrix too large at first",
    "rate-high": "Ten times the learning rate",
    "rate-far-too-high": "A hundred times the learning rate",
    "rate-low": "A thirtieth of the learning rate",
    "no-warm-up": "No warm-up",
    "other-tokenizer": "Tokenizer of other text",
    "padding-has-a-loss": "Padding counts in the loss",
    "cut-targets": "Targets cut in half",
    "no-eos": "Targets without EOS",
}
HIGHEST = 9.0  # nats: what lies above is cut off
BLUE, RED, GREEN, GREY = "#0969da", "#cf222e", "#1a7f37", "#8c959f"

Curve = list[tuple[int, float]]  # (step, value)
Curves = dict[str, dict[str, Curve]]  # of the first seed: by run, then by name


def curves(rows: Iterable[dict[str, str]]) -> Curves:
    """The curves of each run's first seed."""
    found: Curves = {}
    seeds: dict[str, str] = {}
    for row in rows:
        if seeds.setdefault(row["run"], row["seed"]) == row["seed"]:
            point = int(row["step"]), float(row["value"])
            found.setdefault(row["run"], {}).setdefault(row["name"], []).append(point)
    return found


def line(axes: "Axes", curve: Curve, style: str, color: str, label: str, width: float = 1.4) -> None:
    axes.plot(*zip(*curve, strict=True), style, color=color, linewidth=width, label=label)


def level(axes: "Axes", value: float, text: str) -> None:
    """A horizontal line with its name."""
    axes.axhline(value, color="black", linewidth=0.8, linestyle=":")
    axes.text(300, value + 0.08, text, fontsize=8, ha="right", va="bottom")


def normal(found: Curves) -> "Figure":
    """Two panels for each objective: losses, and below them what the input is worth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 8.6), layout="constrained")
    grid = figure.subplots(4, 2, sharex=True, sharey="row", height_ratios=[3, 1, 3, 1])
    for number, (run, title) in enumerate(NORMAL.items()):
        top, column = 2 * (number // 2), number % 2
        axes, below, own = grid[top][column], grid[top + 1][column], found[run]
        line(axes, own["train_loss"], "-", GREY, "loss in training", 0.9)
        line(axes, own["validation_loss"], "o-", BLUE, "held-out loss")
        line(axes, own["text_loss"], "o-", RED, "held-out loss of text tokens")
        level(axes, own["uniform"][0][1], "uniform: ln of the vocabulary")
        level(axes, own["unigram_entropy"][0][1], "unigram entropy of text")
        line(below, own["worth"], "o-", GREEN, "input's worth: the rise with another example's input")
        axes.set_title(title, fontsize=11)
        axes.set_ylim(1.0, HIGHEST)
        below.set_ylim(-0.2, 3.4)
        if column == 0:
            axes.set_ylabel("nats a token")
            below.set_ylabel("input's worth")
        if top == 2:
            below.set_xlabel("step")
    for axes in grid.flat:
        axes.grid(linewidth=0.3)
        for mark in axes.lines:
            mark.set_markersize(3)
    handles = [*grid[0][0].lines[:3], grid[1][0].lines[0]]
    labels = [one.get_label() for one in handles]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9)
    return figure


def faulty(found: Curves) -> "Figure":
    """A panel for each fault, beside the run without a fault, and one for the legend."""
    from matplotlib.figure import Figure

    height = len(FAULTS) // 2 + 1
    figure = Figure(figsize=(8.0, 2.1 * height), layout="constrained")
    grid = figure.subplots(height, 2, sharex=True, sharey=True)
    sound = found["span-corruption"]
    for axes, (run, title) in zip(grid.flat, FAULTS.items(), strict=False):
        own = found[run]
        line(axes, sound["train_loss"], "-", GREY, "sound run: loss in training", 0.9)
        line(axes, sound["text_loss"], "--", GREY, "sound run: held-out loss of text")
        line(axes, own["train_loss"], "-", RED, "with the fault: loss in training", 0.9)
        line(axes, own["text_loss"], "--", RED, "with the fault: held-out loss of text")
        if run == "cut-targets":
            line(axes, own["whole_text_loss"], ":", RED, "the same on whole targets")
        axes.axhline(
            sound["unigram_entropy"][0][1], color="black", linewidth=0.8, linestyle=":", label="unigram entropy"
        )
        if (first := own["train_loss"][0][1]) > HIGHEST:
            axes.text(8, HIGHEST - 0.2, f"begins at {first:.0f}", fontsize=8, va="top")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(0.0, HIGHEST)
        axes.grid(linewidth=0.3)
        axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("nats a token")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    labelled = {one.get_label(): one for axes in grid.flat for one in axes.lines}
    for axes in grid.flat[len(FAULTS) :]:
        axes.axis("off")
    grid.flat[-1].legend(labelled.values(), labelled.keys(), loc="center", fontsize=9, frameon=False)
    return figure


def description() -> str:
    """What both pictures say of the data that they were drawn from."""
    return f"{DATA.name}, sha256 {hashlib.sha256(DATA.read_bytes()).hexdigest()}"


def svg(figure: "Figure") -> bytes:
    import matplotlib as mpl

    drawn = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss-curves"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": description()})
    return drawn.getvalue()


if __name__ == "__main__":
    read = curves(rows_of(DATA))
    write_bytes(FOLDER / "loss-curves.svg", svg(normal(read)))
    write_bytes(FOLDER / "loss-curves-faults.svg", svg(faulty(read)))
