"""Blocks of one split, read by byte offset. Local blocks are memory-mapped; remote ones go through the disk cache."""

from functools import lru_cache, partial

import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.blocks import Block, decode_block
from data_pipeline.foundation import stores
from data_pipeline.foundation.disk_cache import DiskCache, mapped_file
from data_pipeline.foundation.errors import DamagedInput, UserError, one_line

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
