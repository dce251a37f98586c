"""Reads rows of one split of a corpus by their ids and applies the objective.

Blocks are read by byte offset. Those on a disk of this machine are memory-mapped. Those on a shared file system are
read, since a mapped file that the system can't read kills the process without a word. Those of a remote corpus go
through a cache, which the ranks of a machine share.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import TextIO

import numpy as np
import psutil

from data_pipeline.base import stores
from data_pipeline.base.atomic import TEMPORARY_SUFFIX, lock, temporary_path
from data_pipeline.base.errors import DamagedInput, UserError, one_line
from data_pipeline.base.local_store import LocalStore
from data_pipeline.corpus import Corpus
from data_pipeline.corpus.blocks import Block, column_in, decode_block, examples_in, rows_in
from data_pipeline.corpus.objectives.objective import Examples, Objective, Padded, together
from data_pipeline.corpus.objectives.randomness import noise_keys
from data_pipeline.loading.stream import Skipped

_KEEP = 0.9  # of the cache's limit stays when files are deleted, so that not every block deletes some
_FREE = 0.05  # of the disk, for all other programs
_FULL = 0.8  # of the cache's size when the disk or the user's quota is full: the limit from then on
_OWN_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs", "ramfs", "apfs"}
_ABANDONED = 3600  # seconds after which a temporary file counts as abandoned by its writer


def is_on_own_disk(path: Path) -> bool:
    """Whether `path` is on a disk of this machine. False for a network's, and for file systems that aren't known."""
    real = path.resolve()
    above = [one for one in psutil.disk_partitions(all=True) if real.is_relative_to(one.mountpoint)]
    depth = [len(Path(one.mountpoint).parts) for one in above]
    nearest = [one.fstype for one, parts in zip(above, depth, strict=True) if parts == max(depth)]
    return bool(nearest) and nearest[-1] in _OWN_DISKS  # the last one that was mounted there hides the others


def mapped_file(path: str | Path) -> memoryview:
    """A file mapped into memory, read only as it is used. Raises OSError, and ValueError for an empty file."""
    with open(path, "rb") as file:  # noqa: PTH123 (a bare name is quicker to hash than a Path)
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class DiskCache:
    """Stores contents by their sha256, one file each. Before a file is stored, the least recently used files are
    deleted, until the cache is below `limit` bytes and 5 % of the disk is free.

    Any number of processes may use one directory: the file `lock` has the bytes of all. Files appear whole. On a disk
    of this machine they are mapped into memory, and a deleted file stays readable to the processes that have mapped it.
    On a shared file system they are read.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        self._is_mapped = is_on_own_disk(directory)
        self._refused = False

    def get(self, sha256: str, fetch: Callable[[], bytes]) -> memoryview:
        """The content with that sha256. If it isn't cached, calls `fetch` and stores what that returns.

        A file with the wrong content, as a full disk leaves it, is replaced.
        """
        path = self.directory / sha256[:2] / sha256
        with contextlib.suppress(OSError, ValueError):  # not found, or empty
            cached = mapped_file(path) if self._is_mapped else memoryview(path.read_bytes())
            if hashlib.sha256(cached).hexdigest() == sha256:
                with contextlib.suppress(OSError):
                    os.utime(path)
                return cached
        content = fetch()
        try:
            self._store(path, content)
        except OSError as error:  # reading is slower, but the run can continue
            if not self._refused:
                self._refused = True
                print(f"warning: {self.directory}: blocks can't be cached: {error.strerror}", file=sys.stderr)
        return memoryview(content)

    def _store(self, path: Path, content: bytes) -> None:
        """Makes room and writes the file. Other processes wait meanwhile: a file that they couldn't see wouldn't be
        counted."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("a+") as file:
            lock(file, f"{self.directory}: processes that make room at once may remove too much of it", wait=True)
            self._reserve(file, len(content))
            try:
                _write(path, content)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._reserve(file, len(content), is_full=True)
                _write(path, content)

    def _reserve(self, file: TextIO, size: int, is_full: bool = False) -> None:
        """Counts `size` bytes more in `file`, after making room for them. Raises OSError if there isn't enough.

        `is_full`: True if the disk turned out to have no room, although it should.
        """
        file.seek(0)
        counted = file.read()
        disk = shutil.disk_usage(self.directory)
        room = disk.free - int(_FREE * disk.total)
        if is_full or size > room or not counted.isdigit() or int(counted) + size >= self.limit:
            counted = str(self._make_room(size, room, is_full))
        file.truncate(0)
        file.write(str(int(counted) + size))

    def _make_room(self, size: int, room: int, is_full: bool) -> int:
        """Deletes the least recently used files if `size` bytes more are too many; the bytes that stay."""
        files = sorted(self._files())
        before = total = sum(used for _, used, _ in files)
        if is_full:
            self.limit = min(self.limit, int(_FULL * total))
        for _, used, path in files:
            if total + size <= _KEEP * min(self.limit, before + room):
                break
            path.unlink(missing_ok=True)
            total -= used
        if size > room + before - total:
            raise OSError(errno.ENOSPC, f"less than {_FREE:.0%} of the disk is free")
        return total

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each file, except those that are being written."""
        for path in self.directory.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not path.name.endswith(TEMPORARY_SUFFIX) or status.st_mtime < time.time() - _ABANDONED:
                    yield status.st_mtime_ns, status.st_size, path


