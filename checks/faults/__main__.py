"""Faults × points of a run's work × one and two hosts, each judged against the undisturbed run.

    python -m checks.faults --cells 200 --seed 1 [--without-hunting] [--only NUMBER …] [--out DIR]
    python -m checks.faults --builds --cells 30 --seed 1

A small T5 is trained by `launch local` on two ranks, or by `launch hosts` on two hosts with one rank each. Its run file
names the callbacks of examples/fault_hunting, unless `--without-hunting` leaves them out. A cell is drawn by the seed
and its number (checks/faults/cells.py): a fault, the point where it happens, the rank and the step. The run must end
with the documented exit code. Its losses and the final weights must be those of the undisturbed run, to the bit, and
each step must have taken the same rows. Where it continues with fewer ranks, losses may differ by rounding. No process
may be left, and the first line on the terminal must name the cause, but for warnings of something else. A few cells
that once found bugs follow those that are drawn; their numbers are negative.

DIR/cells.csv has the seconds from the fault to its detection, from there to the next step, and the steps that were
taken twice; the terminal shows the same. Finished verdicts are kept in DIR: a matrix that was stopped continues.
`--builds` runs builds of a corpus under faults instead, whose files must have the same sha256, and writes builds.csv.
"""

import argparse
import csv
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from checks.faults import verdicts
from checks.faults.cells import FOUND_BY_HUNTING, ONCE_WRONG, draw
from checks.faults.matrix import Matrix
from checks.faults.verdicts import Verdict


def run_matrix(
    folder: Path, seed: int, numbers: Iterable[int], show: Callable[[str], None] = print, hunting: bool = True
) -> list[Verdict]:
    """Judges the cells of these numbers, and shows a line for each. Cells with a verdict in `folder` aren't run again.
    Without `hunting`, cells are left out whose fault only the callbacks of examples/fault_hunting find."""
    file = folder / "verdicts.jsonl"
    before, found = verdicts.finished(file, seed), []
    with (
        Matrix(folder, hunting=hunting) as matrix,
        (folder / "cells.csv").open("w", encoding="utf-8", newline="") as table,
    ):
        write = csv.writer(table, lineterminator="\n").writerow
        write(verdicts.COLUMNS)
        for number in numbers:
            cell = draw(seed, number)
            if not hunting and cell.fault == FOUND_BY_HUNTING:
                continue
            verdict = before.get(number)
            if verdict is None or verdict.cell != cell:
                verdict = matrix.judged(cell)
                verdicts.append(file, seed, verdict)
            found.append(verdict)
            write(verdicts.line(verdict))
            show(" | ".join(verdicts.line(verdict)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", help="run these cells, even if they have verdicts")
    parser.add_argument(
        "--without-hunting", action="store_true", help="without the callbacks of examples/fault_hunting"
    )
    parser.add_argument("--builds", action="store_true", help="faults of builds instead of runs")
    parser.add_argument("--out", type=Path, help="where files and verdicts are kept")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts what is in the background without Ctrl-C
        signal.signal(number, lambda *_: sys.exit(1))
    folder = (given.out or Path(tempfile.mkdtemp(prefix="fault-matrix-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    numbers = given.only or range(given.cells)
    if given.builds:
        from checks.faults.builds import run_builds

        return run_builds(folder, given.seed, numbers)
    numbers = given.only or [*numbers, *ONCE_WRONG]
    for number in given.only or ():
        verdicts.forget(folder / "verdicts.jsonl", number)
    found = run_matrix(folder, given.seed, numbers, lambda text: print(text, flush=True), not given.without_hunting)
    summed = verdicts.summary(found)
    print(f"\n{json.dumps(summed, indent=1)}\nfiles: {folder}")
    return int(summed["same"] < summed["cells"])


if __name__ == "__main__":
    sys.exit(main())
