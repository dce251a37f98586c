"""Reads rows of one split of a corpus by their ids and applies the objective."""

import hashlib
from functools import lru_cache

import numpy as np

from data_pipeline.errors import DamagedInput
from data_pipeline.manifest import Corpus
from data_pipeline.objectives import Examples, Objective, Padded, placed
from data_pipeline.shards import Block, block_rows, decode_block, noise_keys


class Reader:
    """Rows of `split`, by id. Blocks are read by byte offset, checked against their sha256, and `cached` are kept.

    `objective` overrides the corpus's where noise is applied at load.
    """

    def __init__(self, corpus: Corpus, split: str, objective: Objective | None = None, cached: int = 4):
        self.corpus, self.split = corpus, split
        self.blocks = corpus.blocks(split)
        self._objective = objective or corpus.objective
        self._vocabulary = corpus.tokenizer.vocabulary
        self._cached_block = lru_cache(maxsize=cached)(self._read_block)

    def examples(self, rows: np.ndarray | list[int], epochs: np.ndarray | int) -> Examples:
        """Inputs and targets of the rows with these ids (n,).

        `epochs`, one number or (n,), choose the noise where it is applied at load; noise in the shard is what it is.
        Raises DamagedInput naming the shard where a block's checksum differs.
        """
        ids = np.asarray(rows, dtype=np.int64)
        if self.corpus.applied_at_build:
            return Examples(
                self._gather(ids, "inputs", "input_offsets"), self._gather(ids, "targets", "target_offsets")
            )
        keys = noise_keys(self.corpus.seed, self.split, epochs, ids)
        return self._objective.apply(self._gather(ids, "tokens", "row_offsets"), keys, self._vocabulary, {})

    def _gather(self, ids: np.ndarray, name: str, offsets: str) -> Padded:
        places = np.searchsorted(self.blocks.first_row, ids, side="right") - 1
        parts = []
        for place in np.unique(places).tolist():
            chosen = np.flatnonzero(places == place)
            inside = ids[chosen] - self.blocks.first_row[place]
            parts.append((chosen, block_rows(self._cached_block(place), name, offsets, inside)))
        return placed(parts, self._vocabulary.pad)

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
