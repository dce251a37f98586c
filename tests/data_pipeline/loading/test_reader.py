"""The bounded disk cache that processes share, through which a remote corpus is read."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.corpus import default_directory
from data_pipeline.loading import reader
from data_pipeline.loading.reader import DiskCache
from tests.support.mounts import mounted
from tests.support.tables import each


def content(number: int) -> bytes:
    return bytes([number % 256]) * 1000


def digest(number: int) -> str:
    return hashlib.sha256(content(number)).hexdigest()


def cached_in(folder: Path) -> dict[str, int]:
    """The bytes of each file of a cache, by name."""
    return {path.name: path.stat().st_size for path in folder.glob("??/*")}


def test_the_cache_stays_within_its_limit_and_keeps_what_was_used_last(tmp_path):
    cache, probe = DiskCache(tmp_path / "cache", limit=10_000), tmp_path / "probe"
    probe.touch()

    def used(number: int) -> None:
        assert cache.get(digest(number), lambda: content(number)) == content(number)
        before = probe.stat().st_mtime_ns
        while probe.stat().st_mtime_ns == before:  # the file system's clock is coarse
            probe.touch()

    for number in range(40):
        used(number)
        used(0)  # again and again
        assert sum(path.stat().st_size for path in cache.directory.rglob("*") if path.is_file()) <= 10_000
    fetched = []
    for number in (0, 39, 1):
        cache.get(digest(number), lambda number=number: fetched.append(number) or content(number))
    assert fetched == [1]


def test_a_file_of_most_of_the_limit_takes_the_place_of_the_one_before(tmp_path):
    cache = DiskCache(tmp_path, limit=10_000)
    for number in range(5):
        data = content(number) * 6
        assert cache.get(hashlib.sha256(data).hexdigest(), lambda data=data: data) == data
        assert list(cached_in(tmp_path).values()) == [6000]


def test_a_cached_file_of_other_content_is_replaced(tmp_path):
    cache = DiskCache(tmp_path, limit=10_000)
    cache.get(digest(1), lambda: content(1))
    for other in (b"", content(2)):  # as a full disk may leave it, and as a bad one
        (tmp_path / digest(1)[:2] / digest(1)).write_bytes(other)
        assert cache.get(digest(1), lambda: content(1)) == content(1)


def test_a_cached_file_on_a_shared_file_system_is_read_not_mapped(tmp_path, monkeypatch):
    """Another node may delete the file, and a mapped file that is gone kills the process."""
    monkeypatch.setattr(reader, "_OWN_DISKS", set())
    cache, fetched = DiskCache(tmp_path, limit=10_000), []
    contents = [cache.get(digest(1), lambda: fetched.append(1) or content(1)) for _ in range(2)]
    assert contents == [content(1)] * 2
    assert fetched == [1]
    assert [type(one.obj) for one in contents] == [bytes, bytes]


def test_the_default_cache_is_on_the_nodes_disk_and_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    directory = default_directory()
    assert directory == tmp_path / f"encdec-pretrain-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda owner=os.getuid(): owner + 1)
    (tmp_path / f"encdec-pretrain-{os.getuid()}").mkdir()  # made by somebody else
    with pytest.raises(UserError, match=r"data\.cache\.directory: .* belongs to another user"):
        default_directory()


def test_a_cache_that_cannot_be_written_is_named_once_and_not_used(tmp_path, capsys):
    (tmp_path / "file").touch()
    cache = DiskCache(tmp_path / "file", limit=10_000)
    assert [cache.get(digest(1), lambda: content(1)) for _ in range(2)] == [content(1)] * 2
    assert capsys.readouterr().err == f"warning: {tmp_path}/file: blocks can't be cached: Not a directory\n"


def test_the_loaders_of_a_machine_keep_the_limit_together(tmp_path):
    """64 loaders, each of which stores a block in turn."""
    caches = [DiskCache(tmp_path, limit=200_000) for _ in range(64)]
    for number in range(400):
        data = number.to_bytes(2, "big") * 500
        caches[number % 64].get(hashlib.sha256(data).hexdigest(), lambda data=data: data)
        if number % 10 == 9:
            assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 200_000
    assert len(list(tmp_path.glob("??/*"))) >= 180  # a tenth goes at a time


@each("others, room", [(92_000, True), (94_500, False)])
def test_the_cache_leaves_a_twentieth_of_the_disk_free(tmp_path, capsys, monkeypatch, others, room):
    """A disk of 100 kB; other programs use a part."""
    cache = DiskCache(tmp_path, limit=10**9)

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(total=100_000, free=100_000 - others - sum(cached_in(tmp_path).values()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    for number in range(20):
        assert cache.get(digest(number), lambda number=number: content(number)) == content(number)
        assert usage(tmp_path).free >= 5000
        assert (digest(number) in cached_in(tmp_path)) is room
    said = f"warning: {tmp_path}: blocks can't be cached: less than 5% of the disk is free\n"
    assert capsys.readouterr().err == ("" if room else said)


@each("error, room", [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_full_disk_makes_the_cache_smaller_and_another_error_does_not(tmp_path, capsys, monkeypatch, error, room):
    """A disk that takes five files, although it has free bytes: no inodes are left, or the user's quota is used up."""
    cache, write = DiskCache(tmp_path, limit=10**9), reader._write

    def limited(path: Path, data: bytes) -> None:
        if len(cached_in(tmp_path)) >= 5:
            raise OSError(error, os.strerror(error))
        write(path, data)

    monkeypatch.setattr(reader, "_write", limited)
    for number in range(20):
        assert cache.get(digest(number), lambda number=number: content(number)) == content(number)
        assert (digest(number) in cached_in(tmp_path)) is (room or number < 5)
    said = f"warning: {tmp_path}: blocks can't be cached: {os.strerror(error)}\n"
    assert capsys.readouterr().err == ("" if room else said)


