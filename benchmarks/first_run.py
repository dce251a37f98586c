"""Curves, tables and samples of finished runs, for docs/results/first-run.md.

python benchmarks/first_run.py RUN … [--picture docs/results/first-run.svg] [--write docs/results/first-run.md]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from pretrain.evaluation.record import directory, table
from pretrain.run.metrics_file import Row, read_metrics

BEGIN, END = "<!-- benchmarks/first_run.py writes these lines -->\n", "<!-- until here -->\n"
SENTENCES = 2
Curve = tuple[list[int], list[float]]


def curve(rows: list[Row], begin: str, end: str = "") -> Curve:
    """The steps and values of the metrics whose names begin and end so."""
    found = [
        (row.step, value)
        for row in rows
        for name, value in row.metrics.items()
        if name.startswith(begin) and name.endswith(end)
    ]
    return [step for step, _ in found], [value for _, value in found]


def validations(rows: list[Row]) -> Iterator[str]:
    """A table of the held-out losses."""
    yield "| step | training loss since | held-out loss | accuracy | on text alone | word counts alone |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: |"
    columns = ("loss", "accuracy", "text_loss", "unigram_entropy")
    before = 0
    for row in rows:
        names = {name.split("/")[1] for name in row.metrics if name.startswith("validation/")}
        for corpus in names:
            _, trained = curve([one for one in rows if before < one.step <= row.step], "train/loss")
            values = [sum(trained) / len(trained), *(row.metrics[f"validation/{corpus}/{name}"] for name in columns)]
            cells = [f"{row.step:,}", *(f"{value:.3f}" for value in values)]
            yield "| " + " | ".join(cells) + " |"
        before = row.step if names else before


def hooks(rows: list[Row]) -> Iterator[str]:
    """A table of the seconds of each hook beside those of the steps."""
    seconds: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            if name.startswith("evaluation/") and name.endswith("/seconds"):
                seconds.setdefault(name.split("/")[1], []).append(value)
    speeds = curve(rows, "train/steps_per_second")
    steps, taken, before = rows[-1].step, 0.0, 0
    for step, speed in zip(*speeds, strict=True):
        taken += (step - before) / speed
        before = step
    yield "| | times | seconds each | share of the run |"
    yield "| --- | ---: | ---: | ---: |"
    whole = taken + sum(map(sum, seconds.values()))
    yield f"| steps | {steps:,} | {taken / steps:.1f} | {taken / whole:.1%} |"
    for hook, each in seconds.items():
        yield f"| {hook} | {len(each)} | {sum(each) / len(each):.1f} | {sum(each) / whole:.1%} |"


def samples(run: Path) -> Iterator[str]:
    """The same sentences at each step."""
    found = table(directory(run) / "samples.json")
    for given in list(dict.fromkeys(row["given"] for row in found))[:SENTENCES]:
        rows = [row for row in found if row["given"] == given]
        yield f"    {rows[0]['original']}"
        yield from (f"    {row['step']:>5,}  {row['written']}" for row in rows)
        yield ""


def draw(runs: list[Path], out: Path) -> None:
    """Writes a picture with a panel for each run; the same bytes for the same metrics."""
    matplotlib.rcParams.update({"svg.hashsalt": "first-run", "svg.fonttype": "none", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(runs), figsize=(9, 3.6), sharey=True, squeeze=False)
    for run, axes in zip(runs, panels[0], strict=True):
        rows = read_metrics(run)
        axes.plot(*curve(rows, "train/loss"), color="tab:blue", linewidth=1, label="training")
        for metric, colour, label in (
            ("/loss", "tab:orange", "held out"),
            ("/text_loss", "tab:green", "held out, text alone"),
        ):
            points = curve(rows, "validation/", metric)
            axes.plot(*points, color=colour, marker="o", markersize=3, linewidth=1, label=label)
        _, counts = curve(rows, "validation/", "/unigram_entropy")
        if counts:
            axes.axhline(counts[-1], color="black", linestyle="--", linewidth=1, label="word counts, text alone")
        axes.set_title(run.name)
        axes.set_xlabel("step")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0][0].set_ylabel("nats per target token")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def page(runs: list[Path]) -> Iterator[str]:
    for run in runs:
        rows = read_metrics(run)
        if any(name.startswith("validation/") for row in rows for name in row.metrics):
            yield from (f"### {run.name}", "", *validations(rows), "", *hooks(rows), "", *samples(run))
        else:
            yield from (f"### {run.name}", "", *hooks(rows), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--write", type=Path, help="the page that gets the tables")
    options = parser.parse_args()
    lines = "".join(line + "\n" for line in page(options.runs))
    print(lines, end="")
    if options.picture:
        draw(options.runs, options.picture)
    if options.write:
        before, rest = options.write.read_text(encoding="utf-8").split(BEGIN)
        options.write.write_text(before + BEGIN + lines + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
