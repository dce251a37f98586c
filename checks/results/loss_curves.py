"""The tables of docs/results/loss-curves.md, from loss-curves/curves.csv: a run's figure, or the mean of its seeds ±
the standard deviation."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from checks.results.data import number, rows_of, spread
from checks.results.tables import Tables, register
from docs.pictures.loss_curves import DATA, FAULTS, FOLDER, NORMAL

TABLES: Tables = {}
table = partial(register, TABLES)

_LOSSES = ["train_loss", "validation_loss", "text_loss", "whole_validation_loss"]

Values = dict[tuple[str, str], dict[int, list[float]]]  # (run, name) -> step -> a value for each seed


def _values(folder: Path) -> Values:
    found: Values = {}
    for row in rows_of(folder / DATA.relative_to(FOLDER)):
        steps = found.setdefault((row["run"], row["name"]), {})
        steps.setdefault(int(row["step"]), []).append(float(row["value"]))
    return found


def _first(values: Values, run: str, name: str) -> str:
    steps = values[run, name]
    return spread(steps[min(steps)], 2)


def _last(values: Values, run: str, name: str) -> str:
    steps = values[run, name]
    return spread(steps[max(steps)], 2)


@table("loss-curves-objectives")
def _objectives(folder: Path) -> Iterator[list[str | None]]:
    values = _values(folder)
    for run in NORMAL:
        worth = values[run, "worth"]
        without, right = (values[run, name] for name in ("no_input_loss", "right_input_loss"))
        yield [
            None,
            _first(values, run, "train_loss"),
            _last(values, run, "unigram_entropy"),
            _last(values, run, "validation_loss"),
            _last(values, run, "text_loss"),
            *(number(worth[step][0], 2) for step in (50, 100, 150, 200, 300)),
            number(without[300][0] - right[300][0], 2),
        ]


@table("loss-curves-faults")
def _faults(folder: Path) -> Iterator[list[str | None]]:
    values = _values(folder)
    for run in ("span-corruption", *FAULTS):
        step = max(values[run, "text_loss"])
        losses = [values.get((run, name), {}).get(step, []) for name in _LOSSES]
        yield [
            f"`{run}`",
            _first(values, run, "train_loss"),
            _last(values, run, "unigram_entropy"),
            *(spread(seeds, 2) for seeds in losses),
            _last(values, run, "worth"),
        ]
