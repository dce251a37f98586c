"""The measurements behind docs/results/scale.md: a csv file for each benchmark of large builds.

`python -m checks.results --write` makes the tables of the page from these files.
"""

import csv
import datetime
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_pipeline.base.atomic import write_bytes

FOLDER = Path(__file__).parents[1] / "docs/results/scale"
Row = dict[str, object]


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
