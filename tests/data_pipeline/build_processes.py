"""The processes of a build, and the files that it leaves."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

import psutil

from tests.conftest import TOP

# `data-pipeline` where even a few files are merged.
MERGING = """
from data_pipeline.cli import main
from data_pipeline.execution import buckets

buckets.group_sizes = lambda files, readers: [2]
main()
"""


def checksums(corpus: Path) -> dict[str, str]:
    """The sha256 of every file of a build except the report."""
    files = [path for path in corpus.rglob("*") if path.is_file() and ".stages" not in path.parts]
    return {
        str(path.relative_to(corpus)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if not path.name.startswith("report.")
    }


def flip(path: Path, position: int = -1) -> None:
    """Flips one bit of one byte; a second call flips it back."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def with_fault(fault: str, stage: str, when: str, marker: Path) -> dict[str, str]:
    """The environment of a build with a fault in the first unit of a stage, as checks/faults/building.py plants it."""
    planted = {"fault": fault, "stage": stage, "when": when, "marker": str(marker)}
    search = os.pathsep.join([str(TOP / "checks/faults"), str(TOP), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": search, "BUILD_FAULT": json.dumps(planted)}


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def raylets(tree: list[psutil.Process]) -> list[psutil.Process]:
    """The processes in `tree` that run Ray's program `raylet`."""
    found = []
    for process in tree:
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet":
                found.append(process)
    return found


def at_work(tree: list[psutil.Process], corpus: Path) -> list[psutil.Process]:
    """The processes in `tree` that work on a unit of `corpus`: each has the file open whose lock makes builds wait."""
    held = str(corpus.resolve() / ".stages" / "workers")
    found = []
    for process in tree:
        with contextlib.suppress(psutil.Error):
            if any(file.path == held for file in process.open_files()):
                found.append(process)
    return found
