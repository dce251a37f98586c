"""Finds the items of evaluation sets in texts by the words they share.

An item is in a document if one of its texts is: if any 13 successive words of it are also successive words of the
document, as for GPT-3 (Brown et al. 2020, appendix C). A text of 8 to 12 words must be there as a whole: GPT-3's n goes
from 13 down to 8 too, by the lengths of a set's items. Words consist of letters with their marks and of digits, in
lower case and NFKC. Where a script has no spaces, as many letters count as 13 words have on average (`text/words.py`).
GPT-3's authors cut out the match and its surroundings; here, the whole document is dropped, as for Dolma (Soldaini et
al. 2024).

Words are hashed 100 kB at a time. A table with a byte for each range of hashes, small enough for a core's cache, rules
out nearly every run of 13 words, and of the first 8 of a shorter text. The rest are looked up by hashes of 128 bits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from data_pipeline.decontamination.items import DecontaminationConfig
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
    """The n-grams of numbered items: all runs of 13 words of long texts, and shorter texts as a whole.

    `first`, `second`, `items` (n,): the two hashes of each n-gram, sorted, and an item that has it. Only those whose
    head, their first words, is likely to be in a text are looked up. `heads`: for each number of words of a head, the
    hashes of the heads; `more`: for each, how many words n-grams have after their heads.
    """

    def __init__(
        self,
        first: np.ndarray,
        second: np.ndarray,
        items: np.ndarray,
        heads: dict[int, np.ndarray],
        more: dict[int, list[int]],
    ):
        self._first, self._second, self._items, self._heads, self._more = first, second, items, heads, more
        self._likely = {head: _Likely(hashes) for head, hashes in heads.items()}

    @classmethod
    def of(cls, texts: Iterable[tuple[int, str]], config: DecontaminationConfig) -> "Ngrams":
        """The n-grams of the texts of numbered items; an item may have several texts."""
        tables = [np.zeros((0, 3), dtype=np.uint64)]
        heads: dict[int, list[np.ndarray]] = {}
        more: dict[int, set[int]] = {}
        for words in batches(texts, normalised(), config.ngram):
            ngram_stops, head_stops = words.stops(config.ngram), words.stops(config.shortest)
            long = np.flatnonzero(words.within(np.arange(len(ngram_stops)), ngram_stops))
            whole = [at for at, chunk in enumerate(words.chunks) if words.count[at] and not chunk.word]
            short, ends = words.first[whole], (words.first + words.count)[whole]
            enough = (ngram_stops[short] > ends) & (head_stops[short] <= ends)
            for head, runs, stops in (
                (config.ngram, long, ngram_stops[long]),
                (config.shortest, short[enough], ends[enough]),
            ):
                if len(runs):
                    hashes = (words.hashes(runs, stops, seed) for seed in (0, 1))
                    tables.append(np.stack([*hashes, words.positions[runs]], axis=1))
                    stops_of_heads = words.stops(head)[runs]
                    heads.setdefault(head, []).append(words.hashes(runs, stops_of_heads, 0))
                    more.setdefault(head, set()).update((stops - stops_of_heads).tolist())
        table = np.concatenate(tables)
        table[:, 2] >>= np.uint64(32)  # the number of the text
        table = table[np.lexsort(table.T[::-1])]
        table = table[np.append(True, (table[1:] != table[:-1]).any(axis=1))[: len(table)]]
        first, second, items = (np.ascontiguousarray(column) for column in table.T)
        distinct = {head: np.unique(np.concatenate(heads[head])) for head in sorted(heads)}
        return cls(first, second, items.astype(np.uint32), distinct, {head: sorted(more[head]) for head in distinct})

    @property
    def known(self) -> np.ndarray:
        """The items that can be found, ascending: those with a text that is long enough."""
        return np.unique(self._items)

    def matches(self, texts: Iterable[tuple[int, str]]) -> Iterator[Match]:
        """Every run of words of numbered texts that is an n-gram of items."""
        for words in batches(texts, normalised(), max(self._heads, default=1)):
            for head, more in self._more.items():
                runs = self._likely[head].among(words.runs(head, 0))
                stops = words.stops(head)[runs]
                for number in more:
                    inside = words.within(runs, stops + number)
                    yield from self._matches(words, runs[inside], stops[inside] + number)

    def _matches(self, words: Words, runs: np.ndarray, stops: np.ndarray) -> Iterator[Match]:
        """Of the runs from the words `runs` to those before `stops`, those that are n-grams of items."""
        hashes = words.hashes(runs, stops, 0)
        found = np.searchsorted(self._first, hashes)
        equal = np.flatnonzero(self._first.take(found, mode="clip") == hashes)
        if not len(equal):
            return
        runs, stops, found = runs[equal], stops[equal], found[equal]
        until = np.searchsorted(self._first, hashes[equal], "right")
        seconds = words.hashes(runs, stops, 1)
        for run, stop, second, *bounds in zip(runs.tolist(), stops.tolist(), seconds, found, until, strict=True):
            same = slice(*bounds)
            if items := self._items[same][self._second[same] == second].tolist():
                text = words.text[words.starts[run] : words.ends[stop - 1]]
                position = int(words.positions[run])
                yield Match(position >> 32, position & 0xFFFFFFFF, items, " ".join(text.split()))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All that `from_arrays` needs."""
        more = [(head, number) for head, numbers in self._more.items() for number in numbers]
        arrays = {"first": self._first, "second": self._second, "items": self._items}
        arrays["more"] = np.array(more, dtype=np.int64).reshape(-1, 2)
        return arrays | {f"heads.{head}": hashes for head, hashes in self._heads.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Ngrams":
        more: dict[int, list[int]] = {}
        for head, number in arrays["more"].tolist():
            more.setdefault(head, []).append(number)
        heads = {head: arrays[f"heads.{head}"] for head in more}
        return cls(arrays["first"], arrays["second"], arrays["items"], heads, more)


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
