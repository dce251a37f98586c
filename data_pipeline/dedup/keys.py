"""Keys in place of text: sorted files of them, and who of the holders of equal keys is the one to keep it.

A key is a row of 64-bit words: first the group (a hash, equal for duplicates), then an order (the smallest holder keeps
its copy), last its place, document << 32 | item, in its unit. A file of keys is sorted by hash, with the start of each
4,096th of all hashes: a bucket, a range of hashes, is one slice of every file, and a unit's files don't multiply with
the number of buckets. What a bucket decides is one file of losers, sorted by unit.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from data_pipeline.foundation.atomic import atomic_path
from data_pipeline.foundation.safetensors_file import os_errors

SLOTS = 4096
NOBODY = 2**32 - 1  # in place of a document: one that competes, but isn't there to lose


def hash64(text: str) -> int:
    """The first 8 bytes of md5: numbers in the order of the hexadecimal digests."""
    return int.from_bytes(hashlib.md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()[:8], "big")


class Keys:
    """The keys of one unit, collected in the order of its documents. `group`, `order`: how many words of each."""

    def __init__(self, group: int, order: int):
        self._group, self._width = group, group + order + 1
        self._words = array("Q")

    def add(self, document: int, item: int, words: Iterable[int]) -> None:
        """`words`: the group's, then the order's."""
        self._words.extend(words)
        self._words.append(document << 32 | item)

    def write(self, path: Path, gone: Sequence[int] = ()) -> int:
        """Writes them, and which documents are `gone`; returns how many.

        Duplicates inside the unit are decided here: one key of each goes on.
        """
        table = np.frombuffer(self._words, dtype=np.uint64).reshape(-1, self._width)
        kept, losers, winners = decide(table, self._group)
        hashes = table[kept, 0]
        slots = np.searchsorted(hashes, np.arange(SLOTS, dtype=np.uint64) * np.uint64(2**64 // SLOTS))
        pairs = np.stack([table[losers, -1], table[winners, -1]], axis=1)
        arrays = {
            "keys": table[kept],
            "slots": np.append(slots, len(kept)).astype(np.int64),
            "losers": pairs[pairs[:, 0] >> np.uint64(32) != NOBODY],
            "gone": np.array(gone, dtype=np.int64),
        }
        _save(arrays, path)
        return len(kept)


def decide(table: np.ndarray, group: int, units: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kept (k,), losers (n - k,), winner of each loser (n - k,)): rows of `table` (n, words), kept ones by group.

    Among equal groups the smallest by order, unit and place is kept:
    [[7, 2, place 0], [7, 1, place 9], [8, 5, place 3]] with a group of one word  ->  [1, 2], [0], [1]
    """
    columns = [table[:, column] for column in range(table.shape[1])]
    if units is not None:
        columns.insert(-1, units)
    by_group = np.lexsort(columns[::-1])
    groups = table[by_group, :group]
    first = np.ones(len(table), dtype=bool)
    first[1:] = (groups[1:] != groups[:-1]).any(axis=1)
    kept = by_group[first]
    return kept, by_group[~first], kept[np.cumsum(first)[~first] - 1]


@dataclass(frozen=True)
class KeyBucket:
    """A range of hashes, `number` of `count`, a power of two."""

    number: int
    count: int

    @staticmethod
    def enough(keys: int, keys_per_bucket: int) -> int:
        """How many buckets `keys` need: it follows from the input, not from who works."""
        return min(SLOTS, 1 << max(0, -(-keys // keys_per_bucket) - 1).bit_length())

    def read(self, corpus: Path, files: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(keys (n, words), number of the unit of each (n,)): this bucket's slice of every file."""
        size = SLOTS // self.count
        tables, counts = [], []
        for name in files:
            with safe_open(corpus / name, "numpy") as file:
                slots = file.get_slice("slots")
                start, stop = (int(slots[at : at + 1][0]) for at in (self.number * size, (self.number + 1) * size))
                keys = file.get_slice("keys")
                tables.append(keys[start:stop] if stop > start else np.zeros((0, keys.get_shape()[1]), np.uint64))
                counts.append(stop - start)
        return np.concatenate(tables), np.repeat(np.arange(len(files), dtype=np.uint64), counts)


def write_losers(path: Path, units: np.ndarray, places: np.ndarray, count: int) -> int:
    """Writes the losing `places` (n,) of `units` (n,), numbers below `count`, by unit; returns how many."""
    there = places >> np.uint64(32) != NOBODY
    units, places = units[there], places[there]
    order = np.lexsort((places, units))
    starts = np.searchsorted(units[order], np.arange(count + 1, dtype=np.uint64))
    _save({"losers": places[order], "starts": starts.astype(np.int64)}, path)
    return len(places)


def read_losers(corpus: Path, own: str | None, decided: Sequence[str], unit: int) -> dict[int, list[int]]:
    """Of one unit: the losing items of each document, from the unit's `own` keys and every file `decided`."""
    found = [read_own_losers(corpus, own)[:, 0]] if own else []
    for name in decided:
        with safe_open(corpus / name, "numpy") as file:
            start, stop = file.get_slice("starts")[unit : unit + 2].tolist()
            if stop > start:
                found.append(file.get_slice("losers")[start:stop])
    losers: dict[int, list[int]] = {}
    if found:
        for place in np.unique(np.concatenate(found)).tolist():
            losers.setdefault(place >> 32, []).append(place & 0xFFFFFFFF)
    return losers


def read_own_losers(corpus: Path, name: str) -> np.ndarray:
    """(n, 2): places of what lost inside a unit, and of what it lost to."""
    with safe_open(corpus / name, "numpy") as file:
        return file.get_tensor("losers")


def read_gone(corpus: Path, name: str) -> set[int]:
    """Documents that the steps before these keys have dropped."""
    with safe_open(corpus / name, "numpy") as file:
        return set(file.get_tensor("gone").tolist())


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    with atomic_path(path) as temporary, os_errors():
        save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, temporary)
