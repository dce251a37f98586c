"""Checks a finished corpus against its manifest."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from data_pipeline.base.atomic import sha256
from data_pipeline.base.errors import NodeUnfit, one_line
from data_pipeline.base.json_file import seal_holds
from data_pipeline.base.open_store import open_store
from data_pipeline.corpus.blocks import Blocks, count_rows, decode_block
from data_pipeline.corpus.corpus import DOCUMENTS, MANIFEST, Corpus, DocumentsEntry, ShardEntry
from data_pipeline.engine import workers
from data_pipeline.engine.checking import read_all
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Attempt

SHARDS, REPORT = "shards/", "report.json"
FOREIGN = "not in the manifest; remove it"
_CHUNK = 1 << 20
_FASTER = 256  # times, than a build reads its inputs


@dataclass(frozen=True)
class _Expected:
    """The expected content of a file. `shard`: its entry in the manifest. `blocks`: the blocks of a shard, if known."""

    sha256: str
    bytes: int = 0
    shard: ShardEntry | None = None
    blocks: Blocks | None = None


def verify(corpus: Corpus, ray_config: RayConfig = RayConfig()) -> list[str]:
    """One line for each damaged file; none if every checksum and count matches.

    A copy of a corpus may lack `documents/`, which training doesn't need, and the report. The manifest was checked when
    the corpus was opened. Files of a remote corpus are read where they are, without the cache. Ray workers read a large
    corpus, by `ray_config`. Raises StoreError if the store refuses or doesn't answer.
    """
    manifest, lineage = corpus.manifest, corpus.manifest.lineage
    problems = _wrong(corpus, {manifest.blocks.file: _Expected(manifest.blocks.sha256)})
    blocks = {} if problems else {split: corpus.blocks(split) for split in manifest.splits}
    in_lineage = _wrong(corpus, {lineage.file: _Expected(lineage.sha256)}) if lineage else []
    documents = {} if in_lineage else documents_of(corpus)
    problems += in_lineage
    files = {name: _Expected(sha256) for name, sha256 in manifest.tokenizer.files.items()}
    files |= {name: _Expected(file.sha256, file.bytes) for name, file in documents.items()}
    for split, entry in manifest.splits.items():
        known = blocks[split].by_shard(shard.name for shard in entry.shards) if blocks else {}  # else checksums suffice
        for shard in entry.shards:
            files[shard.name] = _Expected(shard.sha256, shard.bytes, shard, known.get(shard.name))
    small = workers.are_small(sum(file.bytes for file in files.values()) // _FASTER, ray_config)
    with workers.without_ray() if small else nullcontext():
        seen = None if corpus.remote else sha256(corpus.directory / MANIFEST)
        work = partial(_problems, corpus.remote.url if corpus.remote else str(corpus.directory.resolve()), seen)
        found = read_all(work, files, lambda file: file.bytes, "verify", ray_config)
    problems += [f"{corpus.location}/{name}: {problem}" for some in found for name, problem in some]
    problems += _verify_report(corpus)
    known_files = {shard.name for shard in manifest.shards} | documents.keys()
    folders = [SHARDS, *([DOCUMENTS] if documents else [])]
    unknown = sorted(name for folder in folders for name in _files_below(corpus, folder) if name not in known_files)
    problems += [f"{corpus.location}/{name}: {FOREIGN}" for name in unknown]
    for split, in_blocks in blocks.items():
        rows = manifest.splits[split].rows
        if rows != int(in_blocks.rows.sum()):
            problems.append(f"{split}: {rows} rows in the manifest, {in_blocks.rows.sum()} in blocks")
    return problems


def documents_of(corpus: Corpus) -> dict[str, DocumentsEntry]:
    """The files of documents by name; {} if this copy of the corpus lacks them."""
    if DOCUMENTS.rstrip("/") not in open_store(corpus.location).folders(""):
        return {}
    return {file.name: file for file in corpus.lineage().documents}


def _verify_report(corpus: Corpus) -> list[str]:
    try:
        with _open(corpus.location, REPORT) as file:
            content = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{corpus.location}/{REPORT}: {_unreadable(error)}"]
    if not seal_holds(content):
        return [f"{corpus.location}/{REPORT}: its sha256 isn't that of its content"]
    return _wrong(corpus, {name: _Expected(sha256) for name, sha256 in json.loads(content)["files"].items()})


def _files_below(corpus: Corpus, folder: str) -> list[str]:
    """The names of the files in a folder of the corpus, without hidden files, which a killed writer leaves."""
    names = open_store(corpus.location).names(folder)
    return [name for name in names if not PurePosixPath(name).name.startswith(".")]


def _wrong(corpus: Corpus, files: dict[str, _Expected]) -> list[str]:
    return [
        f"{corpus.location}/{name}: {problem}" for name, problem in _problems(corpus.location, None, files, Attempt())
    ]


def _problems(
    location: str, manifest: str | None, files: dict[str, _Expected], attempt: Attempt
) -> list[tuple[str, str]]:
    """(name, problem) of each of `files` at `location` that isn't as expected.

    Runs in a worker. `manifest`: the sha256 of the corpus's manifest, to check that the node sees the corpus; None: not
    checked.
    """
    try:
        if manifest is not None and sha256(Path(location, MANIFEST)) != manifest:
            raise NodeUnfit(f"{location} isn't the corpus that is verified")
    except FileNotFoundError as error:
        raise NodeUnfit(f"{location}/{MANIFEST}: {error.strerror}") from None
    return [
        (name, problem) for name, expected in files.items() for problem in _checked(location, name, expected, attempt)
    ]


def _checked(location: str, name: str, expected: _Expected, attempt: Attempt) -> list[str]:
    try:
        with _open(location, name) as file:
            if expected.shard is not None and expected.blocks is not None:
                return list(_verify_shard(file, expected.shard, expected.blocks))
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            return [] if digest == expected.sha256 else ["sha256 differs from the manifest's"]
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and attempt.may_be_retried(error):
            raise
        return [_unreadable(error)]


def _verify_shard(file: BinaryIO, shard: ShardEntry, blocks: Blocks) -> Iterator[str]:
    """Reads the shard once."""
    digest, rows, damaged = hashlib.sha256(), 0, []
    size = file.seek(0, 2)
    file.seek(0)
    if size != shard.bytes:
        yield f"{size} bytes, expected {shard.bytes}"
        return
    at = 0
    for number in np.argsort(blocks.offset).tolist():
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


def _open(location: str, name: str) -> BinaryIO:
    readable = open_store(location).readable(name)
    return Path(readable).open("rb") if isinstance(readable, str) else readable
