"""`data-pipeline trace`: what happened to the documents with an id or a URL, as text and as JSON."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from data_pipeline import tokenizer
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus import MANIFEST
from data_pipeline.execution.work_units import read_finished
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import counted
from data_pipeline.packing.examples import rows_of_pairs
from data_pipeline.packing.rows import Documents, Rules, complete_documents, rows_of_tokens
from data_pipeline.stages import tokens
from data_pipeline.stages.shards import rules_of
from data_pipeline.stages.token_buckets import TokenBucket, bucket_numbers, read_bucket_with_hashes
from data_pipeline.tools.document_trace import (
    BlockLocation,
    DocumentTrace,
    Drop,
    StepTrace,
    TokenLocation,
    trace_records,
)
from data_pipeline.tools.finished_build import FinishedBuild, records_named

_WIDTH, _NAME, _QUOTED = 80, 12, 63  # columns: of all, of names, of a text between quotation marks
_DROPS_SHOWN = 5  # of each rule


def trace(build: FinishedBuild, name: str) -> list[DocumentTrace]:
    """The records that have the id or URL `name`. Raises UserError if no input has one."""
    found = []
    for built, ordinals in records_named(build, name):
        for record in trace_records(build, built, ordinals, find_copies=True):
            if not record.dropped_by:
                record.location = locate_tokens(build, record.id, record.split)
            found.append(record)
    if not found:
        raise UserError(f"{name}: its file has no such record")
    return found


def as_json(found: DocumentTrace) -> dict[str, object]:
    """A trace with every drop in full, but the number of characters for each text."""
    return {
        "id": found.id,
        "file": found.path,
        "url": found.url,
        "title": found.title,
        "kept": not found.dropped_by,
        "rule": found.dropped_by,
        "characters": len(found.text),
        "steps": [
            {
                "step": step.step,
                "characters": None if step.text is None else len(step.text),
                "dropped": [asdict(drop) for drop in step.drops],
            }
            for step in found.steps
        ],
        "language": found.language,
        "split": found.split,
        "place": asdict(found.location) if found.location else None,
    }


def as_text(found: DocumentTrace) -> str:
    """A trace in lines of 80 columns."""
    entries = [("file", found.path.removeprefix("file://")), ("url", found.url), ("title", found.title)]
    entries.append(("read", counted(len(found.text), "character") if found.text else ""))
    for step in found.steps:
        entries += _step(step, found)
    if found.dropped_by:
        entries.append(("dropped", f"by {found.dropped_by}"))
    else:
        language = f", language {found.language}" if found.language else ""
        entries += [("kept", f"split {found.split}{language}"), *_location(found.location)]
    return "\n".join([found.id, *(line for name, text in entries for line in _wrapped(name, text))])


def _step(step: StepTrace, found: DocumentTrace) -> Iterator[tuple[str, str]]:
    left = "the document is dropped" if step.text is None else f"{counted(len(step.text), 'character')} left"
    yield step.step, left if step.drops or step.step == "cleaning" else "nothing dropped"
    by_rule: dict[str, list[Drop]] = {}
    for drop in step.drops:
        by_rule.setdefault(drop.rule, []).append(drop)
    for rule, drops in by_rule.items():
        yield "", f"{rule}: {len(drops):,}" if len(drops) > 1 else rule
        for drop in drops[:_DROPS_SHOWN]:
            if drop.what and drop.what not in (found.url, found.text):
                what = " ".join(drop.what.split())
                yield "", f'"{what}"' if len(what) <= _QUOTED else f'"{what[: _QUOTED - 1]}…"'
            if drop.stays_on:
                yield "", f"a copy stays on {drop.stays_on}"
        if len(drops) > _DROPS_SHOWN:
            yield "", f"and {len(drops) - _DROPS_SHOWN:,} more (--json has them all)"


def _location(location: TokenLocation | None) -> Iterator[tuple[str, str]]:
    if location is None:
        return
    yield "tokens", f"{location.tokens:,}"
    if location.rows is None:
        yield "rows", f"of {location.shard}; they mix sentences of several documents"
    elif not location.rows:
        yield "rows", f"none: the tokens are in the tail of {location.shard} that fills no row"
    else:
        first, last = location.rows
        yield "rows", f"{first:,}" if first == last else f"{first:,} to {last:,}"
        yield "shard", location.shard
        for block in location.blocks:
            yield "block", f"{block.number:,}: bytes {block.offset:,} to {block.offset + block.length - 1:,}"


def _wrapped(name: str, text: str) -> list[str]:
    """The lines of `text` beside `name`; none without a text."""
    head = f"  {name:{_NAME}} "
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def locate_tokens(build: FinishedBuild, identity: str, split: str) -> TokenLocation | None:
    """Where the document `identity` of `split` has its tokens; None without shards or such a document."""
    if not build.corpus.exists(MANIFEST):
        return None
    corpus, config = open_corpus(str(build.corpus)), build.config
    files = [name for unit in read_finished(tokens.STAGE, build.corpus) for name in unit.outputs]
    shards = corpus.manifest.splits[split].shards if split in corpus.manifest.splits else []
    (together,) = (source.together for source in config.sources if source.name == identity.partition("/")[0])
    hash_ = tokens.shuffle_hash(config.seed, identity, together)
    if not shards:
        return None
    number = int(bucket_numbers(np.array([hash_], np.uint64), len(shards))[0])
    bucket = TokenBucket(split, number, len(shards))
    hashes, documents = read_bucket_with_hashes(build.corpus, files, bucket)
    index = int(np.searchsorted(hashes, np.uint64(hash_)))
    if index == len(hashes) or int(hashes[index]) != hash_:
        return None
    count = int(documents.starts[index + 1] - documents.starts[index])
    vocabulary = tokenizer.in_corpus(build.corpus, **config.tokenizer.layout).vocabulary
    rules = rules_of(bucket, config, vocabulary)
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
