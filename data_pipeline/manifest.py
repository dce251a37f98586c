"""What a finished corpus is: shards, blocks, counts, checksums, lineage; and whether the files still agree with it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.atomic import atomic_path, fingerprint, sha256, write_json
from data_pipeline.blocks import count_rows, decode_block
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import FORMAT_VERSION, Blocks, Corpus
from data_pipeline.progress import track
from data_pipeline.tokenizer import load
from data_pipeline.work_units import Finished

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


def write(config: CorpusConfig, corpus: Path, documents: list[Finished], shards: list[Finished]) -> None:
    """Writes blocks.parquet, then manifest.json, which completes the corpus."""
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
                for unit in documents
                if unit.result["range"][0] == 0
            ],
            "blocks": {"file": "blocks.parquet", "sha256": sha256(corpus / "blocks.parquet")},
            "code_version": version("encdec-pretrain"),
        },
    )


def verify(corpus: Corpus) -> list[str]:
    """What is wrong with the corpus: one line for each damaged file, none if every checksum and count agrees."""
    problems = []
    tokenizer, blocks_file = corpus.manifest["tokenizer"], corpus.manifest["blocks"]
    for name, expected in {**tokenizer["files"], blocks_file["file"]: blocks_file["sha256"]}.items():
        path = corpus.directory / name
        if not path.exists():
            problems.append(f"{path}: missing")
        elif sha256(path) != expected:
            problems.append(f"{path}: sha256 differs from the manifest's")
    if problems:
        return problems
    shards = [(split, shard) for split, described in corpus.manifest["splits"].items() for shard in described["shards"]]
    blocks = {split: corpus.blocks(split) for split in corpus.manifest["splits"]}
    with ThreadPoolExecutor() as pool:
        checks = pool.map(lambda item: list(_verify_shard(corpus, item[1], blocks[item[0]])), shards)
        for found in track(checks, len(shards), "verify"):
            problems += found
    for split, described in corpus.manifest["splits"].items():
        if described["rows"] != int(blocks[split].rows.sum()):
            problems.append(f"{split}: {described['rows']} rows in the manifest, {blocks[split].rows.sum()} in blocks")
    return problems


def _verify_shard(corpus: Corpus, shard: dict[str, Any], blocks: Blocks) -> Iterator[str]:
    path = corpus.directory / shard["name"]
    if not path.exists():
        yield f"{path}: missing"
        return
    if path.stat().st_size != shard["bytes"]:
        yield f"{path}: {path.stat().st_size} bytes, expected {shard['bytes']}"
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
