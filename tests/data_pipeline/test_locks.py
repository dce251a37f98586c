"""File locks, and every use of one on a file system without locks."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from data_pipeline.execution import ownership
from data_pipeline.foundation import locks
from data_pipeline.foundation.disk_cache import DiskCache
from data_pipeline.foundation.locks import lock
from data_pipeline.tools.fetch.download import sole_user
from pretrain.run import lock as run_lock
from tests.tables import each


def test_a_lock_is_had_alone_or_shared_and_ends_with_its_file(tmp_path):
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
    with ownership.at_work(folder, ownership.begin(folder)):
        pass


def fetched(folder: Path) -> None:
    with sole_user(folder):
        pass


def trained(folder: Path) -> None:
    run_lock.check(folder)
    run_lock.take(folder).close()
    run_lock.check(folder)


@each("use", [cached, built, fetched, trained])
def test_without_locks_all_go_on_and_say_once_what_is_not_protected(use, tmp_path, monkeypatch, capsys):
    """The kernel's answer is simulated, since no file system without locks (such as Lustre by default) is at hand."""

    def refuse(file: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks, "_warned", set())
    use(tmp_path)
    use(tmp_path)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"warning: no file locks here (Function not implemented): {tmp_path}")
    assert captured.out == ""
