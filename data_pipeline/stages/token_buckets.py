"""A bucket of the global shuffle is one slice of every file of tokens, and one shard.

Files of tokens may be merged: a merged file has the documents of several files in the order of the hash, those of one
hash in the order of their files. So a bucket's documents, and their order, are the same either way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from data_pipeline.execution.merging import MergeSpec
from data_pipeline.execution.work_units import Result
from data_pipeline.foundation.safetensors_file import Arrays, growing_arrays
from data_pipeline.foundation.store import Store
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


def _found(file: Arrays, bucket: TokenBucket) -> tuple[int, np.ndarray]:
    """(number of the first, hashes (n,)) of `bucket`'s documents in a file of tokens.

    Hashes are spread evenly, which tells where those of a bucket are but for some; if that is wrong, more are read.
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
    """(hashes (n,), offsets (n + 1,), starts of targets (n,)) of `bucket`'s documents in a file of tokens."""
    first, hashes = _found(file, bucket)
    if not len(hashes):
        return hashes, np.zeros(1, np.int64), None
    last, targets = first + len(hashes), f"{bucket.split}.targets"
    of_pairs = [(targets, first, last)] if targets in file else []
    offsets, *starts = file.slices((f"{bucket.split}.offsets", first, last + 1), *of_pairs)
    return hashes, offsets, starts[0] if starts else None


def count_tokens(corpus: Store, files: Sequence[str], buckets: Sequence[TokenBucket]) -> list[int]:
    """Tokens in each bucket, over all tokenized `files`. `buckets` holds all buckets, sorted by split and number.

    The work grows with the number of documents, not with files times buckets.
    """
    counts = {split: np.zeros(sum(bucket.split == split for bucket in buckets), np.int64) for split in SPLITS}
    for name in files:
        file = Arrays(corpus, name)
        for split, tokens in counts.items():
            hashes, offsets = (file[f"{split}.{array}"] for array in ("hashes", "offsets"))
            np.add.at(tokens, bucket_numbers(hashes, len(tokens)), np.diff(offsets))
    return [int(counts[bucket.split][bucket.number]) for bucket in buckets]


def bucket_numbers(hashes: np.ndarray, count: int) -> np.ndarray:
    """Numbers (n,) of the buckets of `hashes` (n,): hash * count >> 64, computed in two halves of 32 bits."""
    buckets, half, low = np.uint64(count), np.uint64(32), np.uint64(2**32 - 1)
    return ((hashes >> half) * buckets + ((hashes & low) * buckets >> half)) >> half


def read_bucket(corpus: Store, files: Sequence[str], bucket: TokenBucket) -> Documents:
    """The documents of a bucket from all `files`, in shuffled order."""
    return _gather(corpus, corpus.each(partial(Arrays, corpus), files), bucket)[1]


def merge_tokens(corpus: Store, spec: MergeSpec) -> Result:
    """Merges files of tokens, a range of hashes at a time."""
    files = corpus.each(partial(Arrays, corpus), spec.files)
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for split in SPLITS:
        for array in ("hashes", "offsets", "tokens", "targets"):
            if (name := f"{split}.{array}") in files[0]:
                length = sum(file.shape(name)[0] for file in files)
                length -= len(files) - 1 if array == "offsets" else 0  # each file has one more than documents
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
    """(hashes (n,), tokens of each document, [starts of targets (n,)]) of a bucket in a file of tokens."""
    hashes, offsets, targets = _slice(file, bucket)
    if not len(hashes):
        return hashes, [], []
    (tokens,) = file.slices((f"{bucket.split}.tokens", int(offsets[0]), int(offsets[-1])))
    return hashes, np.split(tokens, offsets[1:-1] - offsets[0]), [] if targets is None else [targets]


def _gather(corpus: Store, files: Sequence[Arrays], bucket: TokenBucket) -> tuple[np.ndarray, Documents]:
    """(hashes (n,), documents) of a bucket from files, in the order of the hash and then of the files."""
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
