"""Many sorted files are merged into few, so that a bucket's slice is found without opening every file.

A bucket is a range of hashes. It reads one slice of each of `files` files, so that all buckets open files × buckets of
them: 235 million for 56,000 files and 4,200 shards. Where that is too many, files are first merged in groups of
neighbours, each into one file in the same order. Every file is then opened once, and each bucket opens only the merged
ones. The bytes that a bucket reads, and their order, stay the same. A level of merging is a stage like any other: its
units are committed, kept, redone and repaired like all others.

A bucket of the global shuffle is one slice of every file of tokens, and one shard.

Files of tokens may be merged: a merged file has the documents of several files in the order of the hash, those of one
hash in the order of their files. So a bucket's documents, and their order, are the same either way.
"""

import contextlib
import re
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from data_pipeline.config import RayConfig
from data_pipeline.execution.work_units import Finished, Result, Stage, Unit, outputs_of, run
from data_pipeline.foundation.atomic import fingerprint, write_json
from data_pipeline.foundation.json_file import read_json, read_valid_json
from data_pipeline.foundation.safetensors_file import dtype_of, growing_arrays, part_of
from data_pipeline.packing.rows import Documents

_MOST_FILES = 1024  # that one reader opens
_MOST_OPENS = 1_000_000  # of all readers together: 17 minutes of one core at 1 ms each
MERGE_BYTES = 500_000_000  # that a unit takes at most
_LEVEL = re.compile(r"-merged(-\d+)?$")
_LARGEST_GROUP = 256  # files that a unit holds open at once; a process may usually open 1,024


@dataclass(frozen=True)
class MergeSpec:
    """`files`, neighbours in the order of all files, of which the first is number `first`, become `output`."""

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
    work: Callable[[Path, MergeSpec], Result],
    files: Mapping[str, str],
    readers: int,
    corpus: Path,
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
    for folder in (corpus / ".stages").iterdir():
        if without_level(folder.name) == written_by and folder.name not in (written_by, *finished):
            shutil.rmtree(folder, ignore_errors=True)
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


def write_names(corpus: Path, names: Sequence[str]) -> str:
    """Writes the names of files that many units need, so that no unit's spec repeats them; returns the path of the list
    within `corpus`. It is named by the names' hash, and stays if it has them already."""
    path = f".stages/plans/{fingerprint(list(names))}.json"
    if read_valid_json(corpus / path, list[str]) != list(names):
        write_json(corpus / path, list(names))
    return path


def read_names(corpus: Path, path: str) -> list[str]:
    return read_json(corpus / path, list[str])


SPLITS = ("train", "validation")
_TOKENS_AT_ONCE = 1 << 24  # merged in memory


@dataclass(frozen=True)
class TokenBucket:
    """Range `number` of `count` ranges of the shuffle's hashes: the documents of one shard."""

    split: str
    number: int
    count: int

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last hash, both included."""
        return -(-(self.number << 64) // self.count), -(-((self.number + 1) << 64) // self.count) - 1


class _OnDisk(Sequence[int]):
    """An array in a file; each access reads only the numbers it needs."""

    def __init__(self, array: Any):
        self._array, self._length = array, array.get_shape()[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> Any:
        return int(self._array[at : at + 1][0])


def _slice(file: Any, bucket: TokenBucket) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(hashes (n,), offsets (n + 1,), starts of targets (n,)) of `bucket`'s documents in an open tokenized file."""
    hashes = file.get_slice(f"{bucket.split}.hashes")
    first, last = (
        find(_OnDisk(hashes), bound) for find, bound in zip((bisect_left, bisect_right), bucket.bounds, strict=True)
    )
    if first == last:
        return np.zeros(0, np.uint64), np.zeros(1, np.int64), None
    of_pairs = f"{bucket.split}.targets" in file.keys()  # noqa: SIM118 (not a dict)
    targets = file.get_slice(f"{bucket.split}.targets")[first:last] if of_pairs else None
    return hashes[first:last], file.get_slice(f"{bucket.split}.offsets")[first : last + 1], targets


