"""A power cut between any two calls that change files: the next build ends with the same bytes.

The file system here keeps what POSIX promises and no more. A file's content is safe once it was flushed, and otherwise
lost, cut or zeros. A new name, a new content of a name or its removal is safe once its directory was flushed; until
then each may have happened or not, in any order.
"""

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import RayConfig
from data_pipeline.engine import records, workers
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Result, Stage, Unit, run
from tests.support.tables import each

CALLS = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir")


@dataclass(frozen=True)
class Spec:
    content: str
    outputs: tuple[str, ...]
    reads: tuple[str, ...] = ()


def write_all(context: Context, spec: Spec) -> Result:
    read = b"".join(context.store.get(name) for name in spec.reads).decode()
    for output in spec.outputs:
        context.store.write(output, f"{output}: {spec.content} {fingerprint(read)}".encode())
    return Result()


FIRST, LAST = (Stage(name, 1, write_all, "") for name in ("first", "last"))


def build(root: Path, config: str, units: int = 2) -> None:
    """Files of one size whatever the config, in two stages, of which the last reads all of the first's; two files of
    each of the `units`."""
    corpus = LocalStore(root)
    try:
        with workers.without_ray():
            before: dict[str, str] = {}
            for stage in (FIRST, LAST):
                folder = "shards" if stage is LAST else f".stages/{stage.name}"
                todo = []
                for number in range(units):
                    outputs = tuple(f"{folder}/{number}-{kind}" for kind in "ab")
                    spec = Spec(config, outputs, tuple(before))
                    todo.append(Unit(str(number), spec, fingerprint([config, before]), outputs))
                done = run(stage, todo, corpus, RayConfig())
                before = {name: output.sha256 for unit in done for name, output in unit.outputs.items()}
    finally:
        corpus.release()


def written(corpus: Path) -> dict[str, str]:
    found = (path for path in corpus.rglob("*-[ab]") if path.is_file())
    return {str(path.relative_to(corpus)): path.read_text() for path in found}


class Disk:
    """Watches what is below `root` while a build runs; `moments` has what a power cut might leave after each call."""

    def __init__(self, root: Path, kept: Path, monkeypatch: pytest.MonkeyPatch):
        self.root, self._kept = root, kept
        self.calls: Counter[str] = Counter()
        self._safe_names = self._names = self._look() if root.exists() else {}
        self._content = self._read()
        self._safe_content = dict(self._content)
        self._pending: dict[str, list[int]] = {}
        self.moments: list[tuple[dict[str, list[int]], dict[int, set[bytes]]]] = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name, call):
        def watched(*arguments, **options):
            flushed = os.fstat(arguments[0]).st_ino if name == "fsync" else 0
            path = str(Path(f"/proc/self/fd/{arguments[0]}").readlink()) if name == "fsync" else ""
            self._notice()
            try:
                return call(*arguments, **options)
            finally:
                self.calls[name] += 1
                self._notice()
                if name == "fsync":
                    self._flushed(flushed, path)
                self._remember()

        return watched

    def _look(self) -> dict[str, int]:
        """The inode of each file, to which a link is kept, so that no other gets its number; -1 for a directory."""
        found = {}
        for path in self.root.rglob("*"):
            try:
                number = path.stat().st_ino if path.is_file() else -1
                if number > 0 and not (self._kept / str(number)).exists():
                    os.link(path, self._kept / str(number))
            except FileNotFoundError:
                continue
            found[str(path.relative_to(self.root))] = number
        return found

    def _read(self) -> dict[int, bytes]:
        return {int(path.name): path.read_bytes() for path in self._kept.iterdir()}

    def _notice(self) -> None:
        names = self._look()
        for name in names.keys() | self._names.keys():
            if names.get(name) != self._names.get(name):
                self._pending.setdefault(name, []).append(names.get(name, 0))
        self._names, self._content = names, self._read()

    def _flushed(self, number: int, path: str) -> None:
        if number in self._content:
            self._safe_content[number] = self._content[number]
            return
        for name in [name for name in self._pending if str((self.root / name).parent) == path]:
            self._safe_names[name] = self._pending.pop(name)[-1]

    def _remember(self) -> None:
        names = {name: [number] for name, number in self._safe_names.items()}
        for name, numbers in self._pending.items():
            names[name] = [*names.get(name, [0]), *numbers]
        contents = {}
        for number, now in self._content.items():
            safe = self._safe_content.get(number, b"")
            added = max(0, len(now) - len(safe))
            torn = {safe, now, now[:-1], bytes(len(now)), safe + bytes(added), now[: len(safe) + added // 2]}
            contents[number] = {now} if now == safe else torn
        if not self.moments or self.moments[-1] != (names, contents):
            self.moments.append((names, contents))


def after_a_cut(moment: tuple[dict[str, list[int]], dict[int, set[bytes]]], root: Path, seed: str) -> None:
    """Makes `root` one of the states that a power cut may leave."""
    names, contents = moment
    chance = random.Random(seed)
    latest = chance.random() < 0.3  # all names are the newest, or the oldest, or any
    oldest = not latest and chance.random() < 0.3
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name in sorted(names):
        numbers = names[name]
        number = numbers[-1] if latest else numbers[0] if oldest else chance.choice(numbers)
        path = root / name
        if number == 0 or not path.parent.is_dir():
            continue
        if number < 0:
            path.mkdir()
        else:
            path.write_bytes(chance.choice(sorted(contents[number])))


@each("before, seconds", [("", 0.0), ("A", 0.0), ("A", 1e9)])  # between two flushes of records
def test_whatever_a_power_cut_leaves_the_next_build_has_the_same_bytes(tmp_path, monkeypatch, before, seconds):
    """Of the config that was at work, and of the former one, whose files have the same names and sizes."""
    monkeypatch.setattr(records, "_SECONDS_BETWEEN_FLUSHES", seconds)
    root, kept = tmp_path / "corpus", tmp_path / "kept"
    kept.mkdir()
    wanted = {}
    for config in "AB":
        build(tmp_path / config, config)
        wanted[config] = written(tmp_path / config)
    assert {*map(len, wanted["A"].values())} == {*map(len, wanted["B"].values())}
    if before:
        build(root, before)
    with monkeypatch.context() as patched:
        disk = Disk(root, kept, patched)
        build(root, "B")
    assert len(disk.moments) > 30
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for number, moment in enumerate(disk.moments):
        config = "BBA"[number % 3]
        after_a_cut(moment, root, f"{before}/{seconds}/{number}")
        build(root, config)
        assert written(root) == wanted[config], (number, config)


def test_a_unit_of_an_intermediate_stage_flushes_its_files_alone(tmp_path, monkeypatch):
    """Two files of each of 20 units, whose folders and records are flushed together; and as many of a last stage."""
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(records, "_SECONDS_BETWEEN_FLUSHES", 1e9)  # however slow the machine is
    disk = Disk(tmp_path / "corpus", tmp_path / "kept", monkeypatch)
    build(tmp_path / "corpus", "A", units=20)
    files, of_stages = 80, 2 * 2 * 4  # at the first unit, and at the end: two folders, the file, the new folder
    assert disk.calls["replace"] == files + 2  # and the times of each stage
    assert files + 40 <= disk.calls["fsync"] <= files + 40 + of_stages  # a second one for each file that is to last
    assert disk.calls["mkdir"] < 30
    kinds = [path.name for path in (tmp_path / "corpus/.stages/first").iterdir()]
    assert sorted(kinds) == sorted([*(f"{n}-{kind}" for n in range(20) for kind in "ab"), records.FILE])
