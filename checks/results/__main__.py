"""Computes the tables of docs/results whose raw data are kept, and says where a page has another figure. Tables that a
command has printed or a person has typed are compared with their csv files.

    python -m checks.results [--write]

Each table has a line above it that says where its figures are from (checks/results/pages.py). Nothing is trained, and
nothing is fetched. Exit code 1: a page differs.
"""

import argparse
import importlib
import sys
from collections import Counter
from pathlib import Path

from checks.results import experiments, gpu, loss_curves, operations
from checks.results.data import ROOT, printed
from checks.results.pages import Rows, check, tables, write

sys.path.append(str(ROOT / "benchmarks"))  # whose files import one another as programs
FOLDER = ROOT / "docs/results"
TABLES = experiments.TABLES | operations.TABLES | gpu.TABLES | loss_curves.TABLES
WHOLE = {
    "performance.md": "make bench",  # from benchmarks/results
    "recipes.md": "python benchmarks/recipes.py --write",  # tests/pretrain/config/test_recipes.py
    "plans.md": "pretrain plan",  # tests/pretrain/cli/test_runs.py
}
"""Pages that a command writes or prints, which a test or this check runs again."""


def computed(folder: Path) -> dict[str, Rows]:
    names = {one.name or "" for page in folder.glob("*.md") for one in tables(page.read_text(encoding="utf-8"))}
    files = {name: printed(folder / name) for name in names if (folder / name).is_file()}
    arithmetic = {
        "scale-c4": importlib.import_module("scale_forecast").cells(folder),
        "scale-bucket": importlib.import_module("bucket_requests").cells(folder),
    }
    from_data = {name: function(folder) for name, function in TABLES.items()}
    return files | gpu.computed(folder) | from_data | arithmetic


def problems(folder: Path) -> list[str]:
    """A line for each difference between the pages and their data."""
    found = check(folder, computed(folder), [*WHOLE])
    page = importlib.import_module("performance").page()
    if (folder / "performance.md").read_text(encoding="utf-8") != page:
        found.append("performance.md: not what benchmarks/results says; python benchmarks/performance.py --page")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the computed figures into the pages")
    if parser.parse_args().write:
        write(FOLDER, computed(FOLDER))
    found = problems(FOLDER)
    print(*found, sep="\n", file=sys.stderr, end="\n" if found else "")
    marks = Counter(
        "typed"
        if one.is_typed
        else "computed"
        if one.name in TABLES
        else "printed"
        if one.name
        else one.mark or "unmarked"
        for page in FOLDER.glob("*.md")
        if page.name not in WHOLE
        for one in tables(page.read_text(encoding="utf-8"))
    )
    counts = ", ".join(f"{number} {mark}" for mark, number in marks.most_common())
    print(f"{sum(marks.values())} tables: {counts}; {len(found)} differences")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
