"""`pretrain watch`: shows the curves and samples of a run in the terminal, from RUN/metrics.jsonl and the table of
samples.

A terminal is updated as the run writes them, until Ctrl-C. Other outputs get one snapshot. Curves are drawn with
Braille characters, each of which holds 2 × 4 dots.
"""

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted, duration
from pretrain.evaluate import record
from pretrain.run import deaths, restarts
from pretrain.run.metrics_file import FILE_NAME, Row, rows_from

Point = tuple[float, float]
Dot = tuple[int, int]

_POLL_SECONDS = 1.0
_LOSS = "train/loss"
_STRAGGLER = "stragglers/factor"  # above 1 while there is a straggler
_LOWEST, _HIGHEST = 4, 10  # lines of a curve
_OTHERS = 16  # lines above and below the curves, approximately
_MOST_POINTS = 2000
_NARROWEST, _BESIDE_CHARTS = 50, 42  # columns
_BESIDE = {  # small charts: metrics with the format of their last value
    "train/learning_rate": "{:.2e}",
    "train/gradient_norm": "{:.3f}",
    "train/tokens_per_second": "{:,.0f}",
    "train/mfu": "{:.1%}",
    "train/data_wait_fraction": "{:.1%}",
}
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column


@dataclass
class Curves:
    """The metrics of a run so far, read as the file grows. `last`: the last row.

    When the run resumes or rewinds, the earlier values of the steps that it repeats are dropped.
    """

    path: Path
    last: Row | None = None
    _offset: int = 0
    _step: int = 0
    _values: dict[str, dict[int, float]] = field(default_factory=dict)

    def read(self) -> None:
        """Reads the new rows."""
        if self.path.exists() and self.path.stat().st_size < self._offset:  # a new run in the same directory
            self.last, self._offset, self._step, self._values = None, 0, 0, {}
        for row, offset in rows_from(self.path, self._offset):
            if _LOSS in row.metrics:
                if row.step <= self._step:
                    for name, values in self._values.items():
                        self._values[name] = {step: value for step, value in values.items() if step < row.step}
                self._step = row.step
            for name, value in row.metrics.items():
                self._values.setdefault(name, {})[row.step] = value
            self.last, self._offset = row, offset

    def of(self, name: str) -> list[Point]:
        return sorted(self._values.get(name, {}).items())

    def losses(self) -> list[str]:
        """The names of the losses, the training rows' first."""
        known = [name for name, values in self._values.items() if values]  # a resumed run may have dropped them
        held_out = sorted(name for name in known if re.fullmatch("validation/.+/loss", name))
        return [*([_LOSS] if _LOSS in known else []), *held_out]


def watch(run_dir: Path, once: bool = False, console: Console | None = None) -> None:
    """Shows the run until Ctrl-C; with `once`, or if the output is no terminal, shows it once.

    Raises UserError if `run_dir` has no metrics and is no run that could still write metrics.
    """
    console = console or Console()
    curves = Curves(run_dir / FILE_NAME)
    curves.read()
    if curves.last is None and (once or not console.is_terminal or not run_dir.is_dir()):
        raise UserError(f"{curves.path}: no metrics here yet; give the directory of a run that trains or has trained")
    if once or not console.is_terminal:
        console.print(_view(run_dir, curves, console.width))
        return
    # Ctrl-C ends the display, which is no failure
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=False, auto_refresh=False) as live:
        while True:
            live.update(_view(run_dir, curves, console.width, console.height), refresh=True)
            time.sleep(_POLL_SECONDS)
            curves.read()


