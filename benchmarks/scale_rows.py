"""The measurements behind docs/results/scale.md: a csv file for each benchmark of large builds.

`python -m checks.results --write` makes the tables of the page from these files.
"""

import argparse
import csv
import datetime
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.packages import git

FOLDER = Path(__file__).parents[1] / "docs/results/scale"
Row = dict[str, object]


def code() -> str:
    """The commit that is measured, with "-dirty" if tracked files differ."""
    return git("describe", "--always", "--dirty", "--abbrev=8", "--exclude=*").strip()


def circumstances() -> Row:
    """What stands in every row: the day, and the load of this machine before the measurement."""
    return {"load": round(os.getloadavg()[0], 1), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}


def save(file: str, row: Mapping[str, object], keys: Sequence[str]) -> None:
    """Puts `row` into a file of FOLDER, in the place of the row that has the same values of `keys`, or at its end."""
    path = FOLDER / file
    new = {name: str(value) for name, value in row.items()}
    rows = []
    if path.exists():
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    same = [number for number, one in enumerate(rows) if all(one[key] == new[key] for key in keys)]
    if same:
        rows[same[0]] = new
    else:
        rows.append(new)
    columns = list(dict.fromkeys(name for one in rows for name in one))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, text.getvalue().encode())


def measured(file: str, rows: Iterable[Row], keys: Sequence[str], keep: bool) -> None:
    """Prints each of `rows` as soon as it is measured, with its circumstances; `keep`: also saves the row."""
    when = circumstances()
    for found in rows:
        row = {**found, **when}
        print(json.dumps(row), flush=True)
        if keep:
            save(file, row, keys)


def forecast_or_measure(
    about: str | None,
    cells: Callable[[Path], Sequence[Sequence[str]]],
    file: str,
    measure: Callable[[], Iterable[Row]],
    keys: Sequence[str],
) -> None:
    """The command of a forecast: prints its table, `cells` of docs/results; with `measure` as argument, measures the
    rows that the table is computed from. `about`: the help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure"])
    parser.add_argument("--save", action="store_true", help="keep the rows in docs/results/scale/")
    given = parser.parse_args()
    if given.what == "measure":
        measured(file, measure(), keys, given.save)
    else:
        for row in cells(FOLDER.parent):
            print(" | ".join(row))
