"""What `make` does before it runs anything of this project."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.tables import each

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
if [ "$1" = -c ]; then exit 0; fi
echo "$@" >> said
if [ "$2" = venv ]; then mkdir -p .venv/bin; touch .venv/bin/python; fi
exit 9
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a space in its name, and with the files that an installation depends on."""
    folder = tmp_path / "a checkout"
    for path in (ROOT / "pyproject.toml", ROOT / "constraints.txt", *ROOT.glob("examples/*/pyproject.toml")):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    return folder


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make`, which knows nothing of a make that runs these tests."""
    command = ["make", "--file", str(ROOT / "Makefile"), *arguments]
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True)


def test_another_python_than_3_11_and_3_12_is_one_line_and_nothing_is_installed(folder):
    done = make(folder, "install", "PYTHON=false")
    first = "PYTHON=false: expected Python 3.11 or 3.12, as in: make install PYTHON=python3.12"
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, first)
    assert not (folder / ".venv").exists()


def test_a_failed_venv_is_removed_and_a_users_own_is_kept(folder):
    (folder / "python").write_text(FAKE)
    (folder / "python").chmod(0o755)
    assert make(folder, "install", "PYTHON=./python").returncode == 2
    assert not (folder / ".venv").exists()
    (folder / ".venv/bin").mkdir(parents=True)  # as by uv
    (folder / ".venv/bin/python").symlink_to(folder / "python")
    assert make(folder, "install", "PYTHON=./python").returncode == 2
    first, second = (folder / "said").read_text().splitlines()
    assert first == "-m venv .venv"
    assert second.startswith("-m pip install ")
    assert (folder / ".venv/bin/python").exists()


@each(
    "options, file",
    [
        ([], "build/gpu-1.jsonl"),
        (["CALL=2"], "build/gpu-2.jsonl"),
        (["ONLY=steps attention"], "build/gpu-some.jsonl"),
        (["DEVICE=cpu"], "build/gpu-1-cpu.jsonl"),
        (["ONLY=steps", "OUT=mine.jsonl"], "mine.jsonl"),
    ],
)
def test_some_checks_of_a_gpu_leave_the_results_of_all(folder, options, file):
    told = make(folder, "--dry-run", "gpu", *options).stdout
    assert f"--out {file} " in told
    assert f'PYTHONPATH="{folder}/build/gpu:{folder}$' in told


def test_clean_leaves_corpora_runs_and_exports(folder):
    kept = [folder / name / "mine" for name in ("corpora", "runs", "exports")]
    for path in (*kept, folder / "build", folder / ".venv"):
        path.mkdir(parents=True)
    assert make(folder, "clean").returncode == 0
    assert all(path.exists() for path in kept)
    assert not (folder / "build").exists()
    assert not (folder / ".venv").exists()
