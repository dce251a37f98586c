"""Blocks of a corpus on a remote file system, kept on this machine's disk: bounded, and shared by its ranks."""

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, atomic_file
from data_pipeline.foundation.locks import lock

# A process looks for room once it has added a hundredth of the limit, and then leaves a tenth free.
_LOOK, _KEEP = 0.01, 0.9


def default_directory() -> Path:
    """Under $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "encdec-pretrain"


def mapped_file(path: str | Path) -> memoryview:
    """The bytes of a file, without reading them. Raises OSError, and ValueError for an empty file."""
    with open(path, "rb") as file:  # noqa: PTH123 (a bare name is quicker to hash than a Path)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class DiskCache:
    """Contents by their sha256, one file each, about `limit` bytes in all; those not used for longest go first.

    Any number of processes may use one directory: files appear whole, and one that is removed stays readable to those
    that have it open.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        self._added = 0

    def get(self, sha256: str, fetch: Callable[[], bytes]) -> memoryview:
        """The content with that sha256; where there is no file of it, what `fetch` returns becomes one.

        A file is mapped into memory: it may be removed as soon as another process needs its room. A file of other
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
        with atomic_file(path) as file:
            file.write(content)
        self._added += len(content)
        if self._added > self.limit * _LOOK:
            self._added = 0
            self._make_room(path)
        return memoryview(content)

    def _make_room(self, new: Path) -> None:
        """Removes the files that were not used for longest, but `new`, if there is too much."""
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
