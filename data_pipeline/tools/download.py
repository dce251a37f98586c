"""Lists the files that Common Crawl and Wikimedia publish, and downloads several at a time.

A download resumes by byte range. A file gets its name once it has been checked.
"""

import bz2
import contextlib
import gzip
import hashlib
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import requests
import urllib3

from data_pipeline.foundation.atomic import lock
from data_pipeline.foundation.errors import FailedError, UserError, failing_in_one_line, one_line
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.foundation.packages import package_version
from data_pipeline.foundation.progress import track

_STATE = ".fetch"  # the folder of partial files and the lock, below the output directory


class Retry(urllib3.Retry):
    """Retries of requests; a line on stderr says why at the first retry of a request."""

    def increment(self, *request: Any, **failed: Any) -> "Retry":
        left = super().increment(*request, **failed)
        if len(left.history) == 1:
            why = one_line(failed["error"]) if failed.get("error") else f"it answers {left.history[0].status}"
            print(f"warning: {why}; trying up to {self.total} times more", file=sys.stderr, flush=True)
        return left


RETRIES = Retry(
    11,
    status_forcelist=(408, 425, 429, 500, 502, 503, 504),
    raise_on_status=False,
    backoff_factor=0.5,
    backoff_max=60,
    retry_after_max=900,
)
_BLOCK = 1 << 16
_TIMEOUT = 60.0  # seconds without a byte
_PIECES = 20  # connections for a file; after that, the next command continues it
_WRONG_CONTENTS = 2  # wrong downloads of a file: the first one may have joined two versions
_FAILURES_IN_A_ROW = 10  # of files: a server that refuses isn't asked 50,000 times


@dataclass(frozen=True)
class PublishedFile:
    """A file in a publisher's list.

    Raises FailedError for a path that could lead out of the output directory, and for names that begin with a dot.

    Attributes:
        path: relative to the output directory.
        size: bytes; None if the publisher gives none.
        checksum: "sha1:…", "md5:…" or another algorithm of hashlib; None if the publisher gives none.
    """

    url: str
    path: str
    size: int | None = None
    checksum: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\w[\w.+=-]*/)*\w[\w.+=-]*", self.path, re.ASCII):
            raise FailedError(f"{self.url}: refused: the list has the path {self.path!r}")


@dataclass(frozen=True)
class _DumpFile:
    size: int | None = None
    sha1: str | None = None
    md5: str | None = None


@dataclass(frozen=True)
class _DumpJob:
    status: str
    files: dict[str, _DumpFile] = field(default_factory=dict)


@dataclass(frozen=True)
class _DumpStatus:  # dumpstatus.json of a Wikimedia dump
    jobs: dict[str, _DumpJob]


def open_session(contact: str = "") -> requests.Session:
    """A session that retries while a server is busy or doesn't answer. `contact` tells the operators who asks."""
    session = requests.Session()
    about = f"data-pipeline fetch{'; ' + contact if contact else ''}"
    session.headers["User-Agent"] = f"encdec-pretrain/{package_version()} ({about})"
    session.headers["Accept-Encoding"] = "identity"  # so that a .gz arrives with the published bytes
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=16, max_retries=RETRIES))
    return session


def _read(session: requests.Session, url: str, if_missing: str) -> bytes:
    """The content of a small file. Raises UserError if it doesn't exist, FailedError if it can't be read."""
    try:
        response = session.get(url, timeout=_TIMEOUT)
        if response.status_code in (404, 410):
            raise UserError(f"{url}: {if_missing}")
        response.raise_for_status()
    except requests.RequestException as error:
        raise FailedError(f"{url}: {one_line(error)}") from None
    return response.content


def wet_files(session: requests.Session, crawl: str, base_url: str) -> list[PublishedFile]:
    """The text files of a crawl ("CC-MAIN-2019-18"), in the order of its wet.paths.gz, without sizes and checksums."""
    url = f"{base_url}/crawl-data/{crawl}/wet.paths.gz"
    content = _read(
        session, url, f"no crawl {crawl} with text there; crawls are listed at https://index.commoncrawl.org/"
    )
    try:
        paths = gzip.decompress(content).decode("ascii").split()
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise FailedError(f"{url}: expected a gzip file of paths: {error}") from None
    return [PublishedFile(f"{base_url}/{path}", path) for path in paths]


def wikipedia_files(session: requests.Session, wiki: str, date: str, job: str, base_url: str) -> list[PublishedFile]:
    """The files of one job of a dump ("enwiki", "20240101"), in the order of their pages, with sizes and checksums:
    sha1 where published, else md5. Raises UserError if the job doesn't exist, FailedError if it isn't done.
    """
    folder = f"{base_url}/{wiki}/{date}"
    url = f"{folder}/dumpstatus.json"
    content = _read(
        session, url, f"no dump of {wiki} of {date} there; dates are like 20240101, and old dumps are deleted"
    )
    jobs = parse_json(content, _DumpStatus, url).jobs
    if job not in jobs:
        raise UserError(f"{url}: has no job {job!r}, only {', '.join(sorted(jobs))}")
    if (state := jobs[job].status) != "done":
        raise FailedError(f"{url}: the job {job} is {state!r}, expected 'done'; take an earlier dump, or wait")
    published = []
    for name, file in jobs[job].files.items():
        checksum = f"sha1:{file.sha1}" if file.sha1 else f"md5:{file.md5}" if file.md5 else None
        published.append(PublishedFile(f"{folder}/{name}", name, file.size, checksum))
    # by part and page numbers: part 10 follows part 9, and an index follows its articles
    return sorted(published, key=lambda one: ([int(number) for number in re.findall(r"\d+", one.path)], one.path))


