"""Merges many sorted files into few, so that a bucket reads its slices without opening every file.

A bucket is a range of hashes, and reads a slice of every file. 56,000 files × 4,200 buckets would be 235 million opens.
So groups of neighbouring files are merged first, each into one file in the same order; every file is then opened once,
and a bucket opens only merged files. The bytes that a bucket reads stay the same. A level of merging is a stage like
any other, whose units are committed, kept, redone and repaired.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.store import Store
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.work_units import Finished, Result, Stage, Unit, outputs_of, run

_MOST_FILES = 1024  # opens of one reader
_MOST_OPENS = 1_000_000  # of all readers together: 17 minutes of one core at 1 ms each
MERGE_BYTES = 500_000_000  # memory of a unit, at most
_LEVEL = re.compile(r"-merged(-\d+)?$")
_LARGEST_GROUP = 256  # files that a unit has open at once; a process may usually open 1,024


@dataclass(frozen=True)
class MergeSpec:
    """Merges neighbouring `files` into `output`. `first`: the number of the first file among all files."""

    files: tuple[str, ...]
    first: int
    output: str


def group_sizes(files: int, readers: int) -> list[int]:
    """How many files are merged into one at each level; [] if each of `readers` can open all `files` itself.

    Groups are as small as possible, so that many units can merge at the same time.
    """
    enough, sizes = _enough(readers), list[int]()
    while files > enough:
        sizes.append(min(_LARGEST_GROUP, -(-files // enough)))
        files = -(-files // sizes[-1])
    return sizes


def _enough(readers: int) -> int:
    """How many files each of `readers` can open itself."""
    return min(_MOST_FILES, max(1, _MOST_OPENS // max(1, readers)))


def untouched(files: int, readers: int, size: int) -> int:
    """How many of the first `files` stay unmerged, while the others are merged in groups of `size`.

    These are the first files because readers take the number of an unmerged file's unit from its place in the list.
    """
    too_many = files - _enough(readers)
    return max(0, files - size * -(-too_many // (size - 1))) if too_many > 0 else 0


def merging_units(files: int, readers: int) -> list[int]:
    """How many units merge `files` at each level."""
    units = []
    for size in group_sizes(files, readers):
        whole = untouched(files, readers, size)
        units.append(-(-(files - whole) // size))
        files = whole + units[-1]
    return units


def merge(
    written_by: str,
    work: Callable[[Store, MergeSpec], Result],
    files: Mapping[str, str],
    readers: int,
    corpus: Store,
    ray_config: RayConfig,
) -> tuple[list[str], dict[str, Sequence[Finished[Result]]]]:
    """Merges `files`, sha256 by name, of the stage `written_by`, if there are too many for the `readers`.

    `work` merges a group into one file, with a range of hashes in memory at a time. Returns the files to read, and the
    units of each level by stage: "tokens-merged", "tokens-merged-2", … Removes the files of levels that are no longer
    needed.
    """
    finished: dict[str, Sequence[Finished[Result]]] = {}
    for level, size in enumerate(group_sizes(len(files), readers), 1):
        name = level_of(written_by, level)
        first = untouched(len(files), readers, size)
        stage = Stage(name, 1, work, "lower ray.num_cpus", memory=MERGE_BYTES)
        units = run(stage, plan(name, files, size, first), corpus, ray_config)
        finished[name] = units
        files = dict([*islice(files.items(), first), *outputs_of(units).items()])
    for folder in corpus.folders(".stages"):
        if without_level(folder) == written_by and folder not in (written_by, *finished):
            corpus.delete_folder(f".stages/{folder}")
    return list(files), finished


def level_of(stage: str, level: int) -> str:
    """The name of a level that merges the files of `stage`: "tokens", 2 -> "tokens-merged-2"."""
    return f"{stage}-merged" + (f"-{level}" if level > 1 else "")


def without_level(stage: str) -> str:
    """The stage whose files a level merges: "tokens-merged-2" -> "tokens". Other names stay as they are."""
    return _LEVEL.sub("", stage)


def plan(stage: str, files: Mapping[str, str], size: int, begin: int) -> list[Unit[MergeSpec]]:
    """A unit for each group of `size` neighbours, from file number `begin` on."""
    names, units = list(files), []
    for number, first in enumerate(range(begin, len(names), size)):
        group = tuple(names[first : first + size])
        output = f".stages/{stage}/{number:05d}.safetensors"
        inputs = fingerprint([first, [files[name] for name in group]])
        units.append(Unit(Path(output).stem, MergeSpec(group, first, output), inputs, (output,), size=1))
    return units


def write_names(corpus: Store, names: Sequence[str]) -> str:
    """Writes a list of names that many units need, so that no spec repeats it; returns the list's path in `corpus`. The
    path is a hash of the names, and an existing list is kept."""
    path = f".stages/plans/{fingerprint(list(names))}.json"
    if corpus.read_valid_json(path, list[str]) != list(names):
        corpus.write_json(path, list(names))
    return path


@lru_cache(maxsize=4)
def read_names(corpus: Store, path: str) -> tuple[str, ...]:
    """The list that `write_names` wrote. A worker reads it once for its units."""
    return corpus.read_json(path, tuple[str, ...])
