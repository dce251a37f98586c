"""`pretrain watch`: the curves and samples of a run in the terminal, from RUN/metrics.jsonl and the table of samples.

A terminal shows them anew as the run writes them, until Ctrl-C. Anything else gets one snapshot. Curves are drawn with
Braille characters, each of which holds 2 × 4 dots.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted, duration
from pretrain.evaluation import record
from pretrain.run import restarts, status
from pretrain.run.metrics_file import FILE_NAME, Row, rows_from

Point = tuple[float, float]
Dot = tuple[int, int]

_POLL_SECONDS = 1.0
_LOSS = "train/loss"
_STRAGGLER = "stragglers/factor"  # above 1 while something is named as slow
_LOWEST, _HIGHEST = 4, 10  # lines of a curve
_MOST_POINTS = 2000
_NARROWEST = 40
_BESIDE = {  # small charts: names of metrics and how their last value is written
    "train/learning_rate": "{:.2e}",
    "train/gradient_norm": "{:.3f}",
    "train/tokens_per_second": "{:,.0f}",
    "train/mfu": "{:.1%}",
    "train/data_wait_fraction": "{:.1%}",
}
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Curves:
    """The metrics of a run so far, read as the file grows; `last` is the last row.

    When the run goes back, after a crash or a spike, the steps that it takes again are dropped.
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

    def validation(self) -> list[str]:
        """The names of the losses on held-out rows."""
        return sorted(name for name in self._values if name.startswith("validation/") and name.endswith("/loss"))


def watch(run_dir: Path, once: bool = False, console: Console | None = None) -> None:
    """Shows the run until Ctrl-C; with `once`, or where the output is no terminal, shows it once.

    Raises UserError if `run_dir` has no metrics and is no run that could still write them.
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


def _view(run_dir: Path, curves: Curves, width: int, height: int | None = None) -> Group:
    """Everything, in `width` columns. In at most `height` lines: curves become lower, then the end is left out."""
    width = max(width, _NARROWEST)
    losses = [(name, points) for name in (_LOSS, *curves.validation()) if (points := curves.of(name))]
    below = [*_small_charts(curves, width), *_samples(run_dir, width)]
    head = list(_head(run_dir, curves))
    lines = _HIGHEST
    if height is not None and losses:
        lines = max(_LOWEST, min(_HIGHEST, (height - 1 - len(head) - len(below)) // len(losses) - 2))
    shown = [*head, *(line for name, points in losses for line in _curve(name, points, width, lines)), *below]
    return Group(*shown[: height - 1 if height else None])


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
    now = status.read(run_dir)
    if now.state == "failed":
        yield Text(f"failed{f': {now.reason}' if now.reason else ''}", style="bold red")
    slow = record.table(record.directory(run_dir) / "stragglers.json")
    if slow and curves.of(_STRAGGLER) and curves.of(_STRAGGLER)[-1][1] > 1:
        yield Text(f"{slow[-1].get('what')}, since step {slow[-1].get('step')}", style="bold red")


def _curve(name: str, points: Sequence[Point], width: int, height: int) -> Iterator[Text]:
    """A curve of `height` lines below its name and its last value; a single point has only these."""
    yield Text()
    (step, value), best = points[-1], min((y for _, y in points if math.isfinite(y)), default=math.nan)
    yield Text.assemble((name, "bold"), f"  {value:.4f} at step {step:,.0f}, lowest {best:.4f}")
    if len(points) > 1:
        every = -(-len(points) // _MOST_POINTS)
        some = [*points[:-1:every], points[-1]]
        yield from (Text(line, style="cyan", no_wrap=True) for line in plot(some, width - 1, height))


def _small_charts(curves: Curves, width: int) -> Iterator[Text]:
    found = [(name, form, curves.of(name)) for name, form in _BESIDE.items() if curves.of(name)]
    if not found:
        return
    yield Text()
    longest = max(len(name) for name, _, _ in found)
    for name, form, points in found:
        values = [value for _, value in points]
        last = form.format(values[-1])
        chart = bars(values, max(width - longest - 16, 8))
        yield Text.assemble((f"{name:<{longest}} ", "bold"), f"{last:>12}  ", (chart, "cyan"), no_wrap=True)


def _samples(run_dir: Path, width: int) -> Iterator[Text]:
    """The texts that the model wrote at the last step of the table."""
    rows = record.table(record.directory(run_dir) / "samples.json")
    if not rows:
        return
    last = rows[-1].get("step")
    yield Text()
    yield Text(f"samples of step {last}", style="bold")
    for row in (row for row in rows if row.get("step") == last):
        for label, key, style in (("given  ", "given", "dim"), ("written", "written", "")):
            text = " ".join(str(row.get(key, "")).split())
            room = width - len(label) - 2
            yield Text(f"{label}  {text if len(text) <= room else text[: room - 1] + '…'}", style=style, no_wrap=True)


def plot(points: Sequence[Point], width: int, height: int) -> list[str]:
    """A curve through `points`, in `height` lines of `width` characters with labels on both axes.

    Points that aren't finite leave a gap. `points` ascend in x; without any finite point, there is no line.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return []
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    if high == low:
        low, high = low - max(abs(low), 1) / 100, high + max(abs(high), 1) / 100
    labels = [_short(high - (high - low) * row / (height - 2), high - low) for row in range(height - 1)]
    margin = max(map(len, labels))
    columns = width - margin - 2
    left, right = finite[0][0], finite[-1][0]
    across = (2 * columns - 1) / (right - left) if right > left else 0.0
    down = (4 * (height - 1) - 1) / (high - low)
    dots = [(round((x - left) * across), round((high - y) * down)) if math.isfinite(y) else None for x, y in points]
    cells = [[0] * columns for _ in range(height - 1)]
    for begin, end in pairwise([None, *dots]):
        for x, y in _segment(begin or end, end) if end else ():
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    curve = ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in cells]
    lines = [f"{label:>{margin}} ┤{line}".rstrip() for label, line in zip(labels, curve, strict=True)]
    first, last = f"{left:,.0f}", f"{right:,.0f}"
    return [*lines, f"{'':>{margin}}  {first}{last:>{max(columns - len(first), 0)}}"]


def bars(values: Sequence[float], width: int) -> str:
    """A line of at most `width` bars, whose heights are the means of equal stretches of `values`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    number = min(width, len(finite))
    bounds = [len(finite) * index // number for index in range(number + 1)]
    means = [sum(finite[begin:end]) / (end - begin) for begin, end in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _segment(begin: Dot, end: Dot) -> Iterator[Dot]:
    """The dots from `begin` to `end`, which count from the top left."""
    (x, y), (to_x, to_y) = begin, end
    steps = max(abs(to_x - x), abs(to_y - y), 1)
    for step in range(steps + 1):
        yield round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps)


def _short(number: float, span: float) -> str:
    """A label of an axis that spans `span`, with as many digits as tell its lines apart."""
    digits = max(0, min(6, 2 - math.floor(math.log10(span))))
    return f"{number:.{digits}f}" if abs(number) < 1e6 else f"{number:.3g}"
