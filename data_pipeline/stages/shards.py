"""The shards stage: cuts each bucket of tokens into rows, and writes them as blocks of a WebDataset tar.

A sample of the tar is a block; its key is the id of its first row. Row ids are consecutive across the shards of a
split, so the rows of all shards are counted before a shard is written. With packing `concatenate`, the numbers of
tokens give the numbers of rows.
"""

import hashlib
import math
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from data_pipeline.base import packages
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import blocks, tokenizer
from data_pipeline.corpus.blocks import Block
from data_pipeline.corpus.objectives.objective import Examples, Objective
from data_pipeline.corpus.objectives.randomness import noise_keys
from data_pipeline.corpus.packing import PACKINGS, Rows, Rules, rows_of_tokens
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names, to_read, write_names
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of
from data_pipeline.stages import documents as documents_stage
from data_pipeline.stages import tokenizer as tokenizer_stage
from data_pipeline.stages import tokens
from data_pipeline.stages.dedup import left
from data_pipeline.stages.kinds import ROWS, SHARDS, TOKENIZER, TOKENS
from data_pipeline.stages.stage import Build, Stage
from data_pipeline.stages.tokens import SPLITS, TokenBucket, TokensWritten, buckets_of, count_tokens, read_bucket
from data_pipeline.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class RowsSpec:
    """A bucket, and how it is cut into rows. `files`: path of the list of token files (`write_names`)."""

    bucket: TokenBucket
    config: CorpusConfig
    files: str


@dataclass(frozen=True)
class RowsResult(Result):
    rows: int


@dataclass(frozen=True)
class ShardSpec:
    """A shard. `first_row`: the id of its first row."""

    cut: RowsSpec
    first_row: int
    output: str


@dataclass(frozen=True)
class WrittenBlock:
    """A block: where it is in the shard (bytes), its first row, and its numbers of rows and tokens."""

    offset: int
    length: int
    first_row: int
    rows: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class ShardResult(Result):
    """The counts of a shard.

    Attributes:
        documents: number of documents that begin in the shard.
        dropped_tokens: number of tokens at the end that are too few for a row.
        cut_inputs, cut_targets: number of pairs whose input or target was too long and lost its end.
    """

    split: str
    rows: int
    tokens: int
    documents: int
    dropped_tokens: int
    blocks: list[WrittenBlock]
    cut_inputs: int = 0
    cut_targets: int = 0


Tokenized = Sequence[Finished[TokensWritten]]


def plan_counts(
    config: CorpusConfig, buckets: list[tuple[RowsSpec, str]], documents: Mapping[str, int]
) -> list[Unit[RowsSpec]]:
    """A unit for each of `buckets`, which counts its rows; none if the number of tokens gives the number of rows.

    `documents`: the number of documents of a bucket, by split.
    """
    if config.rows.packing == "concatenate":
        return []
    memory = {split: _memory(config, number) for split, number in documents.items()}
    return [Unit(_name(spec.bucket), spec, inputs, memory=memory[spec.bucket.split]) for spec, inputs in buckets]


def plan(
    config: CorpusConfig,
    store: Store,
    buckets: list[tuple[RowsSpec, str]],
    files: Sequence[str],
    documents: Mapping[str, int],
    counted: Sequence[Finished[RowsResult]],
) -> list[Unit[ShardSpec]]:
    """A unit for each of `buckets`, which writes its shard.

    `files`: the files of tokens, merged or not. `documents`: the number of documents of a bucket, by split.
    """
    rows = [unit.result.rows for unit in counted] or _rows_of_buckets(config, store, buckets, files)
    units = []
    first_row = dict.fromkeys(SPLITS, 0)
    for (cut, inputs), count in zip(buckets, rows, strict=True):
        split = cut.bucket.split
        output = f"shards/{split}/shard-{cut.bucket.number:05d}.tar"
        own = {"first_row": first_row[split], "rows_per_block": config.shards.rows_per_block}
        spec = ShardSpec(cut, first_row[split], output)
        memory = _memory(config, documents[split])
        units.append(Unit(_name(cut.bucket), spec, fingerprint([inputs, own]), (output,), memory=memory))
        first_row[split] += count
    return units


