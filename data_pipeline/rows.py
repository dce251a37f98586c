"""Documents to rows: tokenize each file of documents, deal the documents into buckets, concatenate and cut each bucket.

The order is a global shuffle: a document's place is a hash of (seed, id). A tokenized file is sorted by that hash, so
a bucket, a range of hashes, is one slice of every file, and the number of files grows with the units alone.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from data_pipeline import tokenizer
from data_pipeline.atomic import atomic_path, fingerprint
from data_pipeline.config import CorpusConfig
from data_pipeline.packing.rows import Documents
from data_pipeline.parts import Part, read_documents
from data_pipeline.safetensors_file import os_errors
from data_pipeline.work_units import Finished, Stage, Unit

SPLITS = ("train", "validation")
_ENCODE_BATCH = 512


def token_dtype(vocabulary_size: int) -> type[np.unsignedinteger]:
    """uint16 where every id fits, else uint32."""
    return np.uint16 if vocabulary_size <= 65_536 else np.uint32


def plan(config: CorpusConfig, parts: list[Part], trained: Finished) -> list[Unit]:
    """One unit for each part."""
    units = []
    for part in parts:
        output = f".stages/tokens/{part.name}.safetensors"
        spec = {
            "part": part.path,
            "output": output,
            "seed": config.seed,
            "tokenizer": config.tokenizer.layout,
            "end_of_document": config.rows.end_of_document,
            "pairs": config.pairs,
        }
        settings = [config.seed, config.tokenizer.layout, config.rows.end_of_document, config.pairs]
        inputs = [settings, part.checksums, trained.checksums]
        units.append(Unit(part.name, spec, fingerprint(inputs), (output,), part.text_bytes))
    return units


def tokenize(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Token ids of every document of one part, by split, in the order of their hashes."""
    model = tokenizer.load(corpus, spec["tokenizer"])
    dtype = token_dtype(model.size)
    tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    hashes: dict[str, list[int]] = {split: [] for split in SPLITS}
    targets: dict[str, list[int]] = {split: [] for split in SPLITS}
    documents = read_documents(corpus, spec["part"], ["id", "split", "text", "target"])
    end = [model.vocabulary.eos] if spec["end_of_document"] else []
    while batch := list(islice(documents, _ENCODE_BATCH)):
        texts = model.encode([document["text"] for document in batch])
        of_targets = model.encode([document["target"] for document in batch]) if spec["pairs"] else [[]] * len(batch)
        for document, text, target in zip(batch, texts, of_targets, strict=True):
            tokens[document["split"]].append(np.array([*text, *target, *end], dtype=dtype))
            hashes[document["split"]].append(_shuffle_hash(spec["seed"], document["id"]))
            targets[document["split"]].append(len(text))
    arrays: dict[str, np.ndarray] = {}
    for split in SPLITS:
        order = np.argsort(np.array(hashes[split], dtype=np.uint64), kind="stable")
        pieces = [tokens[split][position] for position in order]
        lengths = np.array([0, *(len(piece) for piece in pieces)], dtype=np.int64)
        arrays[f"{split}.hashes"] = np.array(hashes[split], dtype=np.uint64)[order]
        arrays[f"{split}.offsets"] = np.cumsum(lengths)
        arrays[f"{split}.tokens"] = np.concatenate([np.zeros(0, dtype), *pieces])
        if spec["pairs"]:
            arrays[f"{split}.targets"] = np.array(targets[split], dtype=np.int64)[order]
    with atomic_path(corpus / spec["output"]) as path, os_errors():
        save_file(arrays, path)
    return {"tokens": {split: int(arrays[f"{split}.offsets"][-1]) for split in SPLITS}}


STAGE = Stage("tokens", 2, tokenize)


def _shuffle_hash(seed: int, identity: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/shuffle/{identity}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Bucket:
    """A range of the shuffle's hashes, `number` of `count`: the documents of one shard."""

    split: str
    number: int
    count: int

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last hash, both included."""
        return -(-(self.number << 64) // self.count), -(-((self.number + 1) << 64) // self.count) - 1


class _OnDisk(Sequence[int]):
    """An array in a file, of which only the numbers that are asked for are read."""

    def __init__(self, array: Any):
        self._array, self._length = array, array.get_shape()[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: Any) -> Any:
        return int(self._array[at : at + 1][0])


def _slice(file: Any, bucket: Bucket) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
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


def count_tokens(corpus: Path, files: Sequence[str], buckets: Sequence[Bucket]) -> list[int]:
    """Tokens in each bucket, over all tokenized `files`; reads each file once."""
    bounds = np.array([bucket.bounds for bucket in buckets], dtype=np.uint64)
    counts = np.zeros(len(buckets), dtype=np.int64)
    for name in files:
        with safe_open(corpus / name, "numpy") as file:
            for split in SPLITS:
                own = np.array([bucket.split == split for bucket in buckets])
                hashes, offsets = (file.get_tensor(f"{split}.{array}") for array in ("hashes", "offsets"))
                first = np.searchsorted(hashes, bounds[own, 0], "left")
                end = np.searchsorted(hashes, bounds[own, 1], "right")
                counts[own] += offsets[end] - offsets[first]
    return counts.tolist()


def read_bucket(corpus: Path, files: Sequence[str], bucket: Bucket) -> Documents:
    """The documents of a bucket, of all `files`, in shuffled order."""
    hashes: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for name in files:
        with safe_open(corpus / name, "numpy") as file:
            found, offsets, target_starts = _slice(file, bucket)
            if len(found):
                tokens = file.get_slice(f"{bucket.split}.tokens")[int(offsets[0]) : int(offsets[-1])]
                hashes.append(found)
                documents += np.split(tokens, offsets[1:-1] - offsets[0])
                targets += [] if target_starts is None else [target_starts]
    if not documents:
        nothing = np.zeros(0, np.int64)
        return Documents(np.zeros(0, np.uint16), np.zeros(1, np.int64), nothing)
    order = np.argsort(np.concatenate(hashes), kind="stable")
    ordered = [documents[position] for position in order]
    starts = np.cumsum([0, *(len(document) for document in ordered)], dtype=np.int64)
    return Documents(np.concatenate(ordered), starts, np.concatenate(targets)[order] if targets else None)
