"""Blocks of one split, read by byte offset. Local blocks are memory-mapped; remote ones go through the disk cache."""

from functools import lru_cache

import fsspec
import numpy as np

from data_pipeline.corpus import Corpus
from data_pipeline.corpus.blocks import Block, decode_block
from data_pipeline.foundation.disk_cache import DiskCache, mapped_file
from data_pipeline.foundation.errors import DamagedInput

_ATTEMPTS = 3  # to read a remote block
_SHARDS_OPEN = 16


class BlockStore:
    """Blocks by number, each checked against its sha256 when first read. The last `cached` ones are kept.

    Blocks are views into the file. The operating system's page cache holds the bytes once for all ranks of a machine.
    """

    def __init__(self, corpus: Corpus, split: str, cached: int, cache_bytes: int):
        self.corpus = corpus
        self.index = corpus.blocks(split)
        self._cached = lru_cache(maxsize=cached)(self._read)
        self._mapped = lru_cache(maxsize=_SHARDS_OPEN)(mapped_file)
        self._cache = DiskCache(corpus.cache / "blocks", cache_bytes) if corpus.url and corpus.cache else None
        self._remote = fsspec.core.url_to_fs(corpus.url) if corpus.url else None
        self._checked = np.zeros(len(self.index.rows), dtype=bool)

    def __getitem__(self, place: int) -> Block:
        """Raises DamagedInput, which names shard and byte, if a block can't be read or its checksum differs."""
        return self._cached(place)

    def _read(self, place: int) -> Block:
        content = self._content(place)
        if not self._checked[place]:
            if not self.index.is_whole(place, content):
                raise self._damage(place, "sha256 differs; data-pipeline verify lists all damage")
            self._checked[place] = True
        return decode_block(content)

    def _content(self, place: int) -> memoryview:
        if self._cache is not None:
            return self._cache.get(self.index.sha256[place].tobytes().hex(), lambda: self._fetch(place))
        shard = self.index.shards[self.index.shard[place]]
        start, length = int(self.index.offset[place]), int(self.index.length[place])
        try:
            mapped = self._mapped(str(self.corpus.directory / shard))
        except OSError as error:
            raise self._damage(place, error.strerror or "can't be read") from None
        if len(mapped) < start + length:  # reading past the end would be a bus error
            raise self._damage(place, f"the file ends at byte {len(mapped)}")
        return mapped[start : start + length]

    def _fetch(self, place: int) -> bytes:
        assert self._remote is not None
        filesystem, root = self._remote
        shard = self.index.shards[self.index.shard[place]]
        start, length = int(self.index.offset[place]), int(self.index.length[place])
        for attempt in range(_ATTEMPTS):
            try:
                content = filesystem.cat_file(f"{root.rstrip('/')}/{shard}", start, start + length)
            except Exception as error:  # each file system raises its own errors
                if attempt == _ATTEMPTS - 1:
                    raise self._damage(place, f"can't be read: {' '.join(str(error).split())[:200]}") from None
            else:
                if self.index.is_whole(place, content):
                    return content
        raise self._damage(place, "sha256 differs")

    def _damage(self, place: int, reason: str) -> DamagedInput:
        shard = self.index.shards[self.index.shard[place]]
        where = self.corpus.url.rstrip("/") if self.corpus.url else str(self.corpus.directory)
        return DamagedInput(f"{where}/{shard}", f"byte {self.index.offset[place]}", reason)