def _rows_of_buckets(
    config: CorpusConfig, store: Store, buckets: Sequence[tuple[RowsSpec, str]], files: Sequence[str]
) -> list[int]:
    """Number of rows of each bucket, by its tokens. They are kept, since counting reads the hashes of all documents."""
    kept = f".stages/plans/{fingerprint(['rows', [inputs for _, inputs in buckets]])}.json"
    rows = store.read_valid_json(kept, list[int])
    if rows is None or len(rows) != len(buckets):
        vocabulary = tokenizer.in_corpus(store, **config.tokenizer.layout).vocabulary
        rules = [rules_of(spec.bucket, config, vocabulary) for spec, _ in buckets]
        counts = count_tokens(store, files, [spec.bucket for spec, _ in buckets])
        rows = [len(rows_of_tokens(*of_bucket)[0]) - 1 for of_bucket in zip(counts, rules, strict=True)]
        store.write_json(kept, rows)
    return rows


def count_rows(context: Context, spec: RowsSpec) -> RowsResult:
    return RowsResult(len(_pack(context, spec)[0]))


def write_shard(context: Context, spec: ShardSpec) -> ShardResult:
    """Cuts a bucket into rows and writes them."""
    cut, config = spec.cut, spec.cut.config
    rows_per_block = config.shards.rows_per_block
    rows, rules = _pack(context, cut)
    written: list[WrittenBlock] = []
    with context.store.put(spec.output) as path:
        with path.open("wb") as file, tarfile.open(fileobj=file, mode="w|") as shard:
            for start in range(0, len(rows), rows_per_block):
                stop = min(start + rows_per_block, len(rows))
                first_row, offset = spec.first_row + start, shard.offset
                columns = {name: values[start:stop] for name, values in rows.columns.items()}
                block = blocks.of_rows(rows.tokens, rows.offsets[start : stop + 1], rows.documents, columns)
                if config.rows.apply_at == "build":
                    keys = noise_keys(config.seed, cut.bucket.split, 0, np.arange(first_row, spec.first_row + stop))
                    block = blocks.of_examples(_examples(rows, start, stop, block, keys, rules))
                blocks.add(shard, block, first_row)
                length, count = shard.offset - offset, blocks.count_tokens(block)
                written.append(WrittenBlock(offset, length, first_row, stop - start, count, sha256=""))
        written = list(_with_checksums(path, written))
    return ShardResult(
        split=cut.bucket.split,
        rows=len(rows),
        tokens=int(rows.offsets[-1]),
        documents=int(np.count_nonzero(rows.documents < rows.offsets[-1])),
        dropped_tokens=rows.dropped,
        blocks=written,
        cut_inputs=rows.cut_inputs,
        cut_targets=rows.cut_targets,
    )


# For each token of a shard, beside the ids, which are held twice: read and sorted. Most is what finds the rows' tokens.
_CONCATENATED, _COMPLETE, _OF_PAIRS = 1, 8, 28
_OF_DOCUMENT = 200  # bytes: its tokens are an array of their own until they are in order
_MEMORY = (
    f"{4 + _CONCATENATED} bytes for each token of a shard, {4 + _COMPLETE} with `complete_documents`, "
    f"{4 + _OF_PAIRS} with pairs; 4 more if there are more than 65,536 ids; and {_OF_DOCUMENT} for each document"
)


def _memory(config: CorpusConfig, documents: int) -> int:
    of_rows = _CONCATENATED if config.rows.packing == "concatenate" else _COMPLETE
    bytes_of_token = 2 * tokens.id_bytes(config.tokenizer) + (_OF_PAIRS if config.pairs else of_rows)
    return bytes_of_token * config.tokens_per_shard + _OF_DOCUMENT * documents


COUNT = Stage(
    "rows",
    1,
    count_rows,
    "lower shards.blocks_per_shard",
    plan=lambda build: plan_counts(build.config, _buckets(build)[0], _documents(build)),
    unit="one bucket of the shuffle, if the rows don't follow from the number of tokens",
    reads=(TOKENS, TOKENIZER),
    writes=ROWS,
    memory=_MEMORY,
)
STAGE = Stage(
    "shards",
    4,
    write_shard,
    "lower shards.blocks_per_shard",
    plan=lambda build: plan(build.config, build.store, *_buckets(build), _documents(build), build.of(COUNT)),
    unit="one bucket of the shuffle",
    reads=(TOKENS, TOKENIZER, ROWS),
    writes=SHARDS,
    memory=_MEMORY,
    completes=(SHARDS,),
)


