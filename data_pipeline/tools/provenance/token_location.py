"""Where the tokens of a document are in the shards."""

from dataclasses import dataclass

import numpy as np

from data_pipeline import tokenizer
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.manifest import FILE
from data_pipeline.execution.buckets import TokenBucket, bucket_numbers, read_bucket_with_hashes
from data_pipeline.execution.work_units import read_finished
from data_pipeline.packing.examples import rows_of_pairs
from data_pipeline.packing.rows import Documents, Rules, complete_documents, rows_of_tokens
from data_pipeline.stages import tokens
from data_pipeline.stages.shards import RowsSpec, rules_of
from data_pipeline.tools.provenance.finished_build import FinishedBuild


@dataclass(frozen=True)
class BlockLocation:
    """A block of the shard: its number, and its bytes."""

    number: int
    offset: int
    length: int


@dataclass(frozen=True)
class TokenLocation:
    """The `tokens` tokens of a document, in `rows` (the first and the last, ids in its split) and `blocks` of `shard`.

    `rows` is () if the tokens are in the bucket's dropped tail, None for rows that mix sentences of several documents.
    """

    tokens: int
    shard: str
    rows: tuple[int, ...] | None
    blocks: list[BlockLocation]


def locate_tokens(build: FinishedBuild, identity: str, split: str) -> TokenLocation | None:
    """Where the document `identity` of `split` has its tokens; None without shards or such a document."""
    if not (build.directory / FILE).exists():
        return None
    corpus, config = open_corpus(build.directory), build.config
    files = [name for unit in read_finished(tokens.STAGE, build.directory) for name in unit.outputs]
    shards = corpus.manifest.splits[split].shards if split in corpus.manifest.splits else []
    (together,) = (source.together for source in config.sources if source.name == identity.partition("/")[0])
    hash_ = tokens.shuffle_hash(config.seed, identity, together)
    if not shards:
        return None
    number = int(bucket_numbers(np.array([hash_], np.uint64), len(shards))[0])
    bucket = TokenBucket(split, number, len(shards))
    hashes, documents = read_bucket_with_hashes(build.directory, files, bucket)
    index = int(np.searchsorted(hashes, np.uint64(hash_)))
    if index == len(hashes) or int(hashes[index]) != hash_:
        return None
    count = int(documents.starts[index + 1] - documents.starts[index])
    vocabulary = tokenizer.read(build.directory, **config.tokenizer.layout).vocabulary
    rules = rules_of(RowsSpec(bucket, config.seed, config.rows, config.tokenizer, ""), vocabulary)
    rows = rows_of_document(documents, rules, config.rows.packing, index)
    shard = shards[number].name
    if not rows:
        return TokenLocation(count, shard, None if rows is None else (), [])
    blocks = corpus.blocks(split)
    in_shard = blocks.of_shard(shard)
    first, last = (int(blocks.first_row[in_shard[0]]) + row for row in (rows[0], rows[-1]))
    touched = [
        BlockLocation(position, int(blocks.offset[block]), int(blocks.length[block]))
        for position, block in enumerate(in_shard.tolist())
        if blocks.first_row[block] <= last and first < blocks.first_row[block] + blocks.rows[block]
    ]
    return TokenLocation(count, shard, (first, last), touched)


def rows_of_document(documents: Documents, rules: Rules, packing: str, number: int) -> range | None:
    """The rows that hold document `number` of a bucket; empty if its tokens are in no row.

    None for sentence_pairs, whose rows mix the sentences of several documents.
    """
    if packing == "concatenate":
        offsets, _ = rows_of_tokens(len(documents.tokens), rules)
        start, stop = documents.starts[number : number + 2].tolist()
        first, end = np.searchsorted(offsets, [start, stop], side="right").tolist()
        end -= int(offsets[end - 1] == stop)
        return range(first - 1, min(end, len(offsets) - 1)) if stop > start else range(0)
    if packing == "complete_documents":  # each document makes rows of its own
        return range(*(len(complete_documents(_first(documents, count), rules)) for count in (number, number + 1)))
    if packing == "examples":
        row = int(rows_of_pairs(documents, rules)[number])
        return range(row, row + 1)
    return None


def _first(documents: Documents, count: int) -> Documents:
    """The first `count` of `documents`."""
    targets = None if documents.targets is None else documents.targets[:count]
    return Documents(documents.tokens[: documents.starts[count]], documents.starts[: count + 1], targets)
