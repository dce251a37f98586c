"""A bounded cache on the local disk for blocks of a remote corpus, shared by the ranks of a machine."""

import contextlib
import hashlib
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, atomic_file, lock
from data_pipeline.foundation.errors import UserError

# A process checks the size each time it has added 1 % of the limit; then it deletes files until 10 % is free.
_LOOK, _KEEP = 0.01, 0.9


def default_directory() -> Path:
    """A directory of this user below $SLURM_TMPDIR, $TMPDIR or /tmp: on this machine's disk, unlike home directories.

    It is created for this user alone. Raises UserError if the directory belongs to another user, who could
    replace its content.
    """
    directory = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()) / f"encdec-pretrain-{os.getuid()}"
    with contextlib.suppress(OSError):  # the first write reports it
        directory.mkdir(mode=0o700, exist_ok=True)
    if directory.exists() and {directory.stat().st_uid, directory.lstat().st_uid} != {os.getuid()}:
        raise UserError(f"data.cache.directory: {directory}, the default, belongs to another user; name another one")
    return directory


def mapped_file(path: str | Path) -> memoryview:
    """A file mapped into memory, read only as it is used. Raises OSError, and ValueError for an empty file."""
    with open(path, "rb") as file:  # noqa: PTH123 (a bare name is quicker to hash than a Path)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class DiskCache:
    """Stores contents by their sha256, one file each. Beyond about `limit` bytes it deletes the least recently used.

    Any number of processes may use one directory. Files appear whole, and a deleted file stays readable to the
    processes that have it open.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        self._added, self._refused = 0, False

    def get(self, sha256: str, fetch: Callable[[], bytes]) -> memoryview:
        """The content with that sha256. If it isn't cached, calls `fetch` and stores what that returns.

        A cached file is mapped into memory, since another process may delete it at any time. A file with the wrong
        content, as a full disk leaves it, is replaced.
        """
        path = self.directory / sha256[:2] / sha256
        with contextlib.suppress(OSError, ValueError):  # it isn't there, or empty
            mapped = mapped_file(path)
            if hashlib.sha256(mapped).hexdigest() == sha256:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return mapped
        content = fetch()
        try:
            with atomic_file(path) as file:
                file.write(content)
        except OSError as error:  # the disk is full: reading is slower, but the run can go on
            if not self._refused:
                self._refused = True
                print(f"warning: {self.directory}: blocks can't be cached: {error.strerror}", file=sys.stderr)
            return memoryview(content)
        self._added += len(content)
        if self._added > self.limit * _LOOK:
            self._added = 0
            self._make_room(path)
        return memoryview(content)

    def _make_room(self, new: Path) -> None:
        """Deletes the least recently used files, except `new`, while the cache is too large."""
        with (self.directory / "lock").open("a") as file:
            lock(file, f"{self.directory}: processes that make room at once may remove too much of it", wait=True)
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= self.limit * _KEEP:
                    break
                if path != new:
                    path.unlink(missing_ok=True)
                    total -= size

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each file."""
        for path in self.directory.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                if not path.name.endswith(TEMPORARY_SUFFIX):
                    status = path.stat()
                    yield status.st_mtime_ns, status.st_size, path
