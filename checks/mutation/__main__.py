"""Tries mutants of the modules that decide what is learnt and what is kept, and writes docs/results/mutation.

    python -m checks.mutation run [--each 46] [--seed 0] [--jobs 2]      mutants that mutants.csv lacks
    python -m checks.mutation run --survivors        those that survived and have no note, on today's tests
    python -m checks.mutation report                                     the tables of the page

A run that was killed continues: each mutant is written when it is known.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import pytest

from checks.mutation.mutants import ROOT, SUBJECTS, Mutant, drawn, files
from checks.mutation.report import add, read, report
from checks.mutation.runner import Runner, Test

QUICK = "not slow and not timing and not soak"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a process that has other threads can't be forked safely
    "RANKS_START": "fork",  # from the process that has the mutant
}


def reached(runner: Runner, folder: Path, jobs: int) -> dict[str, Test]:
    """All tests that pass, by name. What is known of a file of tests is kept in `folder`."""
    names = runner.tests()
    facts = {path: repr((runner.modules, own)).encode() + path.read_bytes() for path, own in names.items()}
    kept = {path: folder / f"{hashlib.sha256(fact).hexdigest()[:16]}.json" for path, fact in facts.items()}
    unknown = [path for path in names if not kept[path].exists()]
    for place, tests in runner.reach([names[path] for path in unknown], jobs):
        path = unknown[place]
        print(f"{path.relative_to(ROOT)}: {len(tests)} of {len(names[path])} tests pass", flush=True)
        kept[path].write_text(json.dumps([asdict(test) for test in tests]))
    return {one["name"]: Test(**one) for path in names for one in json.loads(kept[path].read_text())}


def chosen(mutant: Mutant, tests: dict[str, Test], seconds: float) -> list[Test]:
    """The tests that reach a mutant, quick ones first, as many as take `seconds`."""
    found: list[Test] = []
    for test in sorted(tests.values(), key=lambda test: test.seconds):
        if test.reaches(mutant) and sum(one.seconds for one in found) + test.seconds <= seconds:
            found.append(test)
    return found


def run(each: int, seed: int, jobs: int, seconds: float, subjects: Sequence[str], survivors: bool) -> int:
    """Tries the mutants that are drawn and not yet known, in turn of each subject; or those that survived."""
    of = {name: SUBJECTS[name] for name in subjects or SUBJECTS}
    by_subject = [drawn(name, subject.modules, each, seed) for name, subject in of.items()]
    mutants = [one for turn in zip_longest(*by_subject) for one in turn if one]
    known = {row.key: row for row in read()}
    if survivors:
        wanted = [
            one
            for one in mutants
            if one.key in known and known[one.key].state == "survived" and not known[one.key].note
        ]
    else:
        wanted = [one for one in mutants if one.key not in known]
    print(f"{len(mutants)} mutants are drawn, {len(wanted)} to try", flush=True)

    code = hashlib.sha256(
        b"".join((ROOT / path).read_bytes() for path in files(["data_pipeline/**/*.py", "pretrain/**/*.py"]))
    )
    folder = ROOT / "build/mutation" / code.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)

    def work(runner: Runner) -> None:
        if any(test.startswith("tests/pretrain") for test in tests):
            for name in import_module("tests.support.rank_processes").PRELOADED:  # once, not in each rank
                import_module(name)
        tests_reached = reached(runner, folder, jobs)
        for mutant, verdict in runner.verdicts([(one, chosen(one, tests_reached, seconds)) for one in wanted], jobs):
            add(mutant, verdict)
            print(verdict.state, f"{verdict.tests} tests, {verdict.seconds:.0f} s:", *mutant.key, flush=True)

    # a corpus that tests share is built without a mutant, when it's found out which lines they run
    os.environ |= ENVIRONMENT | {"TESTS_MADE": str(folder / "made")}
    tests = files([pattern for subject in of.values() for pattern in subject.tests])
    modules = files([pattern for subject in of.values() for pattern in subject.modules])
    options = ["-q", "-s", "-p", "no:cacheprovider", "-m", QUICK]
    return pytest.main([*options, *tests], plugins=[Runner(ROOT, modules, work)])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("run")
    one.add_argument("--each", type=int, default=46, help="mutants of each subject")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--jobs", type=int, default=2, help="mutants that are tried at a time")
    one.add_argument("--seconds", type=float, default=60, help="CPU time of the tests of a mutant at most")
    one.add_argument("--subjects", nargs="*", choices=SUBJECTS, default=[], help="those named only")
    one.add_argument("--survivors", action="store_true", help="try those again that survived")
    commands.add_parser("report")
    arguments = vars(parser.parse_args())
    if arguments.pop("command") == "run":
        return run(**arguments)
    report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
