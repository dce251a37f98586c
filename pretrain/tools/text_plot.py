"""Curves as text, drawn with Braille characters: each holds 2 × 4 dots."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

Point = tuple[float, float]
Dot = tuple[int, int]

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
