"""Checks a finished corpus against its manifest."""

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from data_pipeline.corpus.blocks import Blocks, count_rows, decode_block
from data_pipeline.corpus.corpus import DOCUMENTS, Corpus, ShardEntry
from data_pipeline.foundation import stores
from data_pipeline.foundation.errors import one_line
from data_pipeline.foundation.json_file import seal_holds
from data_pipeline.foundation.progress import track

SHARDS, REPORT = "shards/", "report.json"
FOREIGN = "not in the manifest; remove it"
_CHUNK = 1 << 20


def verify(corpus: Corpus) -> list[str]:
    """One line for each damaged file; none if every checksum and count matches.

    A copy of a corpus may lack `documents/`, which training doesn't need, and the report. Files of a remote corpus are
    read where they are, and nothing is cached. The manifest was checked when the corpus was opened. Raises StoreError
    if its store refuses or doesn't answer.
    """
    manifest = corpus.manifest
    problems = _checked(corpus, manifest.blocks.file, _verify_file, manifest.blocks.sha256)
    blocks = {} if problems else {split: corpus.blocks(split) for split in manifest.splits}
    lineage = manifest.lineage
    in_lineage = _checked(corpus, lineage.file, _verify_file, lineage.sha256) if lineage else []
    documents = {} if in_lineage else documents_of(corpus)
    problems += in_lineage
    files = manifest.tokenizer.files | documents
    if not blocks:  # then only the checksums of shards can be checked
        files |= {shard.name: shard.sha256 for shard in manifest.shards}
    checks = [partial(_checked, corpus, name, _verify_file, sha256) for name, sha256 in files.items()]
    for split, of_split in blocks.items():
        shards = manifest.splits[split].shards
        checks += [partial(_checked, corpus, shard.name, _verify_shard, shard, of_split) for shard in shards]
    with ThreadPoolExecutor() as pool:
        try:
            for found in track(pool.map(lambda check: check(), checks), len(checks), "verify"):
                problems += found
        finally:
            pool.shutdown(cancel_futures=True)
    problems += _verify_report(corpus)
    known = {shard.name for shard in manifest.shards} | documents.keys()
    folders = [SHARDS, *([DOCUMENTS] if documents else [])]
    unknown = sorted(name for folder in folders for name in _files_below(corpus, folder) if name not in known)
    problems += [f"{corpus.location}/{name}: {FOREIGN}" for name in unknown]
    for split, in_blocks in blocks.items():
        rows = manifest.splits[split].rows
        if rows != int(in_blocks.rows.sum()):
            problems.append(f"{split}: {rows} rows in the manifest, {in_blocks.rows.sum()} in blocks")
    return problems


def documents_of(corpus: Corpus) -> dict[str, str]:
    """The sha256 of each file of documents; {} if this copy of the corpus is without them."""
    if not stores.exists(f"{corpus.location}/{DOCUMENTS.rstrip('/')}"):
        return {}
    return {file.name: file.sha256 for file in corpus.lineage().documents}


def _verify_report(corpus: Corpus) -> list[str]:
    try:
        with _open(corpus, REPORT) as file:
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{corpus.location}/{REPORT}: {_unreadable(error)}"]
    if not seal_holds(content):
        return [f"{corpus.location}/{REPORT}: its sha256 isn't that of its content"]
    pages = json.loads(content)["files"].items()
    return [problem for name, sha256 in pages for problem in _checked(corpus, name, _verify_file, sha256)]


def _files_below(corpus: Corpus, folder: str) -> list[str]:
    """The names of the files in a folder of the corpus, except hidden ones, which a writer that was killed leaves."""
    filesystem, root = stores.filesystem(corpus.location)
    found = stores.with_retries(lambda: filesystem.find(f"{root.rstrip('/')}/{folder}"), corpus.location)
    names = [PurePosixPath(path).relative_to(root.rstrip("/")) for path in found]
    return [str(name) for name in names if not name.name.startswith(".")]


def _checked(corpus: Corpus, name: str, check: Callable[..., Iterator[str]], *expected: Any) -> list[str]:
    """What `check` finds wrong with a file of the corpus."""
    try:
        with _open(corpus, name) as file:
            return [f"{corpus.location}/{name}: {problem}" for problem in check(file, *expected)]
    except OSError as error:
        return [f"{corpus.location}/{name}: {_unreadable(error)}"]


def _verify_file(file: BinaryIO, expected: str) -> Iterator[str]:
    if hashlib.file_digest(file, "sha256").hexdigest() != expected:  # type: ignore[arg-type]
        yield "sha256 differs from the manifest's"


def _verify_shard(file: BinaryIO, shard: ShardEntry, blocks: Blocks) -> Iterator[str]:
    """Reads the shard once."""
    digest, rows, damaged = hashlib.sha256(), 0, []
    size = file.seek(0, 2)
    file.seek(0)
    if size != shard.bytes:
        yield f"{size} bytes, expected {shard.bytes}"
        return
    at = 0
    for number in sorted(blocks.of_shard(shard.name).tolist(), key=lambda number: blocks.offset[number]):
        start, length = int(blocks.offset[number]), int(blocks.length[number])
        digest.update(file.read(start - at))
        content = file.read(length)
        digest.update(content)
        at = start + length
        if blocks.is_whole(number, content):
            rows += count_rows(decode_block(content))
        else:
            damaged.append(str(blocks.first_row[number]))
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if digest.hexdigest() != shard.sha256:
        where = f"damaged blocks start at rows {', '.join(damaged)}" if damaged else "outside its blocks"
        yield f"sha256 differs from the manifest's; {where}"
    elif rows != shard.rows:
        yield f"{rows} rows, expected {shard.rows}"


def _unreadable(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror or one_line(error)}"


def _open(corpus: Corpus, name: str) -> BinaryIO:
    return stores.open_file(f"{corpus.remote.url}/{name}") if corpus.remote else (corpus.directory / name).open("rb")