def _write(path: Path, content: bytes) -> None:
    """Writes a file that appears whole. Nothing waits for the disk: what a power cut leaves of it isn't believed."""
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


_ATTEMPTS = 3  # to read a remote block whose checksum differs
_SHARDS_OPEN = 16


class BlockStore:
    """Blocks by number, each checked against its sha256 when first read. The last `cached` ones are kept.

    `block(number)` raises DamagedInput, which names shard and byte, if the block can't be read or its checksum differs,
    and StoreError if the store of a remote corpus refuses or doesn't answer.

    On a disk of this machine, blocks are views into the file, whose bytes the page cache holds once for all ranks.
    """

    def __init__(self, corpus: Corpus, split: str, cached: int):
        self.corpus = corpus
        self.index = corpus.blocks(split)
        self.block = lru_cache(maxsize=cached)(self._read)
        self._mapped = lru_cache(maxsize=_SHARDS_OPEN)(mapped_file)
        remote = corpus.remote
        self._is_mapped = remote is None and is_on_own_disk(corpus.directory)
        self._cache = DiskCache(remote.cache / "blocks", remote.cache_bytes) if remote else None
        self._checked = np.zeros(len(self.index.rows), dtype=bool)

    def _read(self, number: int) -> Block:
        content = self._content(number)
        if not self._checked[number]:
            if not self.index.is_whole(number, content):
                raise self._damage(number, "sha256 differs; data-pipeline verify lists all damage")
            self._checked[number] = True
        return decode_block(content)

    def _content(self, number: int) -> bytes | memoryview:
        if self._cache is not None:
            return self._cache.get(self.index.sha256[number].tobytes().hex(), lambda: self._fetch(number))
        shard, start, length = self._place(number)
        try:
            if not self._is_mapped:
                (content,) = LocalStore(self.corpus.directory).ranges(shard, [(start, start + length)])
                if len(content) < length:
                    raise self._damage(number, f"the file ends before byte {start + length}")
                return content
            mapped = self._mapped(str(self.corpus.directory / shard))
        except OSError as error:
            raise self._damage(number, error.strerror or "can't be read") from None
        except ValueError:
            raise self._damage(number, "the file is empty") from None
        if len(mapped) < start + length:  # reading past the end would be a bus error
            raise self._damage(number, f"the file ends at byte {len(mapped)}")
        return mapped[start : start + length]

    def _fetch(self, number: int) -> bytes:
        assert self.corpus.remote is not None
        url = self.corpus.remote.url
        filesystem, root = stores.filesystem(url)
        shard, start, length = self._place(number)
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

    def _place(self, number: int) -> tuple[str, int, int]:
        """(shard, first byte, bytes) of a block."""
        index = self.index
        return index.shards[index.shard[number]], int(index.offset[number]), int(index.length[number])

    def _damage(self, number: int, reason: str) -> DamagedInput:
        shard, start, _ = self._place(number)
        return DamagedInput(f"{self.corpus.location}/{shard}", f"byte {start}", reason)


