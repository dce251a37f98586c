"""Blocks of one split, read by byte offset. Local blocks are memory-mapped; remote ones go through the disk cache."""

import contextlib
import hashlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.blocks import Block, decode_block
from data_pipeline.foundation import stores
from data_pipeline.foundation.atomic import TEMPORARY_SUFFIX, atomic_file, lock
from data_pipeline.foundation.errors import DamagedInput, UserError, one_line

# A process checks the size each time it has added 1 % of the limit; then it deletes files until 10 % is free.
_LOOK, _KEEP = 0.01, 0.9


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


_ATTEMPTS = 3  # to read a remote block whose checksum differs
_SHARDS_OPEN = 16


class BlockStore:
    """Blocks by number, each checked against its sha256 when first read. The last `cached` ones are kept.

    Blocks are views into the file. The operating system's page cache holds the bytes once for all ranks of a machine.
    """

    def __init__(self, corpus: Corpus, split: str, cached: int):
        self.corpus = corpus
        self.index = corpus.blocks(split)
        self._cached = lru_cache(maxsize=cached)(self._read)
        self._mapped = lru_cache(maxsize=_SHARDS_OPEN)(mapped_file)
        remote = corpus.remote
        self._cache = DiskCache(remote.cache / "blocks", remote.cache_bytes) if remote else None
        self._checked = np.zeros(len(self.index.rows), dtype=bool)

    def __getitem__(self, number: int) -> Block:
        """Raises DamagedInput, which names shard and byte, if a block can't be read or its checksum differs.

        Raises StoreError if the store of a remote corpus refuses or doesn't answer.
        """
        return self._cached(number)

    def _read(self, number: int) -> Block:
        content = self._content(number)
        if not self._checked[number]:
            if not self.index.is_whole(number, content):
                raise self._damage(number, "sha256 differs; data-pipeline verify lists all damage")
            self._checked[number] = True
        return decode_block(content)

    def _content(self, number: int) -> memoryview:
        if self._cache is not None:
            return self._cache.get(self.index.sha256[number].tobytes().hex(), lambda: self._fetch(number))
        shard = self.index.shards[self.index.shard[number]]
        start, length = int(self.index.offset[number]), int(self.index.length[number])
        try:
            mapped = self._mapped(str(self.corpus.directory / shard))
        except OSError as error:
            raise self._damage(number, error.strerror or "can't be read") from None
        if len(mapped) < start + length:  # reading past the end would be a bus error
            raise self._damage(number, f"the file ends at byte {len(mapped)}")
        return mapped[start : start + length]

    def _fetch(self, number: int) -> bytes:
        assert self.corpus.remote is not None
        url = self.corpus.remote.url
        filesystem, root = stores.filesystem(url)
        shard = self.index.shards[self.index.shard[number]]
        start, length = int(self.index.offset[number]), int(self.index.length[number])
        path = f"{root.rstrip('/')}/{shard}"
        read = partial(filesystem.cat_file, path, start=start, end=start + length)
        for _ in range(_ATTEMPTS):
            try:
                content = stores.with_retries(read, f"{url}/{shard}", self.corpus.remote.wait_seconds)
            except UserError:
                raise
            except Exception as error:  # each file system raises its own errors
                raise self._damage(number, f"can't be read: {one_line(error)}") from None
            if self.index.is_whole(number, content):
                return content
        raise self._damage(number, "sha256 differs")

    def _damage(self, number: int, reason: str) -> DamagedInput:
        shard = self.index.shards[self.index.shard[number]]
        return DamagedInput(f"{self.corpus.location}/{shard}", f"byte {self.index.offset[number]}", reason)