def _view(run_dir: Path, curves: Curves, width: int, height: int = 0) -> Group:
    """The whole display, in `width` columns. In a terminal of `height` lines, many curves have fewer lines each."""
    width, losses = max(width, _NARROWEST), curves.losses()
    lines = max(_LOWEST, min(_HIGHEST, (height - _OTHERS) // len(losses) - 2)) if height and losses else _HIGHEST
    shown = [line for name in losses for line in _curve(name, curves.of(name), width, lines)]
    return Group(*_head(run_dir, curves), *shown, _small_charts(curves, width), *_samples(run_dir))


def _head(run_dir: Path, curves: Curves) -> Iterator[Text]:
    if curves.last is None:
        yield Text(f"{run_dir}: no metrics yet", style="bold")
        return
    ago = max(0.0, time.time() - curves.last.time)
    attempt = f", attempt {curves.last.attempt}" if curves.last.attempt > 1 else ""
    yield Text(f"{run_dir}  step {curves.last.step:,}{attempt}, logged {duration(ago)} ago", style="bold")
    attempts = restarts.read(run_dir)
    failures = [one for one in attempts if one.outcome == "failed"]
    if failures:
        last = failures[-1]
        where = f"at step {last.step:,}" if last.step else "before its first step"
        down = f", {duration(restarts.seconds_down(attempts))} without training after them"
        error = f": {last.error}" if last.error else ""
        yield Text(f"{counted(len(failures), 'failure')}{down}; the last {where}: {last.cause}{error}", style="yellow")
    now = deaths.state(run_dir)
    if now.state == "failed":
        yield Text(f"failed{f': {now.reason}' if now.reason else ''}", style="bold red")
    if now.state == "died":
        yield Text(deaths.in_words(now), style="bold red")
    slow = record.table(record.directory(run_dir) / "stragglers.json")
    if slow and curves.of(_STRAGGLER) and curves.of(_STRAGGLER)[-1][1] > 1:
        yield Text(f"{slow[-1].get('what')}, since step {slow[-1].get('step')}", style="bold red")


def _curve(name: str, points: Sequence[Point], width: int, height: int) -> Iterator[Text]:
    """A curve of `height` lines below its name and its last value. A single point has no curve."""
    (step, value), best = points[-1], min((y for _, y in points if math.isfinite(y)), default=math.nan)
    yield Text.assemble("\n", (name, "bold"), f"  {value:.4f} at step {step:,.0f}, lowest {best:.4f}")
    if len(points) > 1:
        yield from (Text(line, style="cyan", no_wrap=True) for line in plot(_thinned(points), width - 1, height))


def _small_charts(curves: Curves, width: int) -> Padding:
    """The name, the last value and a curve of one line of each metric that the run has."""
    table = Table.grid(Column(style="bold"), Column(justify="right"), Column(style="cyan"), padding=(0, 2, 0, 0))
    for name, form in _BESIDE.items():
        if points := curves.of(name):
            table.add_row(name, form.format(points[-1][1]), *braille(_thinned(points), width - _BESIDE_CHARTS, 1))
    return Padding(table, (1, 0, 0, 0))


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Evenly spaced points of many, and the last."""
    return [*points[: -1 : -(-len(points) // _MOST_POINTS)], points[-1]]


def _samples(run_dir: Path) -> Iterator[Text]:
    """The texts that the model wrote at the last step of the table."""
    rows = record.table(record.directory(run_dir) / "samples.json")
    if not rows:
        return
    last = rows[-1].get("step")
    yield Text(f"\nsamples of step {last}", style="bold")
    for row in (row for row in rows if row.get("step") == last):
        for label, key, style in (("given  ", "given", "dim"), ("written", "written", "")):
            text = " ".join(str(row.get(key, "")).split())
            yield Text(f"{label}  {text}", style=style, no_wrap=True, overflow="ellipsis")


def plot(points: Sequence[Point], width: int, height: int) -> list[str]:
    """A curve through `points`, in `height` lines of `width` characters with labels on both axes.

    Points that aren't finite leave a gap. `points` ascend in x; without any finite point, there is no line.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return []
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    span = high - low or max(abs(low), 1) / 50
    digits = max(0, min(6, 2 - math.floor(math.log10(span))))  # as many as tell the labels apart
    labels = [f"{high - span * row / (height - 2):.{digits}f}" for row in range(height - 1)]
    margin = max(map(len, labels))
    columns = width - margin - 2
    first, last = f"{finite[0][0]:,.0f}", f"{finite[-1][0]:,.0f}"
    curve = braille(points, columns, height - 1)
    lines = [f"{label:>{margin}} ┤{line}".rstrip() for label, line in zip(labels, curve, strict=True)]
    return [*lines, f"{'':>{margin}}  {first}{last:>{max(columns - len(first), 0)}}"]


def braille(points: Sequence[Point], columns: int, rows: int) -> list[str]:
    """A curve from the first of `points` to the last, between their lowest and highest value, in `rows` of text.

    Points that aren't finite leave a gap; without any finite point, there is no row.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return []
    left, high = finite[0][0], max(y for _, y in finite)
    across = (2 * columns - 1) / (finite[-1][0] - left or 1)
    down = (4 * rows - 1) / (high - min(y for _, y in finite) or 1)
    dots = [(round((x - left) * across), round((high - y) * down)) if math.isfinite(y) else None for x, y in points]
    cells = [[0] * columns for _ in range(rows)]
    for begin, end in pairwise([None, *dots]):
        for x, y in _segment(begin or end, end) if end else ():
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]


def _segment(begin: Dot, end: Dot) -> Iterator[Dot]:
    """The dots from `begin` to `end`, which count from the top left."""
    (x, y), (to_x, to_y) = begin, end
    steps = max(abs(to_x - x), abs(to_y - y), 1)
    for step in range(steps + 1):
        yield round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps)
