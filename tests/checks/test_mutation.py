"""The mutation score's driver, on a package of one function."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray")  # `make mutation` installs it, and nothing else needs it

from checks.mutation.mutants import SUBJECTS, drawn

TOP = Path(__file__).parents[2]
CODE = "def larger(a: int, b: int) -> int:\n    return a if a > b else b\n"
TEST = "from code_of_two import larger\n\n\ndef test_larger():\n    assert larger(1, 2) == larger(2, 1) == 2\n"
TRIED = """
import sys
from pathlib import Path

import pytest

from checks.mutation.mutants import drawn
from checks.mutation.runner import Runner

ROOT = Path.cwd()
sys.path.insert(0, str(ROOT))


def work(runner):
    ((_, tests),) = runner.reach([*runner.tests().values()], jobs=1)
    assert [test.lines for test in tests] == [{"code_of_two.py": [2]}]
    mutants = drawn("a subject", ["code*.py"], 100, root=ROOT)
    for mutant, verdict in runner.verdicts([(one, tests) for one in mutants], jobs=2):
        print(mutant.mutation.split(" → ")[1], verdict.state, verdict.seen_by, sep="|")


pytest.main(["-q", "-s", "-p", "no:cacheprovider", "test_of_two.py"], plugins=[Runner(ROOT, ["code_of_two.py"], work)])
"""


def test_more_mutants_begin_with_fewer_and_follow_from_the_seed():
    modules = SUBJECTS["packing"].modules
    few, more, others = (drawn("packing", modules, number, seed) for number, seed in ((4, 0), (8, 0), (4, 1)))
    assert more[:4] == few != others
    assert len({one.key for one in more}) == 8
    assert len({one.lines for one in more}) > 4


def test_a_change_with_an_effect_is_seen_and_one_without_survives(tmp_path):
    (tmp_path / "code_of_two.py").write_text(CODE)
    (tmp_path / "test_of_two.py").write_text(TEST)
    done = subprocess.run(
        [sys.executable, "-c", TRIED],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join([str(TOP), *sys.path[1:]])},
        capture_output=True,
        text=True,
    )
    states = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    seen = "seen|test_of_two.py::test_larger"
    assert states["return a if a < b else b"] == seen, done.stdout + done.stderr
    assert states["return a if not a > b else b"] == seen
    assert states["return a if a >= b else b"] == "survived|"  # of two equal numbers either is the larger
