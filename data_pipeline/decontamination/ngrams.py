"""Finds the items of evaluation sets in texts by the words they share.

An item is in a document if one of its texts is: if any 13 successive words of it are also successive words of the
document, as for GPT-3 (Brown et al. 2020, appendix C). A text of 8 to 12 words must be there as a whole: GPT-3's n goes
from 13 down to 8 too, by the lengths of a set's items. Words consist of letters and digits, in lower case. GPT-3's
authors cut out the match and its surroundings; here, the whole document is dropped, as for Dolma (Soldaini et al.
2024).

Words are hashed 100 kB at a time. A table with a byte for each range of hashes, small enough for a cache, tells that
nearly all runs of words aren't in any set. The others are looked up by hashes of 128 bits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from data_pipeline.decontamination.config import DecontaminationConfig
from data_pipeline.text.words import Words, batches, normalised

_SLOTS_PER_NGRAM, _FEWEST_BITS, _MOST_BITS = 16, 16, 26  # of the table


@dataclass(frozen=True)
class Match:
    """A run of words of text `number`, from the word `word`, that is in the items `items`: the words, as the text has
    them."""

    number: int
    word: int
    items: list[int]
    words: str


class Ngrams:
    """The n-grams of numbered items.

    `first`, `second` (n,): their two hashes, sorted; `items` (n,): the item of each; `lengths`: the numbers of words
    that they have.
    """

    def __init__(self, first: np.ndarray, second: np.ndarray, items: np.ndarray, lengths: list[int]):
        self._first, self._second, self._items, self._lengths = first, second, items, lengths
        bits = min(_MOST_BITS, max(_FEWEST_BITS, (_SLOTS_PER_NGRAM * len(items)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._likely = np.zeros(1 << bits, dtype=bool)
        self._likely[self._slots(first)] = True

    @classmethod
    def of(cls, texts: Iterable[tuple[int, str]], config: DecontaminationConfig) -> "Ngrams":
        """The n-grams of the texts of numbered items; an item may have several texts."""
        tables = [np.zeros((0, 3), dtype=np.uint64)]
        lengths: set[int] = set()
        for words in batches(texts, normalised(), config.ngram - 1):
            for length in np.unique(np.minimum(words.count, config.ngram)).tolist():
                if length < config.shortest:
                    continue
                runs = words.first[words.count == length]
                if length == config.ngram:
                    runs = words.within(np.arange(len(words.starts) - length + 1), length)
                columns = [words.runs(length, 0)[runs], words.runs(length, 1)[runs], words.places[runs]]
                tables.append(np.stack(columns, axis=1))
                lengths.add(length)
        table = np.concatenate(tables)
        table[:, 2] >>= np.uint64(32)  # of a place, the number of the text
        table = table[np.lexsort(table.T[::-1])]
        table = table[np.append(True, (table[1:] != table[:-1]).any(axis=1))[: len(table)]]
        first, second, items = (np.ascontiguousarray(column) for column in table.T)
        return cls(first, second, items.astype(np.uint32), sorted(lengths))

    @property
    def known(self) -> np.ndarray:
        """The items that can be found, ascending: those with a text that is long enough."""
        return np.unique(self._items)

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    def matches(self, texts: Iterable[tuple[int, str]]) -> Iterator[Match]:
        """Every run of words of numbered texts that is an n-gram of items."""
        for words in batches(texts, normalised(), max(self._lengths, default=1) - 1):
            for length in self._lengths:
                yield from self._matches(words, length)

    def _matches(self, words: Words, length: int) -> Iterator[Match]:
        hashes = words.runs(length, 0)
        likely = np.flatnonzero(self._likely.take(self._slots(hashes), mode="clip"))
        runs = words.within(likely, length)
        if not len(runs):
            return
        first, second = hashes[runs], words.runs(length, 1)[runs]
        starts, stops = (np.searchsorted(self._first, first, side).tolist() for side in ("left", "right"))
        for run, other, start, stop in zip(runs.tolist(), second, starts, stops, strict=True):
            if items := self._items[start:stop][self._second[start:stop] == other].tolist():
                text = words.text[words.starts[run] : words.ends[run + length - 1]]
                place = int(words.places[run])
                yield Match(place >> 32, place & 0xFFFFFFFF, items, " ".join(text.split()))

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> self._shift).view(np.int64)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All that `from_arrays` needs."""
        lengths = np.array(self._lengths, dtype=np.int64)
        return {"first": self._first, "second": self._second, "items": self._items, "lengths": lengths}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Ngrams":
        return cls(arrays["first"], arrays["second"], arrays["items"], arrays["lengths"].tolist())
