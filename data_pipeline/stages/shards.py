"""The shards stage: each bucket of tokens becomes one WebDataset tar of blocks of rows.

Each sample of the tar is a block, whose key is the id of its first row. Row ids are consecutive across a split's
shards. The rows of all shards are therefore counted before any is written, from the number of tokens alone if possible.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline import tokenizer
from data_pipeline.config import CorpusConfig, RowsConfig
from data_pipeline.corpus import blocks
from data_pipeline.corpus.blocks import Block
from data_pipeline.execution.buckets import SPLITS, TokenBucket, count_tokens, read_bucket
from data_pipeline.execution.name_lists import read_names, write_names
from data_pipeline.execution.work_units import Finished, Stage, Unit
from data_pipeline.foundation.atomic import atomic_file, fingerprint
from data_pipeline.objectives import Examples
from data_pipeline.objectives.randomness import noise_keys
from data_pipeline.packing import PACKINGS, Rows, Rules, rows_of_tokens
from data_pipeline.text.vocabulary import Vocabulary

_KEY_DIGITS = 12


def plan_counts(config: CorpusConfig, corpus: Path, tokenized: list[Finished], trained: Finished) -> list[Unit]:
    """One unit for each bucket, to count its rows; none if the rows follow from the number of tokens."""
    if config.rows.packing == "concatenate":
        return []
    return [Unit(_name(bucket), *work) for bucket, work in _work(config, corpus, tokenized, trained)]


def plan(
    config: CorpusConfig, corpus: Path, tokenized: list[Finished], trained: Finished, counted: list[Finished]
) -> list[Unit]:
    """One unit for each bucket. A split's tokens determine its number of buckets."""
    planned = _work(config, corpus, tokenized, trained)
    if counted:
        rows = [unit.result["rows"] for unit in counted]
    else:
        files = [name for unit in tokenized for name in unit.outputs]
        vocabulary = tokenizer.load(corpus, config.tokenizer.layout).vocabulary
        buckets = [bucket for bucket, _ in planned]
        rules = [_rules(config.rows, bucket, config.seed, vocabulary) for bucket in buckets]
        tokens = count_tokens(corpus, files, buckets)
        rows = [len(rows_of_tokens(*of_bucket)[0]) - 1 for of_bucket in zip(tokens, rules, strict=True)]
    units = []
    first_row = dict.fromkeys(SPLITS, 0)
    for (bucket, (spec, inputs)), count in zip(planned, rows, strict=True):
        output = f"shards/{bucket.split}/shard-{bucket.number:05d}.tar"
        own = {"first_row": first_row[bucket.split], "rows_per_block": config.shards.rows_per_block}
        units.append(Unit(_name(bucket), {**spec, **own, "output": output}, fingerprint([inputs, own]), (output,)))
        first_row[bucket.split] += count
    return units


def count_rows(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    return {"rows": len(_pack(corpus, spec)[0])}


def write_shard(corpus: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Cuts one bucket into rows and writes them; returns the shard's blocks and counts."""
    import webdataset  # imports torch, which reading a manifest doesn't need

    rows, rules = _pack(corpus, spec)
    written: list[dict[str, Any]] = []
    path = corpus / spec["output"]
    with atomic_file(path) as file:
        with webdataset.TarWriter(file, mtime=0) as writer:
            for start in range(0, len(rows), spec["rows_per_block"]):
                stop = min(start + spec["rows_per_block"], len(rows))
                first_row, offset = spec["first_row"] + start, writer.tarstream.offset
                columns = {name: values[start:stop] for name, values in rows.columns.items()}
                block = blocks.of_rows(rows.tokens, rows.offsets[start : stop + 1], rows.documents, columns)
                if spec["rows"]["apply_at"] == "build":
                    keys = noise_keys(spec["seed"], spec["split"], 0, np.arange(first_row, spec["first_row"] + stop))
                    block = blocks.of_examples(_examples(rows, start, stop, block, keys, rules))
                writer.write({"__key__": f"{first_row:0{_KEY_DIGITS}d}", **blocks.as_members(block)})
                written.append(
                    {
                        "offset": offset,
                        "length": writer.tarstream.offset - offset,
                        "first_row": first_row,
                        "rows": stop - start,
                        "tokens": blocks.count_tokens(block),
                    }
                )
        _add_checksums(Path(file.name), written)
    return {
        "shard": path.name,
        "split": spec["split"],
        "rows": len(rows),
        "tokens": int(rows.offsets[-1]),
        "documents": int(np.count_nonzero(rows.documents < rows.offsets[-1])),
        "dropped_tokens": rows.dropped,
        "blocks": written,
    }


COUNT = Stage("rows", 1, count_rows, "lower shards.blocks_per_shard")
STAGE = Stage("shards", 4, write_shard, "lower shards.blocks_per_shard")


def _buckets(config: CorpusConfig, tokenized: list[Finished]) -> list[TokenBucket]:
    buckets = []
    for split in SPLITS:
        count = config.buckets(sum(unit.result["tokens"][split] for unit in tokenized))
        buckets += [TokenBucket(split, number, count) for number in range(count)]
    return buckets


def _name(bucket: TokenBucket) -> str:
    return f"{bucket.split}-{bucket.number:05d}"


def _work(
    config: CorpusConfig, corpus: Path, tokenized: list[Finished], trained: Finished
) -> list[tuple[TokenBucket, tuple[dict[str, Any], str]]]:
    """Each bucket with the (spec, fingerprint of inputs) of the unit that cuts it into rows.

    Every bucket reads all tokenized files. Their names and checksums are collected once, not once for each bucket.
    """
    files = write_names(corpus, [name for unit in tokenized for name in unit.outputs])
    checksums = fingerprint([[unit.checksums for unit in tokenized], trained.checksums])
    common = {"seed": config.seed, "rows": config.rows.model_dump(), "tokenizer": config.tokenizer.layout}
    work = []
    for bucket in _buckets(config, tokenized):
        settings = {"split": bucket.split, "bucket": bucket.number, "buckets": bucket.count, **common}
        work.append((bucket, ({**settings, "files": files}, fingerprint([settings, checksums]))))
    return work


def _rules(rows: RowsConfig, bucket: TokenBucket, seed: int, vocabulary: Vocabulary) -> Rules:
    key = f"{bucket.split}/{bucket.number}-of-{bucket.count}"
    return Rules(rows.objective, vocabulary, bucket.split == "validation", key, seed)


def _pack(corpus: Path, spec: dict[str, Any]) -> tuple[Rows, Rules]:
    settings = RowsConfig.model_validate(spec["rows"])
    bucket = TokenBucket(spec["split"], spec["bucket"], spec["buckets"])
    vocabulary = tokenizer.load(corpus, spec["tokenizer"]).vocabulary
    rules = _rules(settings, bucket, spec["seed"], vocabulary)
    return PACKINGS[settings.packing](read_bucket(corpus, read_names(corpus, spec["files"]), bucket), rules), rules


def _examples(rows: Rows, start: int, stop: int, block: Block, keys: np.ndarray, rules: Rules) -> Examples:
    if rows.examples is not None:
        return rows.examples.part(start, stop)
    places = list(range(stop - start))
    tokens = blocks.rows_in([block] * len(places), places)
    return rules.objective.apply(tokens, keys, rules.vocabulary, block)


def _add_checksums(path: Path, written: list[dict[str, Any]]) -> None:
    with path.open("rb") as file:
        for block in written:
            file.seek(block["offset"])
            block["sha256"] = hashlib.sha256(file.read(block["length"])).hexdigest()
