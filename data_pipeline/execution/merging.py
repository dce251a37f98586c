"""Many sorted files are merged into few, so that a bucket's slice is found without opening every file.

A bucket is a range of hashes. It reads one slice of each of `files` files, so that all buckets open files × buckets of
them: 235 million for 56,000 files and 4,200 shards. Where that is too many, files are first merged in groups of
neighbours, each into one file in the same order. Every file is then opened once, and each bucket opens only the merged
ones. The bytes that a bucket reads, and their order, stay the same. A level of merging is a stage like any other: its
units are committed, kept, redone and repaired like all others.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data_pipeline.execution.config import RayConfig
from data_pipeline.execution.work_units import Finished, Result, Stage, Unit, outputs_of, run
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.store import Store

_MOST_FILES = 1024  # that one reader opens
_MOST_OPENS = 1_000_000  # of all readers together: 17 minutes of one core at 1 ms each
MERGE_BYTES = 500_000_000  # that a unit takes at most
_LEVEL = re.compile(r"-merged(-\d+)?$")
_LARGEST_GROUP = 256  # files that a unit holds open at once; a process may usually open 1,024


@dataclass(frozen=True)
class MergeSpec:
    """Merges neighbouring `files` into `output`. `first`: the number of the first of these files among all."""

    files: tuple[str, ...]
    first: int
    output: str


def group_sizes(files: int, readers: int) -> list[int]:
    """How many files become one at each level; [] if each of `readers` can open all `files` itself.

    A group is no larger than it has to be, so that many units can merge at the same time.
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
    """How many of the first `files` needn't be merged, if all others are, in groups of `size`.

    They are the first ones since they have no number of a unit: the place among all files tells it.
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
    shown: bool = True,
) -> tuple[list[str], dict[str, Sequence[Finished[Result]]]]:
    """Merges `files` (the sha256 of each by its name) of a stage as far as their number and that of `readers` requires.

    `work` makes one file of a group, with a range of it in memory at a time. Returns the files to read, and the units
    of each level by stage: "tokens-merged", "tokens-merged-2", … Removes the files of levels that aren't needed. For
    `shown` see `run`.
    """
    finished: dict[str, Sequence[Finished[Result]]] = {}
    for level, size in enumerate(group_sizes(len(files), readers), 1):
        name = level_of(written_by, level)
        first = untouched(len(files), readers, size)
        stage = Stage(name, 1, work, "lower ray.num_cpus", memory=MERGE_BYTES)
        units = run(stage, plan(name, files, size, first), corpus, ray_config, shown)
        finished[name] = units
        files = dict([*islice(files.items(), first), *outputs_of(units).items()])
    for folder in corpus.folders(".stages"):
        if without_level(folder) == written_by and folder not in (written_by, *finished):
            corpus.delete_folder(f".stages/{folder}")
    return list(files), finished


def level_of(stage: str, level: int) -> str:
    """The stage that merges the files of another: "tokens", 2 -> "tokens-merged-2"."""
    return f"{stage}-merged" + (f"-{level}" if level > 1 else "")


def without_level(stage: str) -> str:
    """The stage whose files a stage merges; other stages as they are. "tokens-merged-2" -> "tokens"."""
    return _LEVEL.sub("", stage)


def plan(stage: str, files: Mapping[str, str], size: int, begin: int) -> list[Unit[MergeSpec]]:
    """One unit for each group of `size` neighbours, from file number `begin` on."""
    names, units = list(files), []
    for number, first in enumerate(range(begin, len(names), size)):
        group = tuple(names[first : first + size])
        output = f".stages/{stage}/{number:05d}.safetensors"
        inputs = fingerprint([first, [files[name] for name in group]])
        units.append(Unit(Path(output).stem, MergeSpec(group, first, output), inputs, (output,), size=1))
    return units


def write_names(corpus: Store, names: Sequence[str]) -> str:
    """Writes the names of files that many units need, so that no unit's spec repeats them; returns the path of the list
    within `corpus`. It is named by the names' hash, and stays if it has them already."""
    path = f".stages/plans/{fingerprint(list(names))}.json"
    if corpus.read_valid_json(path, list[str]) != list(names):
        corpus.write_json(path, list(names))
    return path


def read_names(corpus: Store, path: str) -> list[str]:
    return corpus.read_json(path, list[str])
