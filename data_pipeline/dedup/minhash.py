"""Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing: one document of each cluster is kept.

A signature is cut into bands. Documents that share a whole band are near-duplicates, as in the pipelines of GPT-3 and
datatrove. The connected components of these pairs are the clusters.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator
from rensa import RMinHash

from data_pipeline.base.config_file import Section
from data_pipeline.base.errors import FailedError
from data_pipeline.base.formatting import human_size
from data_pipeline.base.processes import available_memory
from data_pipeline.base.safetensors_file import Arrays, write_arrays
from data_pipeline.dedup.keys import decide, hash64, pairs_within, write_duplicates
from data_pipeline.dedup.step import KeyStep
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names
from data_pipeline.engine.work_units import Result
from data_pipeline.text.document import Document
from data_pipeline.text.words import LONGEST_NGRAM, normalised

_SEED = 1
_SIGNATURES = RMinHash.digests_from_token_sets
_MOST_VALUES = 1 << 14  # hash values of a signature; FineWeb has 112
_LEAST_PENDING = 4_000_000
MEMORY_PER_DOCUMENT = 160  # bytes for each document with near-duplicates
_WORD = re.compile("[a-z0-9]+")


class MinHashConfig(Section):
    """Near-duplicates by the estimated Jaccard similarity of their sets of n-grams."""

    bands: PositiveInt = 14
    """Number of bands of a signature. Documents that share one are near-duplicates. datatrove: 14, as for FineWeb."""
    rows: PositiveInt = 8
    """Number of hash values of a band. More find fewer pairs: 14 bands of 8 find 92 % of the pairs of similarity 0.8,
    9 bands of 13 find 40 %."""
    ngram: int = Field(5, gt=0, le=LONGEST_NGRAM)
    """Number of words of an n-gram."""

    @model_validator(mode="after")
    def _signatures_are_short(self) -> "MinHashConfig":
        if (values := self.bands * self.rows) > _MOST_VALUES:
            found = f"{values:,} hash values of each document"
            raise ValueError(f"bands × rows: {found}, expected at most {_MOST_VALUES:,}")
        return self


class NearDuplicates(MinHashConfig, KeyStep):
    """Of a cluster, the document with the smallest id is kept. Documents without words and text-to-text pairs stay.

    Documents of similarity s share a band with probability 1 - (1 - s^rows)^bands.
    """

    step: Literal["minhash"] = "minhash"

    version = 3
    counted_as = "near_duplicate"
    order = 0
    clusters = True

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        shingles = set() if document.target else ngrams(document.text, self.ngram)
        if not shingles:
            return
        bands, rows = self.bands, self.rows
        (signature,) = _SIGNATURES([sorted(shingles)], bands * rows, _SEED)
        for band in range(bands):
            values = signature[band * rows : (band + 1) * rows]
            yield band, (hash64(f"{band}/{','.join(map(str, values))}"),)

    def decide(self, table: np.ndarray, units: np.ndarray, path: Path, count: int) -> None:
        """Writes the distinct pairs (n, 2) of near-duplicates, as unit << 32 | document."""
        _, duplicates, kept = decide(table, self.group, units)
        documents = units << np.uint64(32) | table[:, -1] >> np.uint64(32)
        pairs = np.unique(np.stack([documents[duplicates], documents[kept]], axis=1), axis=0)
        write_arrays(path, {"pairs": pairs})


def ngrams(text: str, length: int) -> set[str]:
    """ "To be, or not" in 3 words  ->  {"to be or", "be or not"}. A shorter text is one n-gram.

    Words are split as for decontamination (`text/words.py`): an n-gram in a script without spaces has as many letters
    as `length` words have on average.
    """
    if text.isascii():
        words = _WORD.findall(text.lower())
        stops: Iterable[int] = range(length, max(length, len(words)) + 1)
    else:
        text = f"\n{normalised().prepared(text).lower()}\n"
        found = normalised().scan(text)
        words = [text[start:end] for start, end in zip(found.starts.tolist(), found.ends.tolist(), strict=True)]
        stops = [stop for stop in found.stops(length).tolist() if stop <= len(words)] or [len(words)]
    return {" ".join(words[start:stop]) for start, stop in enumerate(stops)} - {""}


@dataclass(frozen=True)
class ClustersSpec:
    """`files`: the file that lists the files of keys of all `units` (`write_names`). `pairs`: the buckets' files."""

    files: str
    units: int
    pairs: list[str]
    output: str


def find_clusters(context: Context, spec: ClustersSpec) -> Result:
    """Writes all documents of each connected component of the pairs as duplicates, but the one with the smallest id."""
    store, clusters = context.store, Clusters()
    for name in spec.pairs:
        clusters.join(Arrays(store, name)["pairs"])
    for pairs in pairs_within(store, read_names(store, spec.files)):
        clusters.join(pairs)
    documents, first = clusters.members()
    duplicates, kept = documents[documents != first], first[documents != first]
    places = (duplicates & np.uint64(2**32 - 1)) << np.uint64(32)
    with store.put(spec.output) as path:
        write_duplicates(path, duplicates >> np.uint64(32), places, spec.units, kept)
    return Result()


class Clusters:
    """Joins batches of pairs of documents into clusters. Memory grows with the documents, not with the pairs.

    The object holds the first document of each document's cluster, and pending pairs. Once there are as many pending
    pairs as documents, they are merged. So the work grows with pairs × log(documents).
    """

    def __init__(self, least_pending: int = _LEAST_PENDING):
        self._least_pending = least_pending
        self._forest = np.zeros((0, 2), dtype=np.uint64)  # (document, first document of its cluster)
        self._pending: list[np.ndarray] = []
        self._waiting = 0

    def join(self, pairs: np.ndarray) -> None:
        """Puts both documents of each pair into one cluster. `pairs`: (n, 2) uint64."""
        self._waiting += len(pairs)
        self._pending.append(pairs)
        if self._waiting > max(self._least_pending, len(self._forest)):
            self._settle()

    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """(documents (n,) in any pair, ascending; the smallest document (n,) of each one's cluster)."""
        self._settle()
        return self._forest[:, 0], self._forest[:, 1]

    def _settle(self) -> None:
        from scipy import sparse  # 180 ms and 27 MB, for near-duplicates alone
        from scipy.sparse import csgraph

        pairs = np.concatenate([self._forest, *self._pending])
        self._forest, self._pending, self._waiting = pairs[:0], [], 0
        documents = np.unique(pairs)
        needed, free = MEMORY_PER_DOCUMENT * len(documents) - documents.nbytes - pairs.nbytes, available_memory()
        if needed > free:
            raise FailedError(
                f"dedup.minhash: the clusters of {len(documents):,} documents take {human_size(needed)} more memory, "
                f"and {human_size(free)} are free; raise dedup.minhash.rows, or use a machine with more memory"
            )
        ends = np.searchsorted(documents, pairs).astype(np.int32 if len(documents) < 2**31 else np.int64)
        del pairs  # they may take much memory
        ones = np.ones(len(ends), dtype=bool)
        graph = sparse.coo_array((ones, (ends[:, 0], ends[:, 1])), shape=(len(documents),) * 2)
        del ends
        _, cluster = csgraph.connected_components(graph, directed=False)
        first = documents[np.unique(cluster, return_index=True)[1]]  # documents ascend: the first is the smallest
        self._forest = np.stack([documents, first[cluster]], axis=1)
