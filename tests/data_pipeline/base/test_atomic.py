"""Files and directories that appear whole or not at all, their permissions, and locks."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from data_pipeline.base import atomic, processes
from data_pipeline.base.atomic import fingerprint, lock, new_directory, remove_leftovers, temporary_path
from data_pipeline.base.errors import UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.loading.reader import DiskCache
from data_pipeline.sources.record import Range
from data_pipeline.stages.tokens import TokensResult
from pretrain.run import status
from tests.support.builds import plain
from tests.support.tables import each


def test_a_new_directory_appears_when_its_block_ends_and_none_if_that_fails(tmp_path):
    out = tmp_path / "above/out"
    with new_directory(out) as partial:
        (partial / "below").mkdir()
        (partial / "below/file").write_text("content")
        assert not out.exists()
    assert (out / "below/file").read_text() == "content"
    with pytest.raises(FileExistsError), new_directory(tmp_path / "above/failed") as partial:
        partial.mkdir()
    assert list(out.parent.iterdir()) == [out]


def test_a_path_that_exists_is_not_replaced_unless_it_is_an_empty_directory(tmp_path):
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="exists already; choose another directory"), new_directory(taken):
            pass
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as partial:
        (partial / "file").touch()
    assert (tmp_path / "empty/file").exists()


def test_leftovers_of_a_killed_writer_are_found_by_name_and_place_and_other_writers_files_stay(tmp_path):
    (tmp_path / "own/below").mkdir(parents=True)
    (tmp_path / "another").mkdir()
    folders = [tmp_path, tmp_path / "own", tmp_path / "own/below", tmp_path / "another"]
    left = [temporary_path(folder / name) for folder in folders for name in ("out", "a\nfile")]
    theirs = {folder / name for folder in folders for name in (".theirs.tmp", ".file.0123abcd-1.tmp")}
    for path in (*left, *theirs):
        path.touch()
    left[0].unlink()
    left[0].mkdir()
    remove_leftovers(tmp_path, ["own", "missing"])
    assert set(tmp_path.rglob(".*")) == theirs | set(left[-2:])
    remove_leftovers(tmp_path)
    assert set(tmp_path.rglob(".*")) == theirs


def test_lock_is_exclusive_or_shared_and_ends_with_its_file(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    with path.open() as first, path.open() as second:
        lock(first, None, shared=True)
        lock(second, None, shared=True)
        with pytest.raises(BlockingIOError), path.open() as third:
            lock(third, None)
    with path.open() as third:
        lock(third, None)


def cached(folder: Path) -> None:
    content = bytes(100)
    DiskCache(folder, limit=1).get(hashlib.sha256(content).hexdigest(), lambda: content)


def built(folder: Path) -> None:
    corpus = LocalStore(folder)
    with corpus.at_work(corpus.begin()):
        pass


def trained(folder: Path) -> None:
    status.check_lock(folder)
    status.lock(folder).close()
    status.check_lock(folder)


def test_a_run_can_be_locked_while_a_command_looks_whether_it_trains(tmp_path, monkeypatch):
    """The command holds the lock, shared, for a moment."""
    (tmp_path / status.LOCK).touch()
    looks = (tmp_path / status.LOCK).open()
    assert lock(looks, None, shared=True)

    def lock_while_it_looks(file: IO[Any], *given: Any, **options: Any) -> bool:
        try:
            return lock(file, *given, **options)
        finally:
            looks.close()

    monkeypatch.setattr(status, "lock_file", lock_while_it_looks)
    with status.lock(tmp_path), pytest.raises(UserError, match="is already training here"):
        status.lock(tmp_path)


@each("take", [status.check_lock, status.lock])
def test_a_restarted_rank_waits_for_the_lock_of_a_lost_machine(take, tmp_path, monkeypatch):
    """A server of NFS 4 releases the lock after 90 s. The time that passes is simulated."""
    held, now = status.lock(tmp_path), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 90:
            held.close()

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with pytest.raises(UserError, match="is already training here"):
        take(tmp_path)
    if file := take(tmp_path, restart=True):
        file.close()
    assert 90 < now < 91


@each("use", [cached, built, trained])
def test_programs_go_on_without_locks_and_say_once_what_is_not_protected(use, tmp_path, monkeypatch, capsys):
    """The kernel's answer is simulated, since no file system without locks (such as Lustre by default) is at hand."""
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))))
    monkeypatch.setattr(atomic, "_warned", set())
    use(tmp_path)
    use(tmp_path)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"warning: no file locks here (Function not implemented): {tmp_path}")
    assert captured.out == ""


@each("umask, files, folder", [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_files_have_the_permissions_of_any_new_file_whichever_library_writes_them(umask, files, folder, tmp_path):
    """safetensors itself makes its files with mode 0600. A mode that is asked for stays."""
    before = os.umask(umask)
    try:
        with atomic.atomic_path(tmp_path / "one") as path:
            save_file({"a": np.zeros(3)}, path)
        with new_directory(tmp_path / "folder") as partial:
            save_file({"a": np.zeros(3)}, partial / "weights")
            (partial / "README.md").write_text("text")
        atomic.write_bytes(tmp_path / "secret", b"password", mode=0o600)
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    of_new = {"one": files, "folder": folder, "folder/weights": files, "folder/README.md": files}
    assert modes == {**of_new, "secret": 0o600}


def test_the_fingerprint_of_a_dataclass_is_that_of_its_fields():
    fields = {"tokens": {"train": 1}, "lengths": {"8": 1}, "uncovered": {}, "characters": {}, "changed": {}}
    assert fingerprint([TokensResult({"train": 1}, {"8": 1}), Range(2)]) == fingerprint([fields, [2, None, 0]])
    config = plain(Path("nowhere"), "*.wet.gz", "wet")
    assert fingerprint(config) == fingerprint(config.model_dump())
