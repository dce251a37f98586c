"""The files that Common Crawl and Wikimedia publish, and their download, several at a time.

Each is resumed by byte range, and gets its name once it is checked.
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

_STATE = ".fetch"  # below the output directory: partial files, and a lock


class Retry(urllib3.Retry):
    """Says once for each request that it is repeated, and why."""

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
_PIECES = 20  # in which a file may arrive before it is given up; the next command continues it
_WRONG_CONTENTS = 2  # the first may be two versions of the file, joined
_FAILURES_IN_A_ROW = 10  # then the rest would fail too; don't ask a server that refuses us 50,000 times


@dataclass(frozen=True)
class PublishedFile:
    """A file in a publisher's list: its address, its place below the output directory, its bytes, and its checksum as
    "sha1:…" or "md5:…", or that of another algorithm of hashlib. The last two are None if the publisher gives none.

    Lists come from the network. FailedError refuses a path that could leave the output directory, and names that start
    with a dot, as the folder for partial files does.
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
    """Requests that are repeated while a server is busy or doesn't answer. `contact` tells its operators who asks."""
    session = requests.Session()
    about = f"data-pipeline fetch{'; ' + contact if contact else ''}"
    session.headers["User-Agent"] = f"encdec-pretrain/{package_version()} ({about})"
    session.headers["Accept-Encoding"] = "identity"  # else a .gz would not arrive with the published bytes
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=16, max_retries=RETRIES))
    return session


def _read(session: requests.Session, url: str, if_missing: str) -> bytes:
    """The content of a small file, such as a list. Raises UserError if it doesn't exist, else FailedError."""
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
    """One file on its way to its place below `folder`; `folder`/.fetch/PATH.part has the bytes received so far.

    `present`: whether the file is there already; `missing`: bytes to receive, as far as its size is published;
    `received`: those that came; `problem`: why the file can't be fetched, or "".
    """

    def __init__(self, file: PublishedFile, folder: Path, session: requests.Session):
        self.file, self._session, self.received, self.problem = file, session, 0, ""
        self._path, self._part = folder / file.path, folder / _STATE / f"{file.path}.part"
        # The file was checked before it got its name.
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
        """Why the file didn't come to its end, or "": the next call resumes from there."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        have = _size(self._part)
        if self._part.exists() and have == self.file.size:
            return ""
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._session.get(self.file.url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if have and response.status_code == 416:
                return ""  # nothing is missing, or this is another file now; its content says which
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
        """What is wrong with the content, or "". Without a published checksum, it must decompress to its end."""
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
    """Downloads `files` below `folder`, except those already there. Called again, it continues where it stopped.

    A file that can't be fetched has a `problem`, and the others are still fetched. Only one process may fetch to
    a folder. Raises FailedError when nothing more can be fetched: the disk is full, or ten files in a row failed.
    """
    downloads = [Download(file, folder, session) for file in files]

    def received() -> int:
        return sum(one.received for one in downloads)

    missing, failures = sum(one.missing for one in downloads), 0
    with sole_user(folder), ThreadPool(connections) as pool:  # daemon threads: Ctrl-C doesn't wait for a server
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
    """Keeps a second command out of `folder`: both would write to the same .part files."""
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
