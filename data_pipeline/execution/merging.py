"""Merging: many sorted files become few, so that a bucket's slice is found without opening every file.

A bucket reads one slice of each of `files` files, so that all buckets open files × buckets of them: 235 million for
56,000 files and 4,200 shards. Where that is too many, files are first merged in groups of neighbours, each into one
file in the same order. Every file is then opened once, and each bucket opens only the merged ones. The bytes that a
bucket reads, and their order, stay the same.

A level of merging is a stage like any other: its units are committed, kept, redone and repaired like all others.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import RayConfig
from data_pipeline.execution.work_units import Finished, Result, Stage, Unit, outputs_of, run
from data_pipeline.foundation.atomic import fingerprint, write_json
from data_pipeline.foundation.json_file import read_json, read_valid_json

_MOST_FILES = 1024  # that one reader opens
_MOST_OPENS = 1_000_000  # of all readers together: 17 minutes of one core at 1 ms each
_LARGEST_GROUP = 256  # files that a unit holds open at once; a process may usually open 1,024


@dataclass(frozen=True)
class MergeSpec:
    """`files`, neighbours in the order of all files, of which the first is number `first`, become `output`."""

    files: tuple[str, ...]
    first: int
    output: str


@dataclass(frozen=True)
class Merging:
    """How the files of a stage are merged. `work` writes `output` from `files`; it holds a range at a time."""

    stage_name: str
    work: Callable[[Path, MergeSpec], Result]

    def stage(self, level: int) -> Stage[MergeSpec, Result]:
        """The stage of a level, from 1: "tokens-merged", "tokens-merged-2", …"""
        name = f"{self.stage_name}-merged" + (f"-{level}" if level > 1 else "")
        return Stage(name, 1, self.work, "lower ray.num_cpus")


def group_sizes(files: int, readers: int) -> list[int]:
    """How many files become one at each level; [] if each of `readers` can open all `files` itself.

    No more files are merged than have to be, so that many units can do it at the same time.
    """
    enough, sizes = min(_MOST_FILES, max(1, _MOST_OPENS // max(1, readers))), []
    while files > enough:
        sizes.append(min(_LARGEST_GROUP, -(-files // enough)))
        files = -(-files // sizes[-1])
    return sizes


def merge(
    merging: Merging, files: Mapping[str, str], readers: int, corpus: Path, ray_config: RayConfig
) -> tuple[list[str], dict[str, Sequence[Finished[Result]]]]:
    """Merges `files` (the sha256 of each by its name) as far as the number of files and of `readers` requires.

    Returns the files to read, and the units of each level by stage. Removes the files of levels that aren't needed.
    """
    finished: dict[str, Sequence[Finished[Result]]] = {}
    for level, size in enumerate(group_sizes(len(files), readers), 1):
        stage = merging.stage(level)
        finished[stage.name] = units = run(stage, plan(stage, files, size), corpus, ray_config)
        files = outputs_of(units)
    for folder in (corpus / ".stages").glob(f"{merging.stage_name}-merged*"):
        if folder.name not in finished:
            shutil.rmtree(folder, ignore_errors=True)
    return list(files), finished


def plan(stage: Stage[MergeSpec, Result], files: Mapping[str, str], size: int) -> list[Unit[MergeSpec]]:
    """One unit for each group of `size` neighbours."""
    names, units = list(files), []
    for number, first in enumerate(range(0, len(names), size)):
        group = tuple(names[first : first + size])
        output = f".stages/{stage.name}/{number:05d}.safetensors"
        inputs = fingerprint([first, [files[name] for name in group]])
        units.append(Unit(Path(output).stem, MergeSpec(group, first, output), inputs, (output,)))
    return units


def write_names(corpus: Path, names: Sequence[str]) -> str:
    """Writes the names of files that many units need, so that no unit's spec repeats them; returns the path of the list
    within `corpus`. It is named by the names' hash, and stays if it has them already."""
    path = f".stages/plans/{fingerprint(list(names))}.json"
    if read_valid_json(corpus / path, list[str]) != list(names):
        write_json(corpus / path, list(names))
    return path


def read_names(corpus: Path, path: str) -> list[str]:
    return read_json(corpus / path, list[str])
