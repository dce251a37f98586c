"""The manifest of a finished corpus: shards, blocks, counts, checksums and lineage; and checks against its files."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.blocks import count_rows, decode_block
from data_pipeline.corpus.corpus import FORMAT_VERSION, Blocks, Corpus
from data_pipeline.execution.work_units import Finished
from data_pipeline.foundation.atomic import atomic_path, fingerprint, sha256, write_json
from data_pipeline.foundation.code_version import code_version
from data_pipeline.foundation.progress import track
from data_pipeline.sources import OPTIONS
from data_pipeline.tokenizer import load

_DOCUMENTS = "documents/"
_BLOCK_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("first_row", pa.int64()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
        ("sha256", pa.string()),
    ]
)


def write(config: CorpusConfig, corpus: Path, finished: dict[str, list[Finished]]) -> None:
    """Writes blocks.parquet, then manifest.json, which completes the corpus. `finished`: the units of each stage."""
    shards = finished["shards"]
    tokenizer = load(corpus, config.tokenizer.layout)
    rows = {**config.rows.model_dump(), "raw_length": config.rows.objective.raw_length}
    splits: dict[str, dict[str, Any]] = {}
    for unit in shards:
        split = splits.setdefault(unit.result["split"], {"rows": 0, "tokens": 0, "documents": 0, "shards": []})
        for count in ("rows", "tokens", "documents"):
            split[count] += unit.result[count]
        ((name, output),) = unit.outputs.items()
        split["shards"].append({"name": name, "rows": unit.result["rows"], **output})
    blocks = [
        {"split": unit.result["split"], "shard": next(iter(unit.outputs)), **block}
        for unit in shards
        for block in unit.result["blocks"]
    ]
    with atomic_path(corpus / "blocks.parquet") as path:
        pq.write_table(pa.Table.from_pylist(blocks, _BLOCK_SCHEMA), path)
    identity = {
        "tokenizer": [tokenizer.sha256, config.tokenizer.layout],
        "rows": rows,
        "seed": config.seed,
        "shards": [output["sha256"] for unit in shards for output in unit.outputs.values()],
    }
    write_json(
        corpus / "manifest.json",
        {
            "format_version": FORMAT_VERSION,
            "name": config.name,
            "fingerprint": fingerprint(identity),
            "seed": config.seed,
            "tokenizer": tokenizer.describe(),
            "rows": rows,
            "splits": splits,
            "inputs": [
                {key: unit.result[key] for key in ("source", "file", "bytes", "sha256", "status")}
                for unit in finished["documents"]
                if unit.result["range"][0] == 0
            ],
            "config": lineage(config),
            "documents": [
                {"name": name, **output}
                for stage in ("documents", "deduplicated")
                for unit in finished.get(stage, [])
                for name, output in unit.outputs.items()
                if name.startswith(_DOCUMENTS)
            ],
            "blocks": {"file": "blocks.parquet", "sha256": sha256(corpus / "blocks.parquet")},
            "code_version": code_version(),
        },
    )


def lineage(config: CorpusConfig) -> dict[str, Any]:
    """The settings that the documents, the tokenizer and the shards were made with, defaults included.

    It has no paths: the manifest's `inputs` list the files that were read, by name and checksum.
    """
    return {
        "sources": [
            {
                **source.model_dump(include={"name", "format", "language"}),
                "options": OPTIONS[source.format].model_validate(source.options).model_dump(),
                "cleaning": config.cleaning_of(source).model_dump(),
            }
            for source in config.sources
        ],
        "dedup": config.dedup.model_dump(),
        "split": config.split.model_dump(),
        "tokenizer": config.tokenizer.model_dump(exclude={"path", "dictionary"}),
        "shards": config.shards.model_dump(),
        "bytes_per_unit": config.bytes_per_unit,
        "characters_per_part": config.characters_per_part,
    }


def verify(corpus: Corpus) -> list[str]:
    """One line for each damaged file; none if every checksum and count matches.

    A copy of a corpus may lack `documents/`, which training doesn't need.
    """
    manifest = corpus.manifest
    blocks_file = manifest["blocks"]
    problems = list(_verify_file(corpus.directory / blocks_file["file"], blocks_file["sha256"]))
    blocks = {} if problems else {split: corpus.blocks(split) for split in manifest["splits"]}
    checks: list[Callable[[], Iterator[str]]] = [
        partial(_verify_file, corpus.directory / name, expected)
        for name, expected in manifest["tokenizer"]["files"].items()
    ]
    if has_documents(corpus):
        checks += [
            partial(_verify_file, corpus.directory / file["name"], file["sha256"]) for file in manifest["documents"]
        ]
    for split, described in manifest["splits"].items():
        for shard in described["shards"]:
            checks.append(partial(_verify_shard, corpus.directory / shard["name"], shard, blocks.get(split)))
    with ThreadPoolExecutor() as pool:
        for found in track(pool.map(lambda check: list(check()), checks), len(checks), "verify"):
            problems += found
    for split, of_split in blocks.items():
        rows = manifest["splits"][split]["rows"]
        if rows != int(of_split.rows.sum()):
            problems.append(f"{split}: {rows} rows in the manifest, {of_split.rows.sum()} in blocks")
    return problems


def has_documents(corpus: Corpus) -> bool:
    """Whether this copy of the corpus has its documents and its manifest lists them; old manifests don't."""
    return "documents" in corpus.manifest and (corpus.directory / _DOCUMENTS).exists()


def _verify_file(path: Path, expected: str) -> Iterator[str]:
    if not path.exists():
        yield f"{path}: missing"
    elif sha256(path) != expected:
        yield f"{path}: sha256 differs from the manifest's"


def _verify_shard(path: Path, shard: dict[str, Any], blocks: Blocks | None) -> Iterator[str]:
    """`blocks` is None if blocks.parquet is damaged; then only the shard's checksum can be checked."""
    if not path.exists():
        yield f"{path}: missing"
        return
    if path.stat().st_size != shard["bytes"]:
        yield f"{path}: {path.stat().st_size} bytes, expected {shard['bytes']}"
        return
    if blocks is None:
        yield from _verify_file(path, shard["sha256"])
        return
    if sha256(path) == shard["sha256"]:
        yield from _verify_counts(path, shard, blocks)
        return
    damaged = []
    with path.open("rb") as file:
        for place in blocks.of_shard(shard["name"]).tolist():
            file.seek(int(blocks.offset[place]))
            if not blocks.is_whole(place, file.read(int(blocks.length[place]))):
                damaged.append(str(blocks.first_row[place]))
    where = f"damaged blocks start at rows {', '.join(damaged)}" if damaged else "outside its blocks"
    yield f"{path}: sha256 differs from the manifest's; {where}"


def _verify_counts(path: Path, shard: dict[str, Any], blocks: Blocks) -> Iterator[str]:
    rows = 0
    with path.open("rb") as file:
        for place in blocks.of_shard(shard["name"]).tolist():
            file.seek(int(blocks.offset[place]))
            rows += count_rows(decode_block(file.read(int(blocks.length[place]))))
    if rows != shard["rows"]:
        yield f"{path}: {rows} rows, expected {shard['rows']}"
