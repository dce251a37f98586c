"""The data beside the pages, as the tools of experiments read them, and figures as the pages print them."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from data_pipeline.base.json_file import read_json
from pretrain.run.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file, by their headings."""
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def printed(path: Path) -> list[list[str]]:
    """The rows of a csv file, or of the tables that a benchmark wrote with --json."""
    if path.suffix == ".csv":
        return [list(row.values()) for row in rows_of(path)]
    return [row for one in read_json(path, dict[str, Any])["tables"] for row in one["rows"]]


def curves_of(folder: Path, row: str) -> list[dict[str, list[tuple[int, float]]]]:
    """(step, value) of each metric in ROW-seed-N.jsonl, a dict for each seed. Names lose the corpus."""
    found = []
    for path in sorted(folder.glob(f"{row}-seed-*.jsonl")):
        curves: dict[str, list[tuple[int, float]]] = {}
        for line in read_metrics(path):
            for name, value in line.metrics.items():
                kind, *rest = name.split("/")
                curves.setdefault("/".join([kind, rest[-1]]), []).append((line.step, value))
        found.append(curves)
    return found


def number(value: float | None, places: int, sign: bool = False) -> str:
    """-0.002 -> "−0.002"; what rounds to zero has no sign."""
    if value is None:
        return ""
    text = f"{value:,.{places}f}"
    if not text.strip("-0.,"):
        return text.lstrip("-")
    return ("+" + text if sign and value > 0 else text).replace("-", "−")


def spread(values: Sequence[float | None], places: int) -> str:
    """The mean, ± the standard deviation of two runs or more: "3.290 ± 0.010"."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    deviation = f" ± {stdev(known):,.{places}f}" if len(known) > 1 else ""
    return number(fmean(known), places) + deviation


def p_value(p: float | None) -> str:
    """0.1813 -> "0.18"; 0.0231 -> "0.023"; 0.0004 -> "< 0.001"; 1.0 -> "1"."""
    if p is None:
        return ""
    return "1" if p >= 0.995 else f"{p:.2f}" if p >= 0.0995 else "< 0.001" if p < 0.001 else f"{p:.3f}"


def power(value: float, places: int = 1) -> str:
    """0.0014 -> "1.4e-3"; from 0.1 to 10: "0.29", "3.2"."""
    if value == 0:
        return "0"
    if 0.1 <= value < 10:
        return f"{value:.{places - math.floor(math.log10(value))}f}"
    mantissa, exponent = f"{value:.{places}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
