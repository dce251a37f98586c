"""Reads rows of one split of a corpus by their ids and applies the objective."""

import hashlib
from functools import lru_cache

import numpy as np

from data_pipeline.errors import DamagedInput
from data_pipeline.manifest import Corpus
from data_pipeline.objectives.span_corruption import SpanCorruption
from data_pipeline.shards import Block, block_rows, corrupt, decode_block, noise_keys
from data_pipeline.tokenizer import PAD


class Reader:
    """Rows of `split`, by id. Blocks are read by byte offset, checked against their sha256, and `cached` are kept.

    `objective` overrides the corpus's where noise is applied at load.
    """

    def __init__(self, corpus: Corpus, split: str, objective: SpanCorruption | None = None, cached: int = 4):
        self.corpus, self.split = corpus, split
        self.blocks = corpus.blocks(split)
        self._objective = objective or corpus.objective
        self._first_sentinel = corpus.tokenizer.first_sentinel
        self._cached_block = lru_cache(maxsize=cached)(self._read_block)

    def examples(self, rows: np.ndarray | list[int], epochs: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs (n, inputs), targets (n, targets)) of the rows with these ids (n,), shorter ones padded with PAD.

        `epochs`, one number or (n,), choose the noise where it is applied at load; noise in the shard is what it is.
        Raises DamagedInput naming the shard where a block's checksum differs.
        """
        ids = np.asarray(rows, dtype=np.int64)
        if self.corpus.applied_at_build:
            return self._gather(ids, "inputs", "input_offsets")[0], self._gather(ids, "targets", "target_offsets")[0]
        tokens, lengths = self._gather(ids, "tokens", "row_offsets")
        keys = noise_keys(self.corpus.seed, self.split, epochs, ids)
        return corrupt(self._objective, tokens, lengths, keys, self._first_sentinel)

    def _gather(self, ids: np.ndarray, name: str, offsets: str) -> tuple[np.ndarray, np.ndarray]:
        """((n, longest) rows padded with PAD, (n,) their lengths)."""
        places = np.searchsorted(self.blocks.first_row, ids, side="right") - 1
        parts = []
        for place in np.unique(places).tolist():
            chosen = np.flatnonzero(places == place)
            inside = ids[chosen] - self.blocks.first_row[place]
            parts.append((chosen, *block_rows(self._cached_block(place), name, offsets, inside)))
        longest = max(rows.shape[1] for _, rows, _ in parts)
        out = np.full((len(ids), longest), PAD, dtype=parts[0][1].dtype)
        lengths = np.zeros(len(ids), dtype=np.int64)
        for chosen, rows, own in parts:
            out[chosen, : rows.shape[1]] = rows
            lengths[chosen] = own
        return out, lengths

    def _read_block(self, place: int) -> Block:
        shard, offset = str(self.blocks.shard[place]), int(self.blocks.offset[place])
        path = self.corpus.directory / shard
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(int(self.blocks.length[place]))
        except OSError as error:
            raise DamagedInput(str(path), f"byte {offset}", error.strerror or "can't be read") from None
        if hashlib.sha256(content).hexdigest() != self.blocks.sha256[place]:
            raise DamagedInput(str(path), f"byte {offset}", "sha256 differs; data-pipeline verify lists all damage")
        return decode_block(content)
