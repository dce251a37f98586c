"""Copies a finished corpus to a remote store. The manifest comes last: half a copy is no corpus."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.corpus.corpus import MANIFEST, Corpus
from data_pipeline.corpus.verify import documents_of
from data_pipeline.foundation import stores
from data_pipeline.foundation.errors import FailedError, UserError, one_line
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.foundation.progress import track

_PART = 32 << 20  # bytes of a file that are sent at once
_CHUNK = 1 << 20
_TRIES = 3  # to send a file whose copy differs


@dataclass(frozen=True)
class Published:
    """What was sent now, and what was there already."""

    sent: int
    sent_bytes: int
    present: int
    present_bytes: int


def publish(corpus: Corpus, url: str, documents: bool = True, connections: int = 4) -> Published:
    """Copies the local `corpus` to `url`, any URL of fsspec, except what is there already with the right content.

    Each file is checked against the manifest before it is sent, and its copy afterwards: on S3 by its ETag, elsewhere
    by reading it. `manifest.json` is written last. Called again after a kill, it continues. `documents`: with the clean
    text, if the corpus has it.

    Raises FailedError if a local file is damaged or can't be written there, UserError if another corpus is there, and
    StoreError.
    """
    copy = _Copy(corpus.directory, url.rstrip("/"))
    copy.refuse_another(corpus.fingerprint)
    files = _files(corpus, documents)
    paths = [corpus.directory / name for name in files]
    if missing := [path for path in paths if not path.exists()]:
        raise FailedError("\n".join(f"{path}: missing; nothing was published" for path in missing))
    total = sum(path.stat().st_size for path in paths)
    with ThreadPoolExecutor(connections) as pool:
        try:
            uploads = pool.map(copy.upload, files.keys(), files.values())
            done = list(track(uploads, len(files), "publish", lambda upload: upload.size, total))
        finally:
            pool.shutdown(cancel_futures=True)
    done.append(copy.upload(MANIFEST))  # which makes the copy a corpus
    sent, present = ([upload.size for upload in done if upload.sent is new] for new in (True, False))
    return Published(len(sent), sum(sent), len(present), sum(present))


def _files(corpus: Corpus, documents: bool) -> dict[str, str]:
    """The files of the corpus, without its manifest, and the checksums that it lists: "" for pages of the report."""
    manifest = corpus.manifest
    checksums = {shard.name: shard.sha256 for shard in manifest.shards}
    tables = [manifest.blocks, *([manifest.lineage] if manifest.lineage else [])]
    checksums |= {table.file: table.sha256 for table in tables} | manifest.tokenizer.files
    if documents:
        checksums |= {name: file.sha256 for name, file in documents_of(corpus).items()}
    return checksums | {path.name: "" for path in sorted(corpus.directory.glob("report.*"))}


class _Upload(NamedTuple):
    """The bytes of a file that is there now, and whether it had to be sent."""

    size: int
    sent: bool


class _Copy:
    """The copy at `url` of the corpus in `directory`."""

    def __init__(self, directory: Path, url: str):
        self._directory, self._url = directory, url
        self._filesystem, root = stores.filesystem(url)
        self._root = root.rstrip("/")
        self._protocols = stores.protocols(self._filesystem)

    def refuse_another(self, fingerprint: str) -> None:
        """Raises UserError if another corpus is there."""
        try:
            content = self._patiently(self._filesystem.cat_file, MANIFEST)
        except FileNotFoundError:
            return
        try:
            other = parse_json(content, dict[str, Any], f"{self._url}/{MANIFEST}")
        except FailedError:  # left by a writer that was killed
            return
        if other.get("fingerprint") != fingerprint:
            raise UserError(
                f"{self._url}: has another corpus, {other.get('name')!r}, whose fingerprint differs; "
                "publish to another URL, or delete that one first"
            )

    def upload(self, name: str, expected: str = "") -> _Upload:
        """Makes sure that a file is there. `expected` is the sha256 that it must have here, if known."""
        path = self._directory / name
        size, sha256, etags = _checksums(path)
        if expected and sha256 != expected:
            raise FailedError(
                f"{path}: sha256 differs from the manifest's; to rebuild it byte for byte: "
                "data-pipeline build CORPUS.yaml --repair"
            )
        for tries in range(_TRIES + 1):
            if self._is_present(name, size, sha256, etags):
                return _Upload(size, tries > 0)
            if tries < _TRIES:
                self._patiently(lambda target: self._put(path, target), name)
        raise FailedError(f"{self._url}/{name}: differs from {path} after {_TRIES} uploads")

    def _put(self, path: Path, target: str) -> None:
        if not stores.OBJECT_STORES & self._protocols:  # there, creating one may make a bucket
            self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        parts = {"chunksize": _PART, "max_concurrency": 2} if "s3" in self._protocols else {}
        self._filesystem.put_file(str(path), target, **parts)

    def _is_present(self, name: str, size: int, sha256: str, etags: set[str]) -> bool:
        """Whether the copy has the right size and content. The server has made its ETag from what it received."""
        try:
            info = self._patiently(self._filesystem.info, name)
        except FileNotFoundError:
            return False
        if info["type"] != "file" or info["size"] != size:
            return False
        if str(info.get("ETag", "")).strip('"') in etags:
            return True
        with stores.open_file(f"{self._url}/{name}") as copy:
            return hashlib.file_digest(copy, "sha256").hexdigest() == sha256  # type: ignore[arg-type]

    def _patiently(self, request: Callable[[str], Any], name: str) -> Any:
        """What `request` answers for the file `name` of the copy."""
        try:
            return stores.with_retries(lambda: request(f"{self._root}/{name}"), f"{self._url}/{name}")
        except (UserError, FileNotFoundError):
            raise
        except Exception as error:  # each file system raises its own errors
            raise FailedError(f"{self._url}/{name}: can't be written: {one_line(error)}") from None


def _checksums(path: Path) -> tuple[int, str, set[str]]:
    """Size and sha256 of a file, and what S3 calls it (ETag), sent in one piece or in parts of `_PART` bytes."""
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
    return size, sha256.hexdigest(), {whole.hexdigest(), f"{of_parts}-{len(parts)}"}


def _md5(content: bytes = b"") -> Any:
    return hashlib.md5(content, usedforsecurity=False)
