"""How CI runs pytest: what fails is run once more, alone, and what tests leave behind is ended."""

import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from tests.support.processes import runs

TOP = Path(__file__).parent.parent
HEAD = """
import subprocess
from pathlib import Path

def times(name):  # how often this was called, with this call
    path = Path(__file__).with_name(name)
    with path.open("a") as file:
        file.write(".")
    return len(path.read_text())
"""
ONCE = """
def test_once():
    assert times("once") > 1

def test_once_in_a_table(subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert number != 1 or times("table") > 1
"""
TWICE = """
def test_twice():
    assert times("twice") > 2
"""
LEAVES = """
def test_leaves_a_process():
    process = subprocess.Popen(["sleep", "86400"], start_new_session=True)
    Path(__file__).with_name("left").write_text(str(process.pid))
    times("leaves")
"""
NINE = """
import pytest

@pytest.mark.parametrize("number", range(9))
def test_fails(number):
    times("nine")
    assert False
"""


def run(folder: Path, *parts: str) -> tuple[int, str]:
    """The exit code of `.ci/pytest` with a file of these parts, and what it printed."""
    file, name = folder / "test_parts.py", f"test-ci-{uuid.uuid4().hex[:8]}"
    file.write_text(HEAD + "".join(parts))
    command = [sys.executable, str(TOP / ".ci/pytest"), name, "5", "--numprocesses", "2", "-q", str(file)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    shutil.rmtree(TOP / "build/tests" / name, ignore_errors=True)
    return done.returncode, done.stdout + done.stderr


def test_what_fails_once_is_named_and_does_not_count_and_what_is_left_is_ended(tmp_path):
    code, said = run(tmp_path, ONCE, LEAVES)
    assert code == 0, said
    assert "2 failed; once more, alone:" in said
    once = re.findall(r"(?m)^failed once: \S*test_parts\.py::(\w+)$", said)
    assert once == ["test_once", "test_once_in_a_table"], said
    left = (tmp_path / "left").read_text()
    assert re.findall(r"(?m)^left behind, and ended: (\d+) sleep 86400$", said) == [left]
    until = time.monotonic() + 120
    while (still := runs(int(left))) and time.monotonic() < until:
        time.sleep(0.05)
    assert not still
    assert (tmp_path / "leaves").read_text() == "."  # what passed isn't run again


def test_what_fails_twice_counts(tmp_path):
    code, said = run(tmp_path, ONCE, TWICE)
    assert code == 1, said
    assert re.findall(r"(?m)^failed once: \S*::(\w+)$", said) == ["test_once", "test_once_in_a_table"]
    assert (tmp_path / "twice").read_text() == ".."


def test_more_failures_than_chance_makes_count_at_once(tmp_path):
    code, said = run(tmp_path, NINE)
    assert code == 1, said
    assert "9 failed" in said
    assert "once more" not in said
    assert (tmp_path / "nine").read_text() == 9 * "."
