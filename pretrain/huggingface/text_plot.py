"""Curves as text, drawn with Braille characters: each holds 2 × 4 dots."""

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character, by row and column
_BARS = "▁▂▃▄▅▆▇█"


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
    numbers = [high - (high - low) * row / (height - 2) for row in range(height - 1)]
    labels = [_short(number, high - low) for number in numbers]
    margin = max(map(len, labels))
    columns = width - margin - 2
    left, right = finite[0][0], finite[-1][0]
    across = (2 * columns - 1) / (right - left) if right > left else 0.0
    down = (4 * (height - 1) - 1) / (high - low)
    canvas = _Canvas(columns, height - 1)
    before: tuple[int, int] | None = None
    for x, y in points:
        if not math.isfinite(y):
            before = None
            continue
        here = round((x - left) * across), round((high - y) * down)
        canvas.line(before or here, here)
        before = here
    lines = [f"{label:>{margin}} ┤{line}".rstrip() for label, line in zip(labels, canvas.lines(), strict=True)]
    first, last = f"{left:,.0f}", f"{right:,.0f}"
    return [*lines, f"{'':>{margin}}  {first}{last:>{max(columns - len(first), 0)}}"]


def bars(values: Sequence[float], width: int) -> str:
    """A line of at most `width` bars, whose heights are the means of equal stretches of `values`."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    number = min(width, len(finite))
    cuts = [len(finite) * place // number for place in range(number + 1)]
    means = [sum(finite[begin:end]) / (end - begin) for begin, end in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


class _Canvas:
    def __init__(self, columns: int, rows: int):
        self._cells = [[0] * columns for _ in range(rows)]

    def line(self, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Sets the dots from `begin` to `end`, which count from the top left."""
        (x, y), (to_x, to_y) = begin, end
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(steps + 1):
            self._set(round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps))

    def _set(self, x: int, y: int) -> None:
        self._cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def lines(self) -> list[str]:
        return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in self._cells]


def _short(number: float, span: float) -> str:
    """A label of an axis that spans `span`, with as many digits as tell its lines apart."""
    digits = max(0, min(6, 2 - math.floor(math.log10(span))))
    return f"{number:.{digits}f}" if abs(number) < 1e6 else f"{number:.3g}"
