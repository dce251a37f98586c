"""Reads and merges the buckets of the global shuffle: a bucket is a slice of every token file, and becomes a shard.

A merged file has the documents of several files in the order of hashes, and documents with equal hashes in the order of
the files. So merging changes neither a bucket's documents nor their order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from data_pipeline.base.safetensors_file import Arrays, growing_arrays
from data_pipeline.base.store import Store
from data_pipeline.corpus.packing import Documents
from data_pipeline.engine.merging import MergeSpec
from data_pipeline.engine.work_units import Result

SPLITS = ("train", "validation")
_TOKENS_AT_ONCE = 1 << 24  # merged in memory


@dataclass(frozen=True)
class TokenBucket:
    """Range `number` of `count` equal ranges of the shuffle's hashes: the documents of one shard."""

    split: str
    number: int
    count: int

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last hash."""
        return -(-(self.number << 64) // self.count), -(-((self.number + 1) << 64) // self.count) - 1


def _found(file: Arrays, bucket: TokenBucket) -> tuple[int, np.ndarray]:
    """(number of the first, hashes (n,)) of the bucket's documents in a token file.

    Hashes are spread evenly, so the place of a bucket's hashes is nearly known. If the estimate is wrong, more hashes
    are read.
    """
    name, (low, high) = f"{bucket.split}.hashes", bucket.bounds
    total = file.shape(name)[0]
    more = 64 + 4 * math.isqrt(total)
    start, stop = max(0, (total * low >> 64) - more), min(total, (total * (high + 1) >> 64) + more)
    while True:
        (hashes,) = file.slices((name, start, stop))
        before = start > 0 and (not len(hashes) or int(hashes[0]) >= low)
        after = stop < total and (not len(hashes) or int(hashes[-1]) <= high)
        if not before and not after:
            break
        more *= 4
        start, stop = max(0, start - before * more), min(total, stop + after * more)
    first = int(np.searchsorted(hashes, np.uint64(low)))
    last = int(np.searchsorted(hashes, np.uint64(high), side="right"))
    return start + first, hashes[first:last]


def _slice(file: Arrays, bucket: TokenBucket) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(hashes (n,), offsets (n + 1,), starts of targets (n,) or None) of the bucket's documents in a token file."""
    first, hashes = _found(file, bucket)
    if not len(hashes):
        return hashes, np.zeros(1, np.int64), None
    last, targets = first + len(hashes), f"{bucket.split}.targets"
    of_pairs = [(targets, first, last)] if targets in file else []
    offsets, *starts = file.slices((f"{bucket.split}.offsets", first, last + 1), *of_pairs)
    return hashes, offsets, starts[0] if starts else None


def count_tokens(corpus: Store, files: Sequence[str], buckets: Sequence[TokenBucket]) -> list[int]:
    """Number of tokens in each of `buckets`, which are all buckets. The time grows with the number of documents, not
    with files times buckets."""
    counts = {split: np.zeros(sum(bucket.split == split for bucket in buckets), np.int64) for split in SPLITS}
    for name in files:
        file = Arrays(corpus, name)
        for split, tokens in counts.items():
            hashes, offsets = (file[f"{split}.{array}"] for array in ("hashes", "offsets"))
            np.add.at(tokens, bucket_numbers(hashes, len(tokens)), np.diff(offsets))
    return [int(counts[bucket.split][bucket.number]) for bucket in buckets]


def bucket_numbers(hashes: np.ndarray, count: int) -> np.ndarray:
    """Numbers (n,) of the buckets of `hashes` (n,): hash * count >> 64, computed in 32-bit halves."""
    buckets, half, low = np.uint64(count), np.uint64(32), np.uint64(2**32 - 1)
    return ((hashes >> half) * buckets + ((hashes & low) * buckets >> half)) >> half


def read_bucket(corpus: Store, files: Sequence[str], bucket: TokenBucket) -> Documents:
    """The documents of a bucket from all `files`, in shuffled order."""
    return _gather(corpus, corpus.each(partial(Arrays, corpus), files), bucket)[1]


def merge_tokens(corpus: Store, spec: MergeSpec) -> Result:
    """Merges token files, a range of hashes at a time."""
    files = corpus.each(partial(Arrays, corpus), spec.files)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for split in SPLITS:
        for array in ("hashes", "offsets", "tokens", "targets"):
            if (name := f"{split}.{array}") in files[0]:
                length = sum(file.shape(name)[0] for file in files)
                length -= len(files) - 1 if array == "offsets" else 0  # each file has one offset more than documents
                shapes[name] = files[0].dtype(name), (length,)
    with corpus.put(spec.output) as path, growing_arrays(path, shapes) as arrays:
        for split in SPLITS:
            ranges = max(1, -(-shapes[f"{split}.tokens"][1][0] // _TOKENS_AT_ONCE))
            end = 0
            arrays.append(f"{split}.offsets", np.zeros(1, np.int64))
            for number in range(ranges):
                hashes, documents = _gather(corpus, files, TokenBucket(split, number, ranges))
                arrays.append(f"{split}.hashes", hashes)
                arrays.append(f"{split}.offsets", end + documents.starts[1:])
                arrays.append(f"{split}.tokens", documents.tokens)
                if documents.targets is not None and f"{split}.targets" in shapes:
                    arrays.append(f"{split}.targets", documents.targets)
                end += int(documents.starts[-1])
    return Result()


def _documents(file: Arrays, bucket: TokenBucket) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """(hashes (n,), tokens of each document, [starts of targets (n,)]) of a bucket in a token file."""
    hashes, offsets, targets = _slice(file, bucket)
    if not len(hashes):
        return hashes, [], []
    (tokens,) = file.slices((f"{bucket.split}.tokens", int(offsets[0]), int(offsets[-1])))
    return hashes, np.split(tokens, offsets[1:-1] - offsets[0]), [] if targets is None else [targets]


def _gather(corpus: Store, files: Sequence[Arrays], bucket: TokenBucket) -> tuple[np.ndarray, Documents]:
    """(hashes (n,), documents) of a bucket from all files, in the order of hashes and then of files."""
    found = corpus.each(lambda file: _documents(file, bucket), files)
    hashes = [of_file for of_file, _, _ in found]
    documents = [tokens for _, of_file, _ in found for tokens in of_file]
    targets = [starts for _, _, of_file in found for starts in of_file]
    if not documents:
        nothing = np.zeros(0, np.int64)
        return np.zeros(0, np.uint64), Documents(np.zeros(0, np.uint16), np.zeros(1, np.int64), nothing)
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")
    ordered = [documents[position] for position in order]
    starts = np.cumsum([0, *(len(document) for document in ordered)], dtype=np.int64)
    of_pairs = np.concatenate(targets)[order] if targets else None
    return joined[order], Documents(np.concatenate(ordered), starts, of_pairs)
