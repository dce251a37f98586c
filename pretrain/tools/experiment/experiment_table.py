"""The table of an experiment: its rows in their groups, beside published values, for a terminal and for files."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap

from data_pipeline.foundation import formatting
from pretrain.tools.experiment.experiment_file import Experiment, Published
from pretrain.tools.experiment.results import Result, ends_by_seed
from pretrain.tools.experiment.statistics import Comparison, Spread, compare, holm

_NOTE = (
    "±: standard deviation over seeds; (n): of n seeds only. Δ: validation loss, or what is in its place, minus the "
    "baseline's (*), paired by seed. p: t-test, two-sided, with the scatter of all rows of the group, adjusted for all "
    "comparisons (Holm)."
)
_COLUMNS = 80  # of a terminal


@dataclass(frozen=True)
class Line:
    """A row of the experiment in one of its groups. `comparison` is None for the baseline.

    `compared`: what rows of the group are compared by, `metric` or the validation loss. `adjusted_p`: its p-value,
    adjusted for all comparisons of the table.
    """

    group: str
    row: str
    is_baseline: bool
    seeds: list[int]
    parameters: int | None
    train_loss: Spread | None
    validation_loss: Spread | None
    embedding_loss: Spread | None
    effective_rank: Spread | None
    comparison: Comparison | None
    published: Published | None
    adjusted_p: float | None = None
    metric: str | None = None
    compared: Spread | None = None


def lines(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """Every row of every group, in order; without values if none of its runs has finished."""
    found = []
    for group in experiment.groups:
        ends = {row: ends_by_seed(results, row, group.metric) for row in group.rows}
        compared = compare(ends, group.baseline)
        for row in group.rows:
            finished = [result for result in results if result.row == row]
            found.append(
                Line(
                    group.title,
                    row,
                    row == group.baseline,
                    [result.seed for result in finished],
                    finished[0].parameters if finished else None,
                    _spread(finished, "train_loss"),
                    _spread(finished, "validation_loss"),
                    _spread(finished, "embedding_loss"),
                    _spread(finished, "effective_rank"),
                    compared.get(row),
                    experiment.published.get(row),
                    metric=group.metric,
                    compared=Spread.of([*ends[row].values()]),
                )
            )
    p_values = {number: line.comparison.p for number, line in enumerate(found) if line.comparison}
    tested = {number: p for number, p in p_values.items() if p is not None}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))
    return [replace(line, adjusted_p=adjusted.get(number)) for number, line in enumerate(found)]


def _spread(results: Sequence[Result], name: str) -> Spread | None:
    return Spread.of([value for result in results if (value := getattr(result, name)) is not None])


def as_json(lines: Sequence[Line]) -> list[dict[str, object]]:
    """One object a line, with everything that is in it."""
    return [{**asdict(line), "published": line.published.model_dump() if line.published else None} for line in lines]


_HEADINGS = ("row", "params", "train", "validation", "emb.", "rank", "Δ", "p")


def _cells(line: Line, most_seeds: int) -> list[str]:
    comparison, number = line.comparison, len(line.seeds)
    return [
        line.row + ("*" if line.is_baseline else "") + (f"({number})" if number < most_seeds else ""),
        _count(line.parameters),
        str(line.train_loss or ""),
        str(line.compared or ""),
        _small(line.embedding_loss.mean if line.embedding_loss else None),
        _decimals(line.effective_rank.mean if line.effective_rank else None, 1),
        _decimals(comparison.difference, 3, sign=True) if comparison else "",
        "" if line.adjusted_p is None else _p_value(line.adjusted_p),
    ]


def _published_cells(published: Published) -> list[str]:
    losses = (_decimals(value, 3) for value in (published.train_loss, published.validation_loss))
    return [" published", _count(published.parameters), *losses, _small(published.embedding_loss), "", "", ""]


def _blocks(lines: Sequence[Line]) -> Iterator[tuple[str, list[list[str]]]]:
    """The title of each group, with what its spread lets one tell, and the cells of its lines."""
    most_seeds = max((len(line.seeds) for line in lines), default=0)
    comparisons = sum(line.comparison is not None for line in lines)
    for title in dict.fromkeys(line.group for line in lines):
        group = [line for line in lines if line.group == title]
        metric, compared = group[0].metric, [line.comparison for line in group if line.comparison]
        instead = f", {metric} in place of the validation loss" if metric else ""
        told = [least for one in compared if (least := one.resolution(comparisons)) is not None]
        unit = "" if metric else " nats"
        resolution = f" (differences from {max(told):.3f}{unit} on can be told)" if told else ""
        cells = []
        for line in group:
            cells.append(_cells(line, most_seeds))
            if line.published:
                cells.append(_published_cells(line.published))
        yield title + instead + resolution, cells


def text(lines: Sequence[Line]) -> str:
    """The table for a terminal of 80 columns."""
    blocks = list(_blocks(lines))
    head, *printed = formatting.aligned([_HEADINGS, *(cells for _, block in blocks for cells in block)])
    text = [head]
    for title, block in blocks:
        text += ["", *wrap(title, _COLUMNS), *printed[: len(block)]]
        del printed[: len(block)]
    return "\n".join([*text, "", *wrap(_NOTE, _COLUMNS)])


def markdown(lines: Sequence[Line]) -> str:
    """The same as a Markdown table."""
    rows: list[list[str]] = []
    for title, block in _blocks(lines):
        rows.append([f"**{title}**", *[""] * (len(_HEADINGS) - 1)])
        rows += [[cell.strip() for cell in cells] for cells in block]
    return "\n".join([*formatting.markdown(_HEADINGS, rows), "", _NOTE, ""])


def _count(number: int | None) -> str:
    """306496 -> "306,496"; 15763500 -> "15.7635M"."""
    if number is None:
        return ""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:.4f}M"


def _decimals(value: float | None, places: int, sign: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if sign else ''}.{places}f}"


def _small(value: float | None) -> str:
    """4.673e-09 -> "4.7e-9"."""
    if value is None or not math.isfinite(value):
        return "" if value is None else str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _p_value(p: float) -> str:
    return "<.001" if p < 0.001 else f"{p:.3f}"
