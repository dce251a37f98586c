"""Dedup keys: sorted files of keys, their partitions by hash, and the choice of the copy that is kept.

A key is a row of 64-bit words: the group (a hash, equal for duplicates), the order (the smallest keeps its copy), and
the position in its unit, document << 32 | item. A unit writes one file of keys, sorted by hash, with an index of equal
ranges of hashes, the slots: 4,096, or more for a large corpus. A bucket is a range of hashes: one slice of every file.
So the number of files doesn't depend on the number of buckets. Each bucket writes its duplicates to one file, sorted
by unit.

Many files of keys are merged into few, sorted by hash, with the unit of each key. Many files of duplicates are merged
too, sorted by unit.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import md5
from pathlib import Path
from struct import Struct

import numpy as np

from data_pipeline.base.safetensors_file import Arrays, growing_arrays, write_in_order
from data_pipeline.base.store import Store
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import MergeSpec
from data_pipeline.engine.work_units import Result

_LEAST_SLOTS, _MOST_SLOTS = 4096, 1 << 20  # 8 MB of each file
_KEYS_AT_ONCE, _DUPLICATES_AT_ONCE = 1 << 21, 1 << 22  # merged in memory
_FIRST_WORD = Struct(">Q").unpack_from
NO_DOCUMENT = 2**32 - 1  # the number of a page that cleaning dropped; it may still be the newest of its URL


def hash64(text: str) -> int:
    """The first 8 bytes of the md5 of `text`: these numbers sort like the hexadecimal digests."""
    return _FIRST_WORD(md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest())[0]


class Keys:
    """The keys of one unit, in the order of its documents. `group`, `order`: their numbers of words."""

    def __init__(self, group: int, order: int):
        self._group, self._width = group, group + order + 1
        self._words = array("Q")

    def add(self, document: int, item: int, words: Iterable[int]) -> None:
        """Adds a key. `words`: the group, then the order."""
        self._words.extend(words)
        self._words.append(document << 32 | item)

    def extend(self, table: np.ndarray) -> None:
        """Adds the keys of a table (n, words). The last column is the position."""
        self._words.frombytes(table.tobytes())

    def write(self, path: Path, slots: int) -> int:
        """Writes one key of each group, the duplicates within the unit, and an index of `slots`, a power of two.

        Returns the number of keys written.
        """
        table = np.frombuffer(self._words, dtype=np.uint64).reshape(-1, self._width)
        kept, duplicates, copies = decide(table, self._group)
        hashes = table[kept, 0]
        starts = np.searchsorted(hashes, np.arange(slots, dtype=np.uint64) * np.uint64(2**64 // slots))
        pairs = np.stack([table[duplicates, -1], table[copies, -1]], axis=1)
        arrays = {
            "slots": np.append(starts, len(kept)).astype(np.int64),
            "keys": table[kept],
            "duplicates": pairs[pairs[:, 0] >> np.uint64(32) != NO_DOCUMENT],
        }
        write_in_order(path, arrays)
        return len(kept)


def decide(table: np.ndarray, group: int, units: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kept (k,), duplicates (n - k,), the kept copy of each duplicate (n - k,)), as rows of `table` (n, words).

    Of rows with equal groups, the smallest by order, unit and position is kept. Kept rows are sorted by group.
    [[7, 2, position 0], [7, 1, position 9], [8, 5, position 3]] with a group of one word  ->  [1, 2], [0], [1]
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
    """Range `number` of the `count` equal ranges of hashes; `count` is a power of two."""

    number: int
    count: int

    @staticmethod
    def enough(keys: int, keys_per_bucket: int) -> int:
        """The number of buckets for `keys`, which must not depend on the number of workers."""
        return 1 << max(0, -(-keys // keys_per_bucket) - 1).bit_length()

    @staticmethod
    def slots(keys: int, keys_per_bucket: int) -> int:
        """The number of slots of files with up to `keys` in all: enough for their buckets, unless these are tiny."""
        return min(_MOST_SLOTS, max(_LEAST_SLOTS, KeyBucket.enough(keys, keys_per_bucket)))

    def read(self, store: Store, files: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(keys (n, words), unit number of each (n,)) from this bucket's slice of every file, merged or not."""

        def slice_of(one: tuple[int, str]) -> tuple[np.ndarray, np.ndarray]:
            with Arrays.opened(store, one[1]) as file:
                return self.slice_of(file, one[0])

        return _joined(store.each(slice_of, enumerate(files)))

    def slice_of(self, file: Arrays, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """This bucket's slice of an open file of `unit`, or of a merged file."""
        size = (file.shape("slots")[0] - 1) // self.count
        bounds = (self.number * size, (self.number + 1) * size)
        start, stop = (int(slot[0]) for slot in file.slices(*(("slots", at, at + 1) for at in bounds)))
        if "merged" in file:
            (found,) = file.slices(("merged", start, stop))
            return found[:, :-1], found[:, -1]
        (keys,) = file.slices(("keys", start, stop))
        return keys, np.full(stop - start, unit, np.uint64)


def merge_signatures(context: Context, spec: MergeSpec) -> Result:
    """Like `merge_keys`. The merged file also has the near-duplicates within a unit, which the clusters need."""
    pairs = np.concatenate(list(pairs_within(context.store, spec.files, spec.first)))
    return merge_keys(context, spec, {"inside": pairs})


def merge_keys(context: Context, spec: MergeSpec, pairs: Mapping[str, np.ndarray] = {}) -> Result:
    """Merges the files of keys of neighbouring units. `pairs`: more arrays for the merged file.

    The array `merged` has the unit of each key in its last column.
    """
    store = context.store
    files = store.each(partial(Arrays, store), spec.files)
    number, width = sum(file.shape("keys")[0] for file in files), files[0].shape("keys")[1]
    slots = np.zeros(files[0].shape("slots"), np.int64)
    count = min(len(slots) - 1, KeyBucket.enough(number, _KEYS_AT_ONCE))
    parts: list[_Part] = []
    for unit, file in enumerate(files, spec.first):
        of_file = file["slots"]  # one array at a time: each may have 8 MB
        slots += of_file
        parts.append(_Part(unit, file, of_file[:: (len(slots) - 1) // count].tolist()))
    shapes = {
        "slots": (np.int64, slots.shape),
        "merged": (np.uint64, (number, width + 1)),
        **{name: (np.uint64, values.shape) for name, values in pairs.items()},
    }
    with store.put(spec.output) as path, growing_arrays(path, shapes) as append:
        for name, values in {"slots": slots, **pairs}.items():
            append(name, values)
        for bucket in range(count):
            found = store.each(partial(_Part.keys, bucket=bucket), parts)
            table = np.empty((sum(map(len, found)), width + 1), np.uint64)
            np.concatenate(found, out=table[:, :-1])
            table[:, -1] = np.repeat([part.unit for part in parts], [*map(len, found)])
            append("merged", table[np.argsort(table[:, 0], kind="stable")])
    return Result()


@dataclass(frozen=True)
class _Part:
    """A file that is merged. `starts`: where each bucket's keys begin, and where the last bucket's keys end."""

    unit: int
    file: Arrays
    starts: list[int]

    def keys(self, bucket: int) -> np.ndarray:
        """The keys (n, words) of a bucket."""
        return self.file.slices(("keys", self.starts[bucket], self.starts[bucket + 1]))[0]


def _joined(slices: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([keys for keys, _ in slices]), np.concatenate([units for _, units in slices])


def pairs_within(store: Store, files: Sequence[str], first: int = 0) -> Iterator[np.ndarray]:
    """For each file: pairs (n, 2) of documents with equal keys in one unit, as unit << 32 | document.

    `first`: the unit of the first of `files`, unless they are merged.
    """
    for unit, name in enumerate(files, first):
        with Arrays.opened(store, name) as file:
            inside = "inside" in file
            found = file["inside" if inside else "duplicates"]
        if inside:
            yield found
            continue
        pairs = np.unique(found >> np.uint64(32), axis=0)
        yield pairs[pairs[:, 0] != pairs[:, 1]] | np.uint64(unit << 32)


def write_duplicates(
    path: Path, units: np.ndarray, positions: np.ndarray, count: int, kept: np.ndarray | None = None
) -> None:
    """Writes duplicates, sorted by unit: their `positions` (n,) in `units` (n,), of `count` units in all.

    `kept` (n,): the document that stays in the place of each, unit << 32 | document.
    """
    are_documents = positions >> np.uint64(32) != NO_DOCUMENT
    units, positions = units[are_documents], positions[are_documents]
    order = np.lexsort((positions, units))
    starts = np.searchsorted(units[order], np.arange(count + 1, dtype=np.uint64))
    columns = [positions, *([] if kept is None else [kept[are_documents]])]
    duplicates = np.column_stack([column[order] for column in columns])
    write_in_order(path, {"starts": starts.astype(np.int64), "duplicates": duplicates})


def merge_duplicates(context: Context, spec: MergeSpec) -> Result:
    """Merges files of duplicates. Each file has all units and a range of hashes."""
    store = context.store
    opened = store.each(partial(Arrays, store), spec.files)
    starts = reduce(np.add, (file["starts"] for file in opened))
    units = len(starts) - 1
    shape = int(starts[-1]), opened[0].shape("duplicates")[1]
    shapes = {"starts": (np.int64, starts.shape), "duplicates": (np.uint64, shape)}
    with store.put(spec.output) as path, growing_arrays(path, shapes) as append:
        append("starts", starts)
        unit = 0
        while unit < units:
            enough = int(np.searchsorted(starts, starts[unit] + _DUPLICATES_AT_ONCE, side="right")) - 1
            until = min(max(unit + 1, enough), units)
            found, units_of = [], []
            for file in opened:
                (bounds,) = file.slices(("starts", unit, until + 1))
                found += file.slices(("duplicates", int(bounds[0]), int(bounds[-1])))
                units_of.append(np.repeat(np.arange(unit, until), np.diff(bounds)))
            by_unit = np.argsort(np.concatenate(units_of), kind="stable")
            append("duplicates", np.concatenate(found)[by_unit])
            unit = until
    return Result()


@dataclass(frozen=True)
class Found:
    """What a step has found in a unit.

    Attributes:
        items: the duplicate items of each document, by the document's number in the unit.
        kept: the document that stays in the place of each, unit << 32 | document, if the step names it.
    """

    items: Mapping[int, list[int]]
    kept: Mapping[int, int]


def read_duplicates(store: Store, keys: str | None, decided: Sequence[str], unit: int, kept: bool = False) -> Found:
    """The duplicates in `unit`, from the unit's file of `keys` and the files of the buckets. `kept`: whether they name
    the documents that stay."""
    listed = _listed(store, decided, unit)
    positions = [own[:, 0] for own in listed]
    stays = {position >> 32: document for own in listed if kept for position, document in own.tolist()}
    if keys:
        within = Arrays(store, keys)["duplicates"]
        positions.append(within[:, 0])
        for position, copy in within.tolist() if kept else ():  # the copy in this unit may be a duplicate of another
            stays[position >> 32] = stays.get(copy >> 32, unit << 32 | copy >> 32)
    items: dict[int, list[int]] = {}
    if positions:
        for position in np.unique(np.concatenate(positions)).tolist():
            items.setdefault(position >> 32, []).append(position & 0xFFFFFFFF)
    return Found(items, stays)


def read_repeated(store: Store, keys: str, decided: Sequence[str], unit: int) -> np.ndarray:
    """(n,): the sorted positions in `unit` whose keys occur more than once, in the unit or in several units.

    `decided`: the files of the buckets, which list these positions, and the positions of kept copies.
    """
    within = Arrays(store, keys)["duplicates"]  # (n, 2): duplicates within the unit, and their kept copies
    listed = _listed(store, decided, unit)
    return np.unique(np.concatenate([within.ravel(), *(own[:, 0] for own in listed)]))


def _listed(store: Store, decided: Sequence[str], unit: int) -> list[np.ndarray]:
    """What each file of a bucket lists of `unit`: positions (n, 1), or positions and the documents that stay (n, 2)."""

    def of_file(name: str) -> np.ndarray:
        with Arrays.opened(store, name) as file:
            start, stop = file.slices(("starts", unit, unit + 2))[0].tolist()
            return file.slices(("duplicates", start, stop))[0]

    return store.each(of_file, decided)
