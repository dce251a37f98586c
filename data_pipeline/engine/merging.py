"""Merges many sorted files into few, so that a bucket reads its slices without opening every file.

A bucket is a range of hashes, and reads a slice of every file. 56,000 files × 4,200 buckets would be 235 million opens.
So groups of neighbouring files are merged first, each into one file in the same order; every file is then opened once,
and a bucket opens only merged files. The bytes that a bucket reads stay the same. A store says how many opens there may
be: in a folder 1,000,000, which take one core 17 minutes at 1 ms each, and fewer in a bucket. Merging is a stage like
any other, whose units are committed, kept, redone and repaired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.store import Store
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of

_MOST_FILES = 1024  # opens of one reader
MERGE_BYTES = 500_000_000  # memory of a unit, at most


@dataclass(frozen=True)
class MergeSpec:
    """Merges neighbouring `files` into `output`. `first`: the number of the first file among all files."""

    files: tuple[str, ...]
    first: int
    output: str


def group_size(files: int, readers: int, opens: int) -> int:
    """How many files are merged into one; at most 1 if each of `readers` can open all `files` itself, and all readers
    together open at most `opens`.

    Groups are as small as possible, so that many units can merge at the same time.
    """
    return -(-files // _enough(readers, opens))


def _enough(readers: int, opens: int) -> int:
    """How many files each of `readers` can open itself."""
    return min(_MOST_FILES, max(1, opens // max(1, readers)))


def untouched(files: int, readers: int, opens: int, size: int) -> int:
    """How many of the first `files` stay unmerged, while the others are merged in groups of `size`.

    The unmerged files come first: a reader knows the unit of an unmerged file only by its position in the list.
    """
    too_many = files - _enough(readers, opens)
    return max(0, files - size * -(-too_many // (size - 1))) if too_many > 0 else 0


def plan(stage: str, files: Mapping[str, str], readers: int, opens: int) -> list[Unit[MergeSpec]]:
    """The units of the stage `stage`, which merges `files`; none if there aren't too many for the `readers`, who
    open at most `opens` together.

    `files`: the sha256 of each file, by name. A unit merges a group of neighbours into one file, with a range of hashes
    in memory at a time.
    """
    size = group_size(len(files), readers, opens)
    if size <= 1:
        return []
    names, units = list(files), list[Unit[MergeSpec]]()
    for number, first in enumerate(range(untouched(len(files), readers, opens, size), len(names), size)):
        group = tuple(names[first : first + size])
        output = f".stages/{stage}/{number:05d}.safetensors"
        inputs = fingerprint([first, [files[name] for name in group]])
        units.append(Unit(Path(output).stem, MergeSpec(group, first, output), inputs, (output,), memory=MERGE_BYTES))
    return units


def to_read(files: Mapping[str, str], merged: Sequence[Finished[Result]], readers: int, opens: int) -> list[str]:
    """The files that each of `readers` reads: `files`, or what the units `merged` have made of them."""
    if not merged:
        return list(files)
    first = untouched(len(files), readers, opens, group_size(len(files), readers, opens))
    return [*islice(files, first), *outputs_of(merged)]


def write_names(store: Store, names: Sequence[str]) -> str:
    """Writes a list of names that many units need, so that no spec repeats it; returns the list's path in `store`. The
    path is a hash of the names, and an existing list is kept."""
    path = f".stages/plans/{fingerprint(list(names))}.json"
    if store.read_valid_json(path, list[str]) != list(names):
        store.write_json(path, list(names))
    return path


@lru_cache(maxsize=4)
def read_names(store: Store, path: str) -> tuple[str, ...]:
    """The list that `write_names` wrote. A worker reads it once for its units, whose stores are equal."""
    return store.read_json(path, tuple[str, ...])
