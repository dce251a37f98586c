"""Finds the items of evaluation sets in texts by the words they share.

An item is in a document if one of its texts is: if any 13 successive words of it are also successive words of the
document, as for GPT-3 (Brown et al. 2020, appendix C). A text of 8 to 12 words must be there as a whole: GPT-3's n goes
from 13 down to 8 too, by the lengths of a set's items. Words consist of letters and digits, in lower case. GPT-3's
authors cut out the match and its surroundings; here, the whole document is dropped, as for Dolma (Soldaini et al.
2024).

Words are hashed 100 kB at a time. A table with a byte for each range of hashes, small enough for a cache, tells that
nearly no run of 13 words, or of the first 8 of a shorter text, is in any set. The others are looked up by hashes of 128
bits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from data_pipeline.decontamination.config import DecontaminationConfig
from data_pipeline.text.words import Words, batches, normalised

_SLOTS_PER_NGRAM, _FEWEST_BITS, _MOST_BITS = 32, 16, 25  # of the table


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

    `first`, `second`, `items` (n,): the two hashes of each n-gram, sorted, and an item that has it. Only those whose
    head, their first words, is likely to be in a text are looked up. `lengths`: for each number of words of a head, the
    numbers of words of the n-grams that begin with it; `heads`: for each, the hashes of the heads.
    """

    def __init__(
        self,
        first: np.ndarray,
        second: np.ndarray,
        items: np.ndarray,
        heads: dict[int, np.ndarray],
        lengths: dict[int, list[int]],
    ):
        self._first, self._second, self._items, self._heads, self._lengths = first, second, items, heads, lengths
        self._likely = {head: _Likely(hashes) for head, hashes in heads.items()}

    @classmethod
    def of(cls, texts: Iterable[tuple[int, str]], config: DecontaminationConfig) -> "Ngrams":
        """The n-grams of the texts of numbered items; an item may have several texts."""
        tables = [np.zeros((0, 3), dtype=np.uint64)]
        heads: dict[int, list[np.ndarray]] = {}
        lengths: dict[int, set[int]] = {}
        for words in batches(texts, normalised(), config.ngram - 1):
            for length in np.unique(np.minimum(words.count, config.ngram)).tolist():
                if length < config.shortest:
                    continue
                head = length if length == config.ngram else config.shortest
                runs = words.first[words.count == length]
                if length == config.ngram:
                    runs = words.within(np.arange(len(words.starts)), length)
                hashes = (words.some_runs(runs, length, seed) for seed in (0, 1))
                tables.append(np.stack([*hashes, words.places[runs]], axis=1))
                heads.setdefault(head, []).append(words.some_runs(runs, head, 0))
                lengths.setdefault(head, set()).add(length)
        table = np.concatenate(tables)
        table[:, 2] >>= np.uint64(32)  # of a place, the number of the text
        table = table[np.lexsort(table.T[::-1])]
        table = table[np.append(True, (table[1:] != table[:-1]).any(axis=1))[: len(table)]]
        first, second, items = (np.ascontiguousarray(column) for column in table.T)
        distinct = {head: np.unique(np.concatenate(heads[head])) for head in sorted(heads)}
        return cls(first, second, items.astype(np.uint32), distinct, {head: sorted(lengths[head]) for head in distinct})

    @property
    def known(self) -> np.ndarray:
        """The items that can be found, ascending: those with a text that is long enough."""
        return np.unique(self._items)

    def matches(self, texts: Iterable[tuple[int, str]]) -> Iterator[Match]:
        """Every run of words of numbered texts that is an n-gram of items."""
        longest = max((length for lengths in self._lengths.values() for length in lengths), default=1)
        for words in batches(texts, normalised(), longest - 1):
            for head, lengths in self._lengths.items():
                likely = self._likely[head].among(words.runs(head, 0))
                for length in lengths:
                    yield from self._matches(words, words.within(likely, length), length)

    def _matches(self, words: Words, runs: np.ndarray, length: int) -> Iterator[Match]:
        """The runs of `length` words, of those that begin with the words `runs`, that are n-grams of items."""
        hashes = words.some_runs(runs, length, 0)
        starts = np.searchsorted(self._first, hashes)
        equal = np.flatnonzero(self._first.take(starts, mode="clip") == hashes)
        if not len(equal):
            return
        runs, starts = runs[equal], starts[equal]
        stops = np.searchsorted(self._first, hashes[equal], "right")
        seconds = words.some_runs(runs, length, 1)
        for run, second, start, stop in zip(runs.tolist(), seconds, starts.tolist(), stops.tolist(), strict=True):
            if items := self._items[start:stop][self._second[start:stop] == second].tolist():
                text = words.text[words.starts[run] : words.ends[run + length - 1]]
                place = int(words.places[run])
                yield Match(place >> 32, place & 0xFFFFFFFF, items, " ".join(text.split()))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All that `from_arrays` needs."""
        lengths = [(head, length) for head, own in self._lengths.items() for length in own]
        arrays = {"first": self._first, "second": self._second, "items": self._items}
        arrays["lengths"] = np.array(lengths, dtype=np.int64).reshape(-1, 2)
        return arrays | {f"heads.{head}": hashes for head, hashes in self._heads.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Ngrams":
        lengths: dict[int, list[int]] = {}
        for head, length in arrays["lengths"].tolist():
            lengths.setdefault(head, []).append(length)
        heads = {head: arrays[f"heads.{head}"] for head in lengths}
        return cls(arrays["first"], arrays["second"], arrays["items"], heads, lengths)


class _Likely:
    """A table with a byte for each range of hashes: whether any of `hashes` is in it."""

    def __init__(self, hashes: np.ndarray):
        bits = min(_MOST_BITS, max(_FEWEST_BITS, (_SLOTS_PER_NGRAM * len(hashes)).bit_length()))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, dtype=bool)
        self._table[self._slots(hashes)] = True

    def among(self, hashes: np.ndarray) -> np.ndarray:
        """(k,): the numbers of those of `hashes` (n,) that are in the table; few of the others are returned too."""
        return np.flatnonzero(self._table.take(self._slots(hashes), mode="clip"))

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> self._shift).view(np.int64)
