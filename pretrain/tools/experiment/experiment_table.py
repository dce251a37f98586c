"""The table of an experiment: its rows in their groups, beside published values, for a terminal and for files."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.tools.experiment.experiment_file import Experiment, Published
from pretrain.tools.experiment.results import Result
from pretrain.tools.experiment.statistics import Comparison, Spread, compare

_NOTE = (
    "±: standard deviation over seeds; (n): of n seeds only. Δ: validation loss minus\n"
    "that of the group's baseline (*), paired by seed. p: paired t-test, two-sided,\n"
    "for this comparison alone."
)


@dataclass(frozen=True)
class Line:
    """A row of the experiment in one of its groups. `comparison` is None for the baseline."""

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


def lines(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """Every row of every group, in order; without values if none of its runs has finished."""
    return [
        _line(group.title, row, group.baseline, experiment.published.get(row), results)
        for group in experiment.groups
        for row in group.rows
    ]


def _line(group: str, row: str, baseline: str, published: Published | None, results: Sequence[Result]) -> Line:
    own = [result for result in results if result.row == row]

    def spread(value: Callable[[Result], float | None]) -> Spread | None:
        return Spread.of([found for result in own if (found := value(result)) is not None])

    losses = {name: _losses(results, name) for name in (row, baseline)}
    return Line(
        group=group,
        row=row,
        is_baseline=row == baseline,
        seeds=[result.seed for result in own],
        parameters=own[0].parameters if own else None,
        train_loss=spread(lambda result: result.train_loss),
        validation_loss=spread(lambda result: result.validation_loss),
        embedding_loss=spread(lambda result: result.embedding_loss),
        effective_rank=spread(lambda result: result.effective_rank),
        comparison=None if row == baseline else compare(losses[row], losses[baseline]),
        published=published,
    )


def _losses(results: Sequence[Result], row: str) -> dict[int, float]:
    """Validation losses of a row by seed."""
    found = ((result.seed, result.validation_loss) for result in results if result.row == row)
    return {seed: loss for seed, loss in found if loss is not None}


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """One object a line, with everything that is in it."""
    return [{**asdict(line), "published": line.published.model_dump() if line.published else None} for line in lines]


_HEADINGS = ("row", "params", "train", "validation", "emb.", "rank", "Δ", "p")


def _cells(line: Line, most_seeds: int) -> list[str]:
    comparison, number = line.comparison, len(line.seeds)
    return [
        line.row + ("*" if line.is_baseline else "") + (f"({number})" if number < most_seeds else ""),
        _count(line.parameters),
        _spread(line.train_loss),
        _spread(line.validation_loss),
        _small(line.embedding_loss.mean if line.embedding_loss else None),
        _decimals(line.effective_rank.mean if line.effective_rank else None, 1),
        _decimals(comparison.difference, 3, sign=True) if comparison else "",
        _p_value(comparison.p) if comparison and comparison.p is not None else "",
    ]


def _published_cells(published: Published) -> list[str]:
    losses = (_decimals(value, 3) for value in (published.train_loss, published.validation_loss))
    return [" published", _count(published.parameters), *losses, _small(published.embedding_loss), "", "", ""]


def _blocks(lines: Sequence[Line]) -> Iterator[tuple[str, list[list[str]]]]:
    """The title of each group and the cells of its lines."""
    most_seeds = max((len(line.seeds) for line in lines), default=0)
    for group in dict.fromkeys(line.group for line in lines):
        cells = []
        for line in lines:
            if line.group == group:
                cells.append(_cells(line, most_seeds))
                if line.published:
                    cells.append(_published_cells(line.published))
        yield group, cells


def text(lines: Sequence[Line]) -> str:
    """The table for a terminal of 80 columns."""
    blocks = list(_blocks(lines))
    every = [list(_HEADINGS), *(cells for _, block in blocks for cells in block)]
    shown = [column for column in range(len(_HEADINGS)) if any(cells[column] for cells in every[1:])]
    widths = {column: max(len(cells[column]) for cells in every) for column in shown}

    def joined(cells: list[str]) -> str:
        first, *rest = (
            cells[column].ljust(widths[column]) if column == 0 else cells[column].rjust(widths[column])
            for column in shown
        )
        return " ".join([first, *rest]).rstrip()

    printed = [joined(list(_HEADINGS))]
    for title, block in blocks:
        printed += ["", title, *map(joined, block)]
    return "\n".join([*printed, "", _NOTE])


def markdown(lines: Sequence[Line]) -> str:
    """The same as a Markdown table."""
    head = [f"| {' | '.join(_HEADINGS)} |", "|---|" + "--:|" * (len(_HEADINGS) - 1)]
    body = []
    for title, block in _blocks(lines):
        body.append(f"| **{title}** |" + " |" * (len(_HEADINGS) - 1))
        body += [f"| {' | '.join(cell.strip() for cell in cells)} |" for cells in block]
    return "\n".join([*head, *body, "", _NOTE.replace("\n", " "), ""])


def as_csv(results: Sequence[Result]) -> str:
    """One line a run, for other programs' statistics."""
    stream = io.StringIO()
    names = [name for name in Result.__dataclass_fields__ if name != "curve"]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(result, name) for name in names] for result in results)
    return stream.getvalue()


def _spread(value: Spread | None) -> str:
    if value is None:
        return ""
    return _decimals(value.mean, 3) + ("" if value.deviation is None else f"±{value.deviation:.3f}")


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
