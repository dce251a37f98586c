"""Merges many sorted files into few, so that a bucket reads its slices without opening every file.

A bucket is a range of hashes, and reads a slice of every file. 56,000 files × 4,200 buckets would be 235 million opens.
So groups of neighbouring files are merged first, each into one file in the same order; every file is then opened once,
and a bucket opens only merged files. The bytes that a bucket reads stay the same. A store says how many opens there may
be: in a folder 1,000,000, which take one core 17 minutes at 1 ms each, and fewer in a bucket. Merging is a stage like
any other, whose units are committed, kept, redone and repaired.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.store import Store
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Result, Stage, Unit, outputs_of, run

_MOST_FILES = 1024  # opens of one reader
MERGE_BYTES = 500_000_000  # memory of a unit, at most
_MERGED = "-merged"  # ends the name of the stage


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


def merging_units(files: int, readers: int, opens: int) -> int:
    """How many units merge `files`; 0 if they aren't merged."""
    size = group_size(files, readers, opens)
    return -(-(files - untouched(files, readers, opens, size)) // size) if size > 1 else 0


def merge(
    written_by: str,
    work: Callable[[Context, MergeSpec], Result],
    files: Mapping[str, str],
    readers: int,
    corpus: Store,
    ray_config: RayConfig,
) -> tuple[list[str], dict[str, Sequence[Finished[Result]]]]:
    """Merges `files`, sha256 by name, of the stage `written_by`, if there are too many for the `readers`.

    `work` merges a group into one file, with a range of hashes in memory at a time. Returns the files to read, and the
    units by the name of their stage, "tokens-merged"; no units if nothing is merged. Merged files that are no longer
    needed are removed.
    """
    name, opens = merged_name(written_by), corpus.most_opens
    size = group_size(len(files), readers, opens)
    if size <= 1:
        if name in corpus.folders(".stages"):
            corpus.delete_folder(f".stages/{name}")
        return list(files), {}
    first = untouched(len(files), readers, opens, size)
    stage = Stage(name, 1, work, "lower ray.num_cpus", memory=MERGE_BYTES)
    units = run(stage, plan(name, files, size, first), corpus, ray_config)
    return [*islice(files, first), *outputs_of(units)], {name: units}


def merged_name(stage: str) -> str:
    """The name of the stage that merges the files of `stage`."""
    return stage + _MERGED


def unmerged_name(stage: str) -> str:
    """ "tokens-merged" -> "tokens". Other names stay as they are."""
    return stage.removesuffix(_MERGED)


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
    """The list that `write_names` wrote. A worker reads it once for its units, whose stores are equal."""
    return corpus.read_json(path, tuple[str, ...])
