"""Keeps one copy of equal substrings of 50 words or more (Lee et al. 2022, "Deduplicating Training Data Makes Language
Models Better", arXiv:2107.06499, section 4.1).

The paper finds equal substrings in a suffix array of all token ids. Here, two steps compare keys, and find the same:
each run of 50 words that occurs twice.

1. Anchors. The anchor of a run of 50 words is the run of 25 words inside it with the smallest hash (winnowing,
   Schleimer et al. 2003). Equal runs of 50 words have equal anchors. Neighbouring runs mostly share an anchor: about 2
   of 27 words begin one. Each anchor is a key; the second step gets the positions of the anchors that occur twice.
2. Substrings. A run of 50 words can occur twice only if its anchor does, so only such runs become keys. Hashes of 128
   bits are compared.

Words are separated by white space, since the tokenizer isn't trained yet. A word is about 1.3 tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from data_pipeline.base.config_file import Section
from data_pipeline.dedup.keys import Keys, decide, write_duplicates
from data_pipeline.dedup.step import KeyStep, ShorteningStep, rank
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.step import Step
from data_pipeline.text.words import LONGEST_NGRAM, Words, batches, bounds, exact

_UPPER = np.uint64(2**64 - 2**32)


class SubstringsConfig(Section):
    """Text that occurs several times, inside any text."""

    words: int = Field(50, ge=2, le=LONGEST_NGRAM)
    """Minimum length of a repeat, in words between white space. A word is about 1.3 tokens of English."""


class Anchors(SubstringsConfig, KeyStep):
    """Finds the anchors of all runs of `words` words that occur twice, where `EqualSubstrings` then looks."""

    step: Literal["anchors"] = "anchors"

    version = 4
    order = 0
    drops = False

    def gather(self, documents: Iterable[tuple[int, Document]], keys: Keys, repeated: np.ndarray | None = None) -> None:
        for table in self.tables(documents):
            keys.extend(table)

    def decide(self, table: np.ndarray, units: np.ndarray, path: Path, count: int) -> None:
        """Writes the positions of all anchors that occur more than once, in the form of duplicates."""
        _, duplicates, kept = decide(table, self.group, units)
        repeated = np.unique(np.concatenate([duplicates, kept]))
        write_duplicates(path, units[repeated], table[repeated, -1], count)

    def tables(self, documents: Iterable[tuple[int, Document]]) -> Iterator[np.ndarray]:
        """Tables of keys (n, 2) of numbered documents: hash, position."""
        texts = ((number, document.text) for number, document in documents if not document.target)
        for words in batches(texts, exact(), self.words):
            hashes, _, anchors = anchored(words, self.words)
            once = anchors[np.diff(anchors, prepend=-1) != 0]
            yield np.stack([hashes[once], words.positions[once]], axis=1)


class EqualSubstrings(SubstringsConfig, ShorteningStep):
    """The document with the smallest md5 of its URL keeps the first copy of a run of `words` words.

    All words of a duplicate are dropped, also those that other runs share. Every word still stays somewhere: in the
    kept run, which is in a document with a smaller md5 or earlier in the same document. Case and punctuation count,
    white space between words doesn't.
    """

    step: Literal["substrings"] = "substrings"

    version = 4
    group = 2
    bytes_of_keys = 22  # a run may begin at each word
    bytes_of_duplicates = 20

    @property
    def expanded(self) -> Sequence[Step]:
        return [Anchors(words=self.words), self]

    def gather(self, documents: Iterable[tuple[int, Document]], keys: Keys, repeated: np.ndarray | None = None) -> None:
        for table in self.tables(documents, repeated):
            keys.extend(table)

    def tables(
        self, documents: Iterable[tuple[int, Document]], repeated: np.ndarray | None = None
    ) -> Iterator[np.ndarray]:
        """Tables of keys (n, 4) of numbered documents: two hashes, rank of the document, position.

        `repeated`: the sorted positions of the anchors that occur more than once; only runs with one become keys.
        """
        ranks: dict[int, int] = {}
        for words in batches(_texts(documents, ranks, repeated), exact(), self.words):
            _, runs, anchors = anchored(words, self.words)
            if repeated is not None:
                runs = runs[_among(words.positions[anchors], repeated)]
            if len(runs):
                chunk_ranks = np.array([ranks[chunk.number] for chunk in words.chunks], dtype=np.uint64)
                hashes = (words.runs(self.words, seed)[runs] for seed in (0, 1))
                yield np.stack([*hashes, chunk_ranks[words.chunk[runs]], words.positions[runs]], axis=1)

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        for table in self.tables([(0, document)]):
            for *words, item in table.tolist():
                yield item, tuple(words)

    def without(self, document: Document, duplicates: list[int], tally: Tally) -> str | Dropped:
        """ "One two three four." without [1], runs of 2 words  ->  "One four." """
        text = document.text
        if not duplicates:
            return text
        starts, ends = bounds(text, exact())
        kept, at = "", 0
        for first, stop in self.regions(duplicates):
            start, end = int(starts[first]), int(ends[stop - 1])
            tally.span("duplicate_substring", text[start:end])
            tally.substring_words += stop - first
            kept, at = _concatenated(kept, text[at:start]), end
        return self.enough(_concatenated(kept, text[at:]).strip(), document)

    def regions(self, duplicates: list[int]) -> list[tuple[int, int]]:
        """(first word, end) of each region that the runs `duplicates` cover.

        [3, 4, 5, 90] of 50 words  ->  [(3, 55), (90, 140)]
        """
        regions: list[tuple[int, int]] = []
        for first in duplicates:
            if regions and first <= regions[-1][1]:
                regions[-1] = regions[-1][0], first + self.words
            else:
                regions.append((first, first + self.words))
        return regions


def _texts(
    documents: Iterable[tuple[int, Document]], ranks: dict[int, int], repeated: np.ndarray | None
) -> Iterator[tuple[int, str]]:
    """The numbered texts that may have repeated runs. Puts the rank of each into `ranks`."""
    known = None if repeated is None else set(np.unique(repeated >> np.uint64(32)).tolist())
    for number, document in documents:
        if not document.target and (known is None or number in known):
            ranks[number] = rank(document)
            yield number, document.text


def anchored(words: Words, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hashes of the runs of length // 2 words, runs of `length` words (m,), the anchor (m,) of each).

    Runs and anchors are the numbers of their first words. Of equal hashes, the first is the anchor.
    """
    short = length // 2
    hashes = words.runs(short, seed=0)
    if len(words.starts) < length:
        return hashes, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # The upper half of a hash decides, then the position: so equal runs have equal anchors in any batch.
    ordered = hashes & _UPPER | np.arange(len(hashes), dtype=np.uint64)
    anchors = (_smallest(ordered, length - short + 1) & ~_UPPER).astype(np.int64)
    runs = np.flatnonzero(words.within(np.arange(len(words.starts)), words.stops(length)))
    return hashes, runs, anchors[runs]


def _smallest(values: np.ndarray, width: int) -> np.ndarray:
    """(n - width + 1,): the smallest of each `width` successive values. [3, 1, 2, 4], 2  ->  [1, 1, 2]"""
    reach = 1
    while 2 * reach <= width:
        values = np.minimum(values[:-reach], values[reach:])
        reach *= 2
    rest = width - reach
    return np.minimum(values[:-rest], values[rest:]) if rest else values


def _among(positions: np.ndarray, known: np.ndarray) -> np.ndarray:
    """(n,) bool: which of `positions` are among the sorted positions `known`."""
    if not len(known):
        return np.zeros(len(positions), dtype=bool)
    return known[np.minimum(np.searchsorted(known, positions), len(known) - 1)] == positions


def _concatenated(left: str, right: str) -> str:
    """Two texts between which words were removed, with the larger of the two breaks around these words."""
    if not left:
        return right
    before, after = left.rstrip(), right.lstrip()
    spaces = [left[len(before) :], right[: len(right) - len(after)]]
    return before + max(spaces, key=lambda space: (space.count("\n"), len(space) > 0)) + after
