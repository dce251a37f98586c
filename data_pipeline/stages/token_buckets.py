"""A bucket of the global shuffle is one slice of every file of tokens, and one shard.

Files of tokens may be merged: a merged file has the documents of several files in the order of the hash, those of one
hash in the order of their files. So a bucket's documents, and their order, are the same either way.
"""

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from data_pipeline.execution.merging import MergeSpec
from data_pipeline.execution.work_units import Result
from data_pipeline.foundation.safetensors_file import dtype_of, growing_arrays, part_of
from data_pipeline.packing.rows import Documents

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
