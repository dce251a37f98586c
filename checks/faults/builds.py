"""Faults × every stage of a build: after it was run again, every file has the sha256 of the undisturbed build's.

Each cell builds a corpus of the shipped samples with every stage on Ray. In a unit of one stage, a worker is killed,
the driver, or Ray's raylet, with which a node is lost; or the disk refuses to be written; or a bit of an input flips.
The build is then run again. What was flipped must be refused, or not matter, and is put right before that.
"""

import contextlib
import csv
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from checks.faults.building import FAULTS, OUTSIDE, WHEN, PlantedInBuild
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import checksums, differences, family, raylets, with_fault

_SECONDS = 300.0
_NAMED = {  # in what a build says that fails
    "ENOSPC": "No space left on device",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
    "a lost node": "Ray",
}
_ANOTHER_WORKER = ("SIGKILL",)  # Ray does the unit again


@dataclass(frozen=True)
class BuildCell:
    number: int
    fault: str
    stage: str
    when: str


def draw(seed: int, number: int, stages: list[str]) -> BuildCell:
    """The cell of this number: the stages one after the other, each with a fault that the seed draws."""
    generator = random.Random(f"{seed}/build/{number}")
    fault = generator.choice(sorted((*FAULTS, *OUTSIDE)))
    stage = stages[number % len(stages)]
    return BuildCell(number, fault, stage, generator.choice(WHEN))


def write_inputs(folder: Path, records: int = 25, **changes: object) -> Path:
    """A corpus file with every stage, and three C4 files of so many records. `changes`: sections of the corpus file."""
    for part in range(3):
        write_c4(folder / f"c4-{part}.json.gz", records=records, skip=records * part)
    item = "This question of a test stands on a page and must not be learnt from it"
    passage = " ".join(f"word{number}" for number in range(60))  # on two pages
    for part, text in enumerate((f"First page. {passage}.", f"Second page. {passage}!", f"Third page. {item}.")):
        with gzip.open(folder / f"c4-{part}.json.gz", "at") as more:
            more.write(json.dumps({"text": text, "url": f"http://{part}.org", "timestamp": "2019"}) + "\n")
    (folder / "items.txt").write_text(item)
    return write_corpus_file(
        folder / "corpus.yaml",
        dedup={"spans": True, "substrings": True, "minhash": True, "keys_per_bucket": 500},
        decontamination={"sets": [{"name": "test", "path": str(folder / "items.txt"), "format": "text"}]},
        **changes,
    )


class Builds:
    """Runs cells below `folder`. `stages` are those of the undisturbed build, `expected` the sha256 of its files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = write_inputs(folder)
        shutil.rmtree(folder / "undisturbed", ignore_errors=True)
        code, said = self._built(folder / "undisturbed", None, "ray.small_bytes=1000000000")
        assert code == 0, said
        lines = (line.split(":")[0] for line in said.splitlines() if " to do (" in line)
        self.stages = list(dict.fromkeys(lines))
        self.expected = checksums(folder / "undisturbed")

    def judged(self, cell: BuildCell) -> list[str]:
        """What is wrong with a cell."""
        folder = self.folder / f"cell-{cell.number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        planted = PlantedInBuild(cell.fault, cell.stage, cell.when, str(folder / "marker"))
        with _restored(self.folder / "c4-1.json.gz"):
            code, said = self._built(folder / "corpus", planted, "ray.small_bytes=0")
        problems = [] if (folder / "marker").exists() else ["the fault never happened"]
        if cell.fault in _ANOTHER_WORKER and code != 0:
            problems.append(f"exit code {code}")
        if cell.fault not in (*_ANOTHER_WORKER, "a bit of an input") and code == 0:
            problems.append("the build didn't notice")
        if (named := _NAMED.get(cell.fault)) and named not in said:
            problems.append(f"nothing says {named!r}")
        if code == 0:
            return problems + differences(folder / "corpus", self.expected)
        code, said = self._built(folder / "corpus", None, "ray.small_bytes=1000000000")
        problems += [f"run again: exit code {code}: {said[-300:]}"] if code else []
        return problems + differences(folder / "corpus", self.expected)

    def _built(self, corpus: Path, planted: PlantedInBuild | None, *overrides: str) -> tuple[int, str]:
        """The exit code of a build, and what it said. No process outlives it."""
        environment = with_fault(**asdict(planted)) if planted else dict(os.environ)
        settings = [f"output={corpus}", "ray.num_cpus=1", *overrides]
        command = [sys.executable, "-m", "data_pipeline", "build", str(self.config), *settings]
        corpus.parent.mkdir(parents=True, exist_ok=True)
        log = corpus.with_suffix(".log")
        with log.open("w") as out:
            build = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
            started, deadline = set[psutil.Process](), time.monotonic() + _SECONDS
            acted = planted is None or planted.fault not in OUTSIDE
            while build.poll() is None and time.monotonic() < deadline:
                if planted and not acted and Path(planted.marker).exists():
                    acted = True
                    started |= set(family(build.pid))
                    self._act(planted, build)
                time.sleep(0.02)
            if build.poll() is None:
                started |= set(family(build.pid))
                build.kill()
                out.write("never ended\n")
            code = build.wait()
        _, alive = psutil.wait_procs(list(started), 30)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return code if not alive else 99, log.read_text()

    def _act(self, planted: PlantedInBuild, build: "subprocess.Popen[bytes]") -> None:
        if planted.fault == "the driver killed":
            build.kill()
        elif planted.fault == "a lost node":
            raylets(family(build.pid))[0].kill()
        else:
            _flip(self.folder / "c4-1.json.gz")
        Path(planted.marker).with_name("acted").touch()


def _flip(path: Path) -> None:
    """Flips a bit in the middle of a file, as a bad disk does: its time stays."""
    content, stat = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class _restored(contextlib.AbstractContextManager[None]):
    """The file has its content and its time again after the block."""

    def __init__(self, path: Path):
        self._path, self._content, self._stat = path, path.read_bytes(), path.stat()

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._content)
        os.utime(self._path, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


def run_builds(folder: Path, seed: int, numbers: Iterable[int]) -> int:
    """Judges these cells, and writes builds.csv; returns 1 if one has a problem."""
    builds, wrong, cells = Builds(folder), 0, 0
    with (folder / "builds.csv").open("w", encoding="utf-8", newline="") as table:
        write = csv.writer(table, lineterminator="\n").writerow
        write(["cell", "fault", "stage", "when", "s", "result"])
        for number in numbers:
            cell, began = draw(seed, number, builds.stages), time.monotonic()
            problems = builds.judged(cell)
            wrong, cells = wrong + bool(problems), cells + 1
            seconds, result = f"{time.monotonic() - began:.0f}", "; ".join(problems) or "same"
            line = [str(cell.number), cell.fault, cell.stage, cell.when, seconds, result]
            write(line)
            print(" | ".join(line), flush=True)
    print(f"\n{cells - wrong} of {cells} builds the same, of {len(builds.expected)} files; {len(builds.stages)} stages")
    return int(wrong > 0)
