"""Writes what a finished build records: blocks.parquet, lineage.parquet, manifest.json and the settings."""

import json
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.base import hub
from data_pipeline.base.arrow_tables import table_of
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.packages import code_version, offering
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.corpus import (
    FORMAT_VERSION,
    LINEAGE,
    MANIFEST,
    DocumentsEntry,
    FileEntry,
    InputEntry,
    Lineage,
    Manifest,
    RowsEntry,
    ShardEntry,
    SplitEntry,
)
from data_pipeline.corpus.tokenizer import in_corpus
from data_pipeline.engine.work_units import Finished
from data_pipeline.sources.formats import FORMATS
from data_pipeline.stages import documents, shards
from data_pipeline.stages.dedup import left
from data_pipeline.stages.shards import ShardResult
from data_pipeline.stages.stage import Build

BLOCKS = "blocks.parquet"
_BLOCK_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("split", "shard")]
    + [(name, pa.int64()) for name in ("offset", "length", "first_row", "rows", "tokens")]
    + [("sha256", pa.string())]
)


def write(build: Build) -> None:
    """Writes blocks.parquet and lineage.parquet, then manifest.json, which completes the corpus."""
    config, store = build.config, build.store
    tokenizer = in_corpus(store, **config.tokenizer.layout)
    rows = RowsEntry(**dict(config.rows), raw_length=config.rows.objective.raw_length)
    splits: dict[str, list[Finished[ShardResult]]] = {}
    for unit in build.of(shards.STAGE):
        splits.setdefault(unit.result.split, []).append(unit)
    blocks = [
        (unit.result.split, name, *astuple(block))
        for unit in build.of(shards.STAGE)
        for name in unit.outputs
        for block in unit.result.blocks
    ]
    lineage = Lineage(
        [
            InputEntry(unit.result.source, read.file, read.bytes, read.sha256, read.status)
            for unit in build.of(documents.STAGE)
            for read in unit.result.inputs
            if read.range.start == 0
        ],
        [
            DocumentsEntry(name, unit.outputs[name].bytes, unit.outputs[name].sha256)
            for unit in left(build)
            for name in unit.result.files
        ],
    )
    for file, table in {BLOCKS: table_of(blocks, _BLOCK_SCHEMA), LINEAGE: lineage.table()}.items():
        with store.put(file) as path:
            pq.write_table(table, path)
    identity = {
        "tokenizer": [tokenizer.sha256, config.tokenizer.layout],
        "rows": rows,
        "seed": config.seed,
        "shards": [checksum for unit in build.of(shards.STAGE) for checksum in unit.checksums],
    }
    written = Manifest(
        format_version=FORMAT_VERSION,
        name=config.name,
        fingerprint=fingerprint(identity),
        seed=config.seed,
        tokenizer=tokenizer.describe(),
        rows=rows,
        splits={name: _split(units) for name, units in splits.items()},
        config=recorded(config),
        blocks=FileEntry(BLOCKS, store.written(BLOCKS)[1]),
        lineage=FileEntry(LINEAGE, store.written(LINEAGE)[1]),
        code_version=code_version(),
        objective_from=offering("objectives", config.rows.objective.name),
    )
    store.write_json(MANIFEST, written, sealed=True)


def _split(units: Sequence[Finished[ShardResult]]) -> SplitEntry:
    shards = [
        ShardEntry(name, unit.result.rows, output.bytes, output.sha256)
        for unit in units
        for name, output in unit.outputs.items()
    ]
    results = [unit.result for unit in units]
    rows, tokens, documents = (
        sum(getattr(result, count) for result in results) for count in ("rows", "tokens", "documents")
    )
    return SplitEntry(rows, tokens, documents, shards)


def recorded(config: CorpusConfig) -> dict[str, Any]:
    """The settings that documents, tokenizer and shards were made with, defaults included, as JSON has them.

    Paths are left out: lineage.parquet lists the files that were read, by name and checksum. Commits of the Hugging
    Face Hub's repositories are included, and the installed packages that offer what doesn't ship.
    """
    settings = {
        "sources": [
            {
                **source.model_dump(include={"name", "format", "language"}),
                "options": FORMATS[source.format].options.model_validate(source.options).model_dump(),
                "cleaning": config.cleaning_of(source).described(),
                **({"commits": commits} if (commits := hub.commits(source.path)) else {}),
            }
            for source in config.sources
        ],
        "dedup": config.dedup.model_dump(),
        "decontamination": config.decontamination.model_dump(exclude={"sets": {"__all__": {"path"}}}),
        **({"steps": [step.described() for step in config.steps]} if config.steps else {}),
        "split": config.split.model_dump(),
        "tokenizer": config.tokenizer.model_dump(exclude={"path"}),
        "shards": config.shards.model_dump(),
        "bytes_per_shared_unit": config.bytes_per_shared_unit,
        "bytes_per_unit": config.bytes_per_unit,
        "characters_per_part": config.characters_per_part,
        **({"packages": packages} if (packages := _packages(config)) else {}),
    }
    as_json: dict[str, Any] = json.loads(json.dumps(settings))  # keys become strings, as when read from a file
    return as_json


def _packages(config: CorpusConfig) -> list[str]:
    """The installed packages, with their versions, that offer formats, steps, the tokenizer and objectives."""
    found = {offering("sources", name) for name in {source.format for source in config.sources}}
    found |= {step.package for steps in config.all_steps.values() for step in steps}
    found |= {offering("tokenizers", config.tokenizer.kind), *shards.packages_of(config.rows.objective)}
    return sorted(found - {""})