def _buckets(build: Build) -> tuple[list[tuple[RowsSpec, str]], list[str]]:
    """The spec and the fingerprint of each bucket, and the files of tokens, merged or not."""
    tokenized, (trained,) = build.of(tokens.STAGE), build.of(tokenizer_stage.STAGE)
    readers = len(buckets_of(build.config, tokenized))
    files = to_read(outputs_of(tokenized), build.of(tokens.MERGED), readers, build.store.most_opens)
    return specs_of(build.config, build.store, tokenized, files, trained), files


def _documents(build: Build) -> dict[str, int]:
    """The number of documents of a bucket, by split."""
    buckets = Counter(bucket.split for bucket in buckets_of(build.config, build.of(tokens.STAGE)))
    return {split: math.ceil(documents_stage.total(left(build), split) / number) for split, number in buckets.items()}


def _name(bucket: TokenBucket) -> str:
    return f"{bucket.split}-{bucket.number:05d}"


def specs_of(
    config: CorpusConfig, store: Store, tokenized: Tokenized, files: Sequence[str], trained: Finished
) -> list[tuple[RowsSpec, str]]:
    """The spec of each bucket, and a fingerprint of all that its rows depend on.

    `files`: the files of the units `tokenized`, merged or not. Every bucket reads all of them, so their names and
    checksums are collected once. The fingerprint doesn't depend on how files are merged.
    """
    listed = write_names(store, files)
    read = [[unit.checksums for unit in tokenized], tokenizer_stage.identity(config.tokenizer, trained)]
    checksums = fingerprint([*read, *sorted(packages_of(config.rows.objective))])
    common = {"seed": config.seed, "rows": config.rows, "tokenizer": config.tokenizer.layout}
    work = []
    for bucket in buckets_of(config, tokenized):
        settings = {"split": bucket.split, "bucket": bucket.number, "buckets": bucket.count, **common}
        work.append((RowsSpec(bucket, config, listed), fingerprint([settings, checksums])))
    return work


def packages_of(settings: Any) -> set[str]:
    """The packages that offer an objective and the objectives in its settings, with their versions; none for what
    ships."""
    inside, found = list[Any](), set[str]()
    if isinstance(settings, Objective):
        found = {package for package in [packages.offering("objectives", settings.name)] if package}
    if isinstance(settings, BaseModel):
        inside = [getattr(settings, name) for name in type(settings).model_fields]
    elif isinstance(settings, Mapping):
        inside = [*settings.values()]
    elif isinstance(settings, list | tuple):
        inside = [*settings]
    return found.union(*map(packages_of, inside))


def rules_of(bucket: TokenBucket, config: CorpusConfig, vocabulary: Vocabulary) -> Rules:
    """How the documents of a bucket are cut into rows."""
    key = f"{bucket.split}/{bucket.number}-of-{bucket.count}"
    return Rules(config.rows.objective, vocabulary, bucket.split == "validation", key, config.seed)


def _pack(context: Context, spec: RowsSpec) -> tuple[Rows, Rules]:
    store, layout = context.store, spec.config.tokenizer.layout
    vocabulary = context.cached("vocabulary", lambda: tokenizer.in_corpus(store, **layout).vocabulary)
    rules = rules_of(spec.bucket, spec.config, vocabulary)
    documents = read_bucket(store, read_names(store, spec.files), spec.bucket)
    return PACKINGS[spec.config.rows.packing](documents, rules), rules


def _examples(rows: Rows, start: int, stop: int, block: Block, keys: np.ndarray, rules: Rules) -> Examples:
    if rows.examples is not None:
        return rows.examples.part(start, stop)
    numbers = list(range(stop - start))
    ids = blocks.rows_in([block] * len(numbers), numbers)
    return rules.objective.apply(ids, keys, rules.vocabulary, block)


def _with_checksums(path: Path, written: list[WrittenBlock]) -> Iterator[WrittenBlock]:
    with path.open("rb") as file:
        for block in written:
            file.seek(block.offset)
            yield replace(block, sha256=hashlib.sha256(file.read(block.length)).hexdigest())
