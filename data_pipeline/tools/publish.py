"""Copies a finished corpus to a remote store. The manifest comes last: half a copy is no corpus."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from data_pipeline.corpus.corpus import MANIFEST, Corpus
from data_pipeline.corpus.verify import has_documents
from data_pipeline.foundation import stores
from data_pipeline.foundation.errors import FailedError, UserError, one_line
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.foundation.progress import track

_PART = 32 << 20  # bytes of a file that are sent at once
_CHUNK = 1 << 20
_TRIES = 3  # to send a file whose copy differs
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}  # creating one may make a bucket


@dataclass(frozen=True)
class Published:
    """What was sent now, and what was there already."""

    sent: int
    sent_bytes: int
    present: int
    present_bytes: int


@dataclass(frozen=True)
class _File:
    """A file of the corpus; `sha256` is the manifest's, "" if that doesn't list the file."""

    name: str
    path: Path
    sha256: str = ""

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


def publish(corpus: Corpus, url: str, documents: bool = True, connections: int = 4) -> Published:
    """Copies the local `corpus` to `url`, any URL of fsspec, except what is there already with the right content.

    Each file is checked against the manifest before it is sent, and its copy afterwards: on S3 by its ETag, elsewhere
    by reading it. `manifest.json` is written last. Called again after a kill, it continues. `documents`: with the clean
    text, if the corpus has it.

    Raises FailedError if a local file is damaged or can't be written there, UserError if another corpus is there, and
    StoreError.
    """
    return _Publication(corpus, url.rstrip("/")).run(documents, connections)


@dataclass(frozen=True)
class _Identity:
    """What a manifest says of its corpus."""

    name: str
    fingerprint: str


class _Publication:
    def __init__(self, corpus: Corpus, url: str):
        self._corpus, self._url = corpus, url
        self._filesystem, self._root = stores.filesystem(url)

    def run(self, documents: bool, connections: int) -> Published:
        self._refuse_another()
        files = list(self._files(documents))
        if missing := [str(file.path) for file in files if not file.path.exists()]:
            raise FailedError("\n".join(f"{path}: missing; nothing was published" for path in missing))
        total = sum(file.bytes for file in files)
        with ThreadPoolExecutor(connections) as pool:
            try:
                finished = zip(files, pool.map(self._upload, files), strict=True)
                uploads = list(track(finished, len(files), "publish", lambda pair: pair[0].bytes, total))
            finally:
                pool.shutdown(cancel_futures=True)
        manifest = _File(MANIFEST, self._corpus.directory / MANIFEST)
        uploads.append((manifest, self._upload(manifest)))  # which makes the copy a corpus
        sent, present = ([file.bytes for file, new in uploads if new is is_new] for is_new in (True, False))
        return Published(len(sent), sum(sent), len(present), sum(present))

    def _files(self, documents: bool) -> Iterator[_File]:
        """The files of the corpus, without its manifest."""
        manifest, directory = self._corpus.manifest, self._corpus.directory
        checksums = {shard.name: shard.sha256 for shard in manifest.shards}
        checksums |= {manifest.blocks.file: manifest.blocks.sha256, **manifest.tokenizer.files}
        if documents and has_documents(self._corpus):
            checksums |= {file.name: file.sha256 for file in manifest.documents}
        checksums |= {path.name: "" for path in sorted(directory.glob("report.*"))}
        for name, sha256 in checksums.items():
            yield _File(name, directory / name, sha256)

    def _refuse_another(self) -> None:
        try:
            content = self._patiently(partial(self._filesystem.cat_file, self._remote_path(MANIFEST)), MANIFEST)
        except FileNotFoundError:
            return
        try:
            other = parse_json(content, _Identity, f"{self._url}/{MANIFEST}")
        except FailedError:  # left by a writer that was killed
            return
        if other.fingerprint != self._corpus.fingerprint:
            raise UserError(
                f"{self._url}: has another corpus, {other.name!r}, whose fingerprint differs; "
                "publish to another URL, or delete that one first"
            )

    def _upload(self, file: _File) -> bool:
        """Makes sure that `file` is there; returns whether it had to be sent."""
        sums = _Checksums.of(file.path)
        if file.sha256 and sums.sha256 != file.sha256:
            raise FailedError(
                f"{file.path}: sha256 differs from the manifest's; to rebuild it byte for byte: "
                "data-pipeline build CORPUS.yaml --repair"
            )
        for tries in range(_TRIES + 1):
            if self._is_present(file.name, sums):
                return tries > 0
            if tries < _TRIES:
                self._patiently(partial(self._put, file.path, file.name), file.name)
        raise FailedError(f"{self._url}/{file.name}: differs from {file.path} after {_TRIES} uploads")

    def _put(self, path: Path, name: str) -> None:
        target, kind = self._remote_path(name), self._filesystem.protocol
        protocols = {kind} if isinstance(kind, str) else {*kind}
        if not _WITHOUT_FOLDERS & protocols:
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        parts = {"chunksize": _PART, "max_concurrency": 2} if "s3" in protocols else {}
        self._filesystem.put_file(str(path), target, **parts)

    def _is_present(self, name: str, sums: "_Checksums") -> bool:
        """Whether the copy has the right size and content. The server has made its ETag from what it received."""
        try:
            info = self._patiently(partial(self._filesystem.info, self._remote_path(name)), name)
        except FileNotFoundError:
            return False
        if info["type"] != "file" or info["size"] != sums.size:
            return False
        if str(info.get("ETag", "")).strip('"') in sums.etags:
            return True
        with stores.open_file(f"{self._url}/{name}") as copy:
            return hashlib.file_digest(copy, "sha256").hexdigest() == sums.sha256  # type: ignore[arg-type]

    def _patiently(self, attempt: Any, name: str) -> Any:
        try:
            return stores.with_retries(attempt, f"{self._url}/{name}")
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:  # each file system raises its own errors
            raise FailedError(f"{self._url}/{name}: can't be written: {one_line(error)}") from None

    def _remote_path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


@dataclass(frozen=True)
class _Checksums:
    """Size and checksums of a file. `etags`: what S3 calls it, sent in one piece or in parts of `_PART` bytes."""

    size: int
    sha256: str
    etags: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, path: Path) -> "_Checksums":
        size, sha256, whole, parts, part = 0, hashlib.sha256(), _md5(), list[bytes](), _md5()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                for digest in (sha256, whole, part):
                    digest.update(chunk)
                if size % _PART == 0:
                    parts.append(part.digest())
                    part = _md5()
        if size % _PART:
            parts.append(part.digest())
        of_parts = _md5(b"".join(parts)).hexdigest()
        return cls(size, sha256.hexdigest(), {whole.hexdigest(), f"{of_parts}-{len(parts)}"})


def _md5(content: bytes = b"") -> Any:
    return hashlib.md5(content, usedforsecurity=False)
