"""Copies a finished corpus to a remote store. The manifest is copied last, so that half a copy is no corpus."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import FailedError, UserError, one_line
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.local_store import LocalStore
from data_pipeline.base.open_store import open_store
from data_pipeline.base.progress import Progress, track
from data_pipeline.base.store import Store
from data_pipeline.corpus.corpus import MANIFEST, Corpus
from data_pipeline.corpus.verify import documents_of

_TRIES = 3  # for a file whose copy differs


@dataclass(frozen=True)
class Published:
    """How many files and bytes were sent, and how many were there already."""

    sent: int
    sent_bytes: int
    present: int
    present_bytes: int


def publish(corpus: Corpus, url: str, documents: bool = True, connections: int = 4) -> Published:
    """Copies the local `corpus` to `url`, any URL of fsspec, except files that are there already with the same content.

    Each file is checked against the manifest before it is sent, and its copy afterwards: on S3 by the ETag, elsewhere
    by reading the copy. manifest.json is written last. The same call continues after a kill. `documents`: also copies
    the clean text, if the corpus has it.

    Raises FailedError if a local file is damaged or can't be copied, UserError if another corpus is there, StoreError.
    """
    source, target = LocalStore(corpus.directory), open_store(url)
    _refuse_another(target, corpus.fingerprint)
    files = _files(corpus, source, documents)
    sizes = source.sizes(files)
    if missing := files.keys() - sizes.keys():
        raise FailedError("\n".join(f"{source.at(name)}: missing; nothing was published" for name in sorted(missing)))
    with _in_one_line(target, MANIFEST):
        there = target.sizes([*files, MANIFEST])

    def copied(name: str) -> tuple[int, bool]:
        return _copied(source, target, name, files[name], there.get(name) == sizes[name])

    with ThreadPoolExecutor(connections) as pool:
        try:
            copies = pool.map(copied, files)
            done = list(track(copies, Progress("publish", len(files), sum(sizes.values())), lambda copy: copy[0]))
        finally:
            pool.shutdown(cancel_futures=True)
    done.append(_copied(source, target, MANIFEST, "", MANIFEST in there))  # the copy is a corpus from now on
    sent, present = ([size for size, is_new in done if is_new is new] for new in (True, False))
    return Published(len(sent), sum(sent), len(present), sum(present))


def _files(corpus: Corpus, source: Store, documents: bool) -> dict[str, str]:
    """The corpus's files without manifest.json, and their checksums in the manifest; "" for pages of the report."""
    manifest = corpus.manifest
    checksums = {shard.name: shard.sha256 for shard in manifest.shards}
    tables = [manifest.blocks, *([manifest.lineage] if manifest.lineage else [])]
    checksums |= {table.file: table.sha256 for table in tables} | manifest.tokenizer.files
    if documents:
        checksums |= {name: file.sha256 for name, file in documents_of(corpus).items()}
    return checksums | {name: "" for name in sorted(source.names(deep=False)) if name.startswith("report.")}


def _refuse_another(target: Store, fingerprint: str) -> None:
    """Raises UserError if another corpus is there."""
    with _in_one_line(target, MANIFEST):
        try:
            content = target.get(MANIFEST)
        except FileNotFoundError:
            return
    try:
        other = parse_json(content, dict[str, Any], target.at(MANIFEST))
    except FailedError:  # left by a killed writer
        return
    if other.get("fingerprint") != fingerprint:
        found = f"has another corpus, {other.get('name')!r}, whose fingerprint differs"
        raise UserError(f"{target}: {found}; publish to another URL, or delete that one first")


def _copied(source: Store, target: Store, name: str, expected: str, may_be_there: bool) -> tuple[int, bool]:
    """Copies a file, unless it is there. Returns its bytes, and whether it was sent.

    `expected`: the sha256 that the file must have in `source`; "" if unknown.
    """
    path, checksum = Path(source.at(name)), source.checksum(name)
    if expected and checksum[1] != expected:
        way_out = "to rebuild it byte for byte: data-pipeline build CORPUS.yaml --repair"
        raise FailedError(f"{path}: sha256 differs from the manifest's; {way_out}")
    with _in_one_line(target, name):
        if may_be_there and target.is_copy(name, path, checksum):
            return checksum[0], False
        for _ in range(_TRIES):
            target.send(path, name)
            if target.is_copy(name, path, checksum):
                return checksum[0], True
    raise FailedError(f"{target.at(name)}: differs from {path} after {_TRIES} uploads")


@contextlib.contextmanager
def _in_one_line(target: Store, name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each file system raises its own errors
        raise FailedError(f"{target.at(name)}: can't be written: {one_line(error)}") from None