class Reader:
    """Rows of `split`, by id.

    With `skip_damage`, rows of damaged blocks are empty; otherwise a damaged block is an error. `damaged` lists blocks
    already known to be damaged: they stay skipped, even if they are repaired.

    Attributes:
        skipped: the damaged blocks that were found, besides those known already.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        cached: int = 4,
        skip_damage: bool = False,
        damaged: Iterable[int] = (),
    ):
        self.corpus, self.split = corpus, split
        self._objective = corpus.objective
        self.skipped: list[Skipped] = []
        self._damaged = set(damaged)
        self._store = BlockStore(corpus, split, cached)
        self.blocks = self._store.index
        self._rows = int(self.blocks.rows.sum())
        self._skip_damage = skip_damage
        self._vocabulary = corpus.tokenizer.vocabulary

    def examples(
        self, rows: np.ndarray | list[int], epochs: np.ndarray | int, objective: Objective | None = None
    ) -> Examples:
        """Inputs and targets of the rows with these ids (n,), by `objective` instead of the corpus's, unless None.

        For an objective of shorter rows, each row is cut into `parts` of the objective's length. There are then n ×
        `parts` examples, the parts of a row one after the other. A row or part whose length the objective doesn't take
        is empty: a tail may be too short.

        `epochs`, one number or (n,), selects the noise if it is applied at load; noise applied at build is fixed.
        Raises UserError for an id that the split doesn't have, and DamagedInput, which names the shard, if a block's
        checksum differs.
        """
        ids = np.asarray(rows, dtype=np.int64)
        if (beyond := ids[(ids < 0) | (ids >= self._rows)]).size:
            raise UserError(
                f"{self.corpus.directory}: the split {self.split} has {self._rows} rows, whose ids count from 0, "
                f"got row {beyond[0]}"
            )
        epochs = np.broadcast_to(epochs, ids.shape)
        whole, blocks, inside = self._found(ids)
        if not blocks:
            return _empty(len(ids) * self.parts(objective), self._vocabulary.eos)
        some = self._examples(blocks, inside, ids[whole], epochs[whole], objective)
        return some if whole.all() else self._with_empty(some, np.repeat(whole, self.parts(objective)))

    def tokens(self, rows: np.ndarray) -> Padded:
        """The rows with these ids (n,) as they were cut, without the objective. Rows of damaged blocks are left out.

        Raises UserError if the objective was applied at build, since the text is gone then.
        """
        if self.corpus.manifest.rows.apply_at == "build":
            raise UserError(f"{self.corpus.directory}: built with apply_at: build, so that its rows are no longer text")
        _, blocks, inside = self._found(rows)
        return rows_in(blocks, inside)

    def parts(self, objective: Objective | None) -> int:
        """The number of rows that `objective` cuts each row into."""
        return self.corpus.manifest.rows.raw_length // objective.raw_length if objective else 1

    def _with_empty(self, examples: Examples, where: np.ndarray) -> Examples:
        """`examples` at the rows where `where` (n,) is True, and empty rows elsewhere."""
        empty = _empty(int((~where).sum()), self._vocabulary.eos, examples)
        return together([(np.flatnonzero(where), examples), (np.flatnonzero(~where), empty)], self._vocabulary.pad)

    def _examples(
        self, blocks: list[Block], rows: list[int], ids: np.ndarray, epochs: np.ndarray, objective: Objective | None
    ) -> Examples:
        parts = self.parts(objective)
        objective = objective or self._objective
        if self.corpus.manifest.rows.apply_at == "build":
            return examples_in(blocks, rows)
        whole, columns = rows_in(blocks, rows), {name: column_in(blocks, rows, name) for name in objective.columns}
        if parts > 1:
            whole, ids, epochs = _cut(whole, objective.raw_length, parts), _parts(ids, parts), np.repeat(epochs, parts)
            columns = {}
        keys = noise_keys(self.corpus.manifest.seed, self.split, epochs, ids)
        accepted = np.ones(len(ids), dtype=bool)
        if objective != self.corpus.manifest.rows.objective:  # which takes all rows
            known = {length: objective.accepts(length) for length in set(whole.lengths.tolist())}
            accepted = np.array([known[length] for length in whole.lengths.tolist()])
        if accepted.all():
            return objective.apply(whole, keys, self._vocabulary, columns)
        if not accepted.any():
            return _empty(len(ids), self._vocabulary.eos)
        some = Padded(whole.values[accepted], whole.lengths[accepted])
        columns = {name: column[accepted] for name, column in columns.items()}
        return self._with_empty(objective.apply(some, keys[accepted], self._vocabulary, columns), accepted)

    def _found(self, ids: np.ndarray) -> tuple[np.ndarray, list[Block], list[int]]:
        """Finds the rows `ids` (n,) in their blocks.

        Returns:
            A mask (n,): False for a row whose block is damaged and skipped.
            For each row that is True in the mask, the row's block.
            For each row that is True in the mask, the row's number within the block.
        """
        numbers = np.searchsorted(self.blocks.first_row, ids, side="right") - 1
        blocks = {number: self._block(number) for number in dict.fromkeys(numbers.tolist())}
        there = np.array([blocks[number] is not None for number in numbers.tolist()], dtype=bool)
        inside = (ids - self.blocks.first_row[numbers])[there].tolist()
        return there, [block for number in numbers.tolist() if (block := blocks[number]) is not None], inside

    def _block(self, number: int) -> Block | None:
        if number in self._damaged:
            return None
        try:
            return self._store.block(number)
        except DamagedInput as error:
            if not self._skip_damage:
                raise
            self._damaged.add(number)
            shard, offset = self.blocks.shards[self.blocks.shard[number]], int(self.blocks.offset[number])
            self.skipped.append(Skipped(self.corpus.fingerprint, shard, offset, str(error)))
            return None


def _cut(rows: Padded, length: int, parts: int) -> Padded:
    """Each row cut into `parts` rows of `length`; the last ones of a short row are shorter, or empty."""
    values = np.zeros((len(rows.values), parts * length), dtype=rows.values.dtype)
    values[:, : rows.values.shape[1]] = rows.values[:, : parts * length]
    lengths = np.clip(rows.lengths[:, None] - length * np.arange(parts), 0, length).ravel()
    return Padded(values.reshape(-1, length), lengths)


def _parts(ids: np.ndarray, parts: int) -> np.ndarray:
    """The numbers of the parts of the rows `ids`."""
    return np.repeat(ids, parts) * parts + np.tile(np.arange(parts), len(ids))


def _empty(rows: int, eos: int, beside: Examples | None = None) -> Examples:
    """Rows with only an EOS token as input, since attention to padding alone has no softmax, and no targets.

    They have the same optional arrays as `beside`.
    """
    mark = np.full((rows, 1), eos)
    optional = beside.optional if beside else {}
    return Examples(
        Padded(mark, np.ones(rows, dtype=np.int64)),
        Padded(mark, np.zeros(rows, dtype=np.int64)),
        **{name: np.zeros((rows, 1)[: array.ndim], dtype=array.dtype) for name, array in optional.items()},
    )