# a cache that may have more than its disk; the most of the disk that is used, and which of the last blocks are there
SMALL_DISK = """
import hashlib, shutil, sys
from pathlib import Path
from data_pipeline.loading.reader import DiskCache

folder = Path(sys.argv[1])
cache, most = DiskCache(folder / "cache", limit=10**9), 0
for number in range(int(sys.argv[2])):
    content = number.to_bytes(4, "big") * 4096
    assert cache.get(hashlib.sha256(content).hexdigest(), lambda: content) == content
    disk = shutil.disk_usage(folder)
    most = max(most, 1 - disk.free / disk.total)
stored = [(cache.directory / name[:2] / name).exists() for name in (
    hashlib.sha256(one.to_bytes(4, "big") * 4096).hexdigest() for one in range(number - 9, number + 1))]
print(f"{most} {sum(stored)}")
"""


@each("options, blocks", [("size=4m", 600), ("size=64m,nr_inodes=600", 600)])
def test_a_cache_on_a_disk_smaller_than_its_limit_makes_room(tmp_path, options, blocks):
    """600 blocks of 16 KiB on 4 MiB, of which 5 % stay free; and on a disk that is full while it has free bytes."""
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk"), str(blocks)]
    done = mounted(tmp_path / "disk", options, command, tmp_path / "errors")
    assert (done.returncode, done.stderr) == (0, "")
    most, stored = map(float, done.stdout.split())
    assert most <= 0.95
    assert stored == 10


def test_a_disk_that_others_have_filled_is_left_alone(tmp_path):
    fill = f'head -c 3900k /dev/zero > {tmp_path}/disk/others; exec "$0" "$@"'
    command = ["sh", "-c", fill, sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk"), "20"]
    done = mounted(tmp_path / "disk", "size=4m", command, tmp_path / "errors")
    warning = f"warning: {tmp_path}/disk/cache: blocks can't be cached: less than 5% of the disk is free\n"
    assert (done.returncode, done.stderr) == (0, warning)
    assert done.stdout.split()[1] == "0"


SHARE = """
import hashlib, sys
from pathlib import Path
from data_pipeline.loading.reader import DiskCache

cache = DiskCache(Path(sys.argv[1]), limit=20_000)
for turn in range(300):
    content = bytes([turn * int(sys.argv[2]) % 50]) * 1000
    assert cache.get(hashlib.sha256(content).hexdigest(), lambda: content) == content
"""


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", SHARE, tmp_path, str(step)]) for step in (1, 3, 7)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 20_000