def count_tokens(corpus: Path, files: Sequence[str], buckets: Sequence[TokenBucket]) -> list[int]:
    """Tokens in each bucket, over all tokenized `files`. `buckets` holds all buckets, sorted by split and number.

    The work grows with the number of documents, not with files times buckets.
    """
    counts = {split: np.zeros(sum(bucket.split == split for bucket in buckets), np.int64) for split in SPLITS}
    for name in files:
        with safe_open(corpus / name, "numpy") as file:
            for split, tokens in counts.items():
                hashes, offsets = (file.get_tensor(f"{split}.{array}") for array in ("hashes", "offsets"))
                np.add.at(tokens, bucket_numbers(hashes, len(tokens)), np.diff(offsets))
    return [int(counts[bucket.split][bucket.number]) for bucket in buckets]


def bucket_numbers(hashes: np.ndarray, count: int) -> np.ndarray:
    """Numbers (n,) of the buckets of `hashes` (n,): hash * count >> 64, computed in two halves of 32 bits."""
    buckets, half, low = np.uint64(count), np.uint64(32), np.uint64(2**32 - 1)
    return ((hashes >> half) * buckets + ((hashes & low) * buckets >> half)) >> half


def read_bucket(corpus: Path, files: Sequence[str], bucket: TokenBucket) -> Documents:
    """The documents of a bucket from all `files`, in shuffled order."""
    return read_bucket_with_hashes(corpus, files, bucket)[1]


def read_bucket_with_hashes(corpus: Path, files: Sequence[str], bucket: TokenBucket) -> tuple[np.ndarray, Documents]:
    """Like `read_bucket`, with the hashes (n,) of the documents, in ascending order."""
    return _gather(_one_by_one(corpus, files), bucket)


def merge_tokens(corpus: Path, spec: MergeSpec) -> Result:
    """Merges files of tokens, a range of hashes at a time."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(corpus / name, "numpy")) for name in spec.files]
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for split in SPLITS:
            for array in ("hashes", "offsets", "tokens", "targets"):
                if (name := f"{split}.{array}") in files[0].keys():  # noqa: SIM118 (not a dict)
                    slices = [file.get_slice(name) for file in files]
                    length = sum(part.get_shape()[0] for part in slices)
                    length -= len(files) - 1 if array == "offsets" else 0  # each file has one more than documents
                    shapes[name] = dtype_of(slices[0]), (length,)
        arrays = stack.enter_context(growing_arrays(corpus / spec.output, shapes))
        for split in SPLITS:
            ranges = max(1, -(-shapes[f"{split}.tokens"][1][0] // _TOKENS_AT_ONCE))
            end = 0
            arrays.append(f"{split}.offsets", np.zeros(1, np.int64))
            for number in range(ranges):
                hashes, documents = _gather(files, TokenBucket(split, number, ranges))
                arrays.append(f"{split}.hashes", hashes)
                arrays.append(f"{split}.offsets", end + documents.starts[1:])
                arrays.append(f"{split}.tokens", documents.tokens)
                if documents.targets is not None and f"{split}.targets" in shapes:
                    arrays.append(f"{split}.targets", documents.targets)
                end += int(documents.starts[-1])
    return Result()


def _one_by_one(corpus: Path, files: Sequence[str]) -> Iterator[Any]:
    """Each file, open until the next one is opened."""
    for name in files:
        with safe_open(corpus / name, "numpy") as file:
            yield file


def _gather(files: Iterable[Any], bucket: TokenBucket) -> tuple[np.ndarray, Documents]:
    """(hashes (n,), documents) of a bucket from open files, in the order of the hash and then of the files."""
    hashes: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for file in files:
        found, offsets, target_starts = _slice(file, bucket)
        if len(found):
            tokens = part_of(file.get_slice(f"{bucket.split}.tokens"), int(offsets[0]), int(offsets[-1]))
            hashes.append(found)
            documents += np.split(tokens, offsets[1:-1] - offsets[0])
            targets += [] if target_starts is None else [target_starts]
    if not documents:
        nothing = np.zeros(0, np.int64)
        return np.zeros(0, np.uint64), Documents(np.zeros(0, np.uint16), np.zeros(1, np.int64), nothing)
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")
    ordered = [documents[position] for position in order]
    starts = np.cumsum([0, *(len(document) for document in ordered)], dtype=np.int64)
    of_pairs = np.concatenate(targets)[order] if targets else None
    return joined[order], Documents(np.concatenate(ordered), starts, of_pairs)