class Download:
    """The download of a file to its place below `folder`. FOLDER/.fetch/PATH.part has the bytes so far.

    Attributes:
        present: True if the file is there already.
        missing: number of bytes to receive, if the size is published.
        received: number of bytes received.
        problem: why the file can't be fetched; "" if it can.
    """

    def __init__(self, file: PublishedFile, folder: Path, session: requests.Session):
        self.file, self._session, self.received, self.problem = file, session, 0, ""
        self._path, self._part = folder / file.path, folder / _STATE / f"{file.path}.part"
        # a file was checked before it got its name
        self.present = self._path.exists() and file.size in (None, _size(self._path))
        self.missing = 0 if self.present else max(0, (file.size or 0) - _size(self._part))

    def run(self) -> "Download":
        """Fetches the file, unless it is there. Raises FailedError if it can't be written."""
        wrong = 0
        try:
            for _ in range(0 if self.present else _PIECES):
                self.problem = self._receive()
                if self.problem:
                    continue
                self.problem = self._fault()
                if not self.problem:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._part.replace(self._path)
                    break
                self._part.unlink()
                wrong += 1
                if wrong == _WRONG_CONTENTS:
                    break
        except requests.RequestException as error:  # after all retries
            self.problem = one_line(error)
        except OSError as error:
            raise FailedError(f"can't write {self._path}: {error.strerror or one_line(error)}") from None
        return self

    def _receive(self) -> str:
        """Receives the rest of the file; returns why the connection broke, or "". The next call resumes."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        have = _size(self._part)
        if self._part.exists() and have == self.file.size:
            return ""
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._session.get(self.file.url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if have and response.status_code == 416:
                return ""  # nothing is missing, or the file has changed; `_fault` finds out
            response.raise_for_status()
            with self._part.open("ab" if response.status_code == 206 else "wb") as part:
                try:
                    for block in response.raw.stream(_BLOCK, decode_content=False):
                        part.write(block)
                        self.received += len(block)
                except urllib3.exceptions.HTTPError as error:
                    return f"connection lost after {part.tell():,} bytes: {one_line(error)}"
                part.flush()
                os.fsync(part.fileno())
        return ""

    def _fault(self) -> str:
        """What is wrong with the content, or "". Without a published checksum, the file must decompress to its end."""
        size = _size(self._part)
        if self.file.size not in (None, size):
            return f"{size:,} bytes were received, but the published size is {self.file.size:,}"
        if self.file.checksum:
            kind, _, published = self.file.checksum.partition(":")
            with self._part.open("rb") as file:
                found = hashlib.file_digest(file, kind).hexdigest()
            return "" if found == published else f"its {kind} is {found}, but the published one {published}"
        try:
            with (bz2 if self.file.path.endswith(".bz2") else gzip).open(self._part) as unpacked:
                while unpacked.read(_BLOCK):
                    pass
        except (EOFError, OSError, zlib.error) as error:
            return f"no complete compressed file: {error}"
        return ""


def fetch_files(
    files: Sequence[PublishedFile], folder: Path, session: requests.Session, connections: int = 4
) -> list[Download]:
    """Downloads `files` below `folder`, except those that are there. The same call continues after an interruption.

    A file that can't be fetched has a `problem` and doesn't stop the others. Raises FailedError if the disk is full,
    ten files in a row have failed, or another process fetches to this folder.
    """
    downloads = [Download(file, folder, session) for file in files]

    def received() -> int:
        return sum(one.received for one in downloads)

    missing, failures = sum(one.missing for one in downloads), 0
    with sole_user(folder), ThreadPool(connections) as pool:  # of daemon threads: Ctrl-C doesn't wait for a server
        done = pool.imap_unordered(Download.run, downloads)
        for download in track(
            done, len(files), "fetch", lambda _: 0, missing, received, lambda: human_size(received())
        ):
            failures = failures + 1 if download.problem else 0
            if download.problem:
                print(f"{download.file.path}: {download.problem}", file=sys.stderr, flush=True)
            if failures == _FAILURES_IN_A_ROW:
                raise FailedError(f"stopped: {failures} files in a row failed, the last {download.problem}")
    return downloads


@contextlib.contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Locks `folder`, so that no second command writes to the same .part files."""
    with failing_in_one_line(folder, "name another folder"):
        (folder / _STATE).mkdir(parents=True, exist_ok=True)
        file = (folder / _STATE / "lock").open("w")
    with file:
        try:
            lock(file, f"{folder}: a second fetch would spoil its files; make sure that only one writes there")
        except BlockingIOError:
            raise FailedError(f"{folder}: another fetch is writing here; wait for it, or name another folder") from None
        yield


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
