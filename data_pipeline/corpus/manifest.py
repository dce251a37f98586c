"""Checks a finished corpus against its manifest."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.corpus.blocks import count_rows, decode_block
from data_pipeline.corpus.corpus import DOCUMENTS, Blocks, Corpus
from data_pipeline.foundation.atomic import sha256
from data_pipeline.foundation.progress import track


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
    return "documents" in corpus.manifest and (corpus.directory / DOCUMENTS).exists()


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
