"""Downloads published files, several at a time. Each is resumed by byte range, and gets its name once it is checked."""

import bz2
import contextlib
import gzip
import hashlib
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

import requests
import urllib3

from data_pipeline.foundation.code_version import package_version
from data_pipeline.foundation.errors import FailedError, UserError, failing_in_one_line, one_line
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.locks import lock
from data_pipeline.foundation.progress import track
from data_pipeline.tools.fetch.catalogues import PublishedFile

STATE = ".fetch"  # below the output directory: partial files, and a lock
RETRIES = urllib3.Retry(
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


def open_session(contact: str = "") -> requests.Session:
    """Requests that are repeated while a server is busy or doesn't answer. `contact` tells its operators who asks."""
    session = requests.Session()
    about = f"data-pipeline fetch{'; ' + contact if contact else ''}"
    session.headers["User-Agent"] = f"encdec-pretrain/{package_version()} ({about})"
    session.headers["Accept-Encoding"] = "identity"  # else a .gz would not arrive with the published bytes
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=16, max_retries=RETRIES))
    return session


def read(session: requests.Session, url: str, if_missing: str) -> bytes:
    """The content of a small file, such as a list. Raises UserError if it doesn't exist, else FailedError."""
    try:
        response = session.get(url, timeout=_TIMEOUT)
        if response.status_code in (404, 410):
            raise UserError(f"{url}: {if_missing}")
        response.raise_for_status()
    except requests.RequestException as error:
        raise FailedError(f"{url}: {one_line(error)}") from None
    return response.content


class Download:
    """One file on its way to its place below `folder`; `folder`/.fetch/PATH.part has the bytes received so far.

    `present`: whether the file is there already; `missing`: bytes to receive, as far as its size is published;
    `received`: those that came; `problem`: why the file can't be fetched, or "".
    """

    def __init__(self, file: PublishedFile, folder: Path, session: requests.Session):
        self.file, self._session, self.received, self.problem = file, session, 0, ""
        self._path, self._part = folder / file.path, folder / STATE / f"{file.path}.part"
        # The file was checked before it got its name.
        self.present = self._path.exists() and file.size in (None, _size(self._path))
        self.missing = 0 if self.present else max(0, (file.size or 0) - _size(self._part))

    def run(self) -> "Download":
        """Fetches the file, unless it is there. Raises FailedError if it can't be written."""
        pieces = wrong = 0
        try:
            while not self.present and pieces < _PIECES and wrong < _WRONG_CONTENTS:
                pieces += 1
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
        except requests.RequestException as error:  # after all retries
            self.problem = one_line(error)
        except OSError as error:
            raise FailedError(f"can't write {self._path}: {error.strerror or one_line(error)}") from None
        return self

    def _receive(self) -> str:
        """Why the file didn't come to its end, or "": the next call goes on from there."""
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
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    needed, free = sum(one.missing for one in downloads), shutil.disk_usage(existing).free
    if needed > free:
        raise FailedError(f"{folder}: {human_size(needed)} are still to be fetched, only {human_size(free)} are free")

    def received() -> int:
        return sum(one.received for one in downloads)

    def doing() -> str:
        return human_size(received())

    failures = 0
    with sole_user(folder), ThreadPool(connections) as pool:  # daemon threads: Ctrl-C doesn't wait for a server
        done = pool.imap_unordered(Download.run, downloads)
        for download in track(done, len(downloads), "fetch", lambda _: 0, needed, received, doing):
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
        (folder / STATE).mkdir(parents=True, exist_ok=True)
        file = (folder / STATE / "lock").open("w")
    with file:
        try:
            lock(file, f"{folder}: a second fetch would spoil its files; make sure that only one writes there")
        except BlockingIOError:
            raise FailedError(f"{folder}: another fetch is writing here; wait for it, or name another folder") from None
        yield


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
