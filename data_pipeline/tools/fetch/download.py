"""Downloads one published file: receives it in pieces, checks it, and only then gives it its name."""

import gzip
import hashlib
import os
import re
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import requests

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.tools.fetch.client import (
    NETWORK_ERRORS,
    Client,
    PermanentError,
    StoppedError,
    TransientError,
    describe,
)
from data_pipeline.tools.fetch.published import PublishedFile

STATE = ".fetch"  # below the output directory: partial files and records of checked files
_BLOCK = 1 << 18
_WRONG_CONTENTS = 3  # complete downloads with wrong content after which a file is given up


@dataclass(frozen=True)
class PartVersion:
    """The version of a file that the bytes received so far belong to, by the server's own identifier."""

    url: str = ""
    validator: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class CheckedFile:
    """A complete file as it was when it was checked."""

    url: str
    bytes: int
    modified_ns: int
    checksum: str
    checked_against: str


class Download:
    """The download of one file to its place below `folder`.

    Its state lies below `folder/.fetch/`: `PATH.part` has the bytes received so far, `PATH.part.json` their
    `PartVersion`, and `PATH.json` is the `CheckedFile`. If one of them is missing or damaged, the
    content is checked instead. `size` is None until it is known; `present` and `received` are the bytes that were there
    before, and that have come since.
    """

    def __init__(self, file: PublishedFile, folder: Path, client: Client):
        self.file, self._client = file, client
        self.size, self.present, self.received = file.size, 0, 0
        self.path = folder / file.path
        state = folder / STATE / file.path
        self._part = state.with_name(state.name + ".part")
        self._version = state.with_name(state.name + ".part.json")
        self._record = state.with_name(state.name + ".json")
        self._wrong_contents = 0

    def is_complete(self, recheck: bool = False) -> bool:
        """Whether the file exists with the right content.

        If its size and modification time are those recorded when it was checked, its content isn't read again, except
        with `recheck`. A file without a record and without a published checksum can't be verified and isn't complete.
        """
        if not self.path.exists():
            return False
        record = read_valid_json(self._record, CheckedFile)
        checksum = self.file.checksum or (record and record.checksum)
        if not checksum or self.file.size not in (None, self.path.stat().st_size):
            return False
        found = self._describe(self.path, checksum)
        if recheck or record is None or replace(record, url=found.url, checked_against=found.checked_against) != found:
            if _digest(self.path, checksum) != checksum:
                self._client.note(
                    f"{self.file.path}: exists, but its content isn't what was checked or published; fetching it again"
                )
                return False
            write_json(self._record, asdict(found))
        self.size = self.present = found.bytes
        return True

    def run(self) -> None:
        """Downloads the file. Raises PermanentError, StoppedError, or OSError if it can't be written."""
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self.present = self._have()
        self._client.keep_trying(self._attempt, self.file.path, self._have)

    def _have(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _attempt(self) -> None:
        version = read_valid_json(self._version, PartVersion) or PartVersion()
        if version.url != self.file.url:
            self._discard()
        size = self.file.size if self.file.size is not None else version.size
        if size is not None and self._have() > size:
            self._discard()
        if size is None or self._have() < size or not self._part.exists():
            self._receive(version)
        self._publish(self._check())

    def _receive(self, version: PartVersion) -> None:
        """Requests the missing bytes and appends them; starts over if the server can't or won't continue."""
        have = self._have()
        # Without a validator, parts of two versions could be joined; only a published checksum would show that.
        if have and not (version.validator or self.file.checksum):
            self._discard()
            have = 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        if have and version.validator:
            headers["If-Range"] = version.validator
        try:
            with self._client.get(self.file.url, headers) as response:
                if response.status_code == 206 and not self._continues(response, have, version):
                    self._discard()
                    raise TransientError("the server continued with another range or version")
                if response.status_code != 206:
                    have = 0
                size = self._total(response, have)
                if have == 0:
                    self._discard()
                    write_json(self._version, asdict(PartVersion(self.file.url, _validator(response), size)))
                self.size = size
                self._append(response, size)
        except PermanentError as error:
            if error.status != 416:
                raise
            self._discard()
            raise TransientError("the server no longer has the bytes that are missing") from None

    @staticmethod
    def _continues(response: requests.Response, have: int, version: PartVersion) -> bool:
        content_range = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        return (
            have > 0
            and content_range is not None
            and int(content_range[1]) == have
            and (version.size is None or content_range[2] in ("*", str(version.size)))
            and _validator(response) in (None, version.validator)  # a server may ignore If-Range
        )

    def _total(self, response: requests.Response, have: int) -> int | None:
        """The size of the file, by the publisher's list or the server's answer. They must agree if both give one."""
        length = response.headers.get("Content-Length", "")
        offered = have + int(length) if length.isdecimal() else None
        if None not in (self.file.size, offered) and offered != self.file.size:
            self._discard()
            raise TransientError(f"the server offers {offered:,} bytes, but the published size is {self.file.size:,}")
        return self.file.size if offered is None else offered

    def _append(self, response: requests.Response, size: int | None) -> None:
        with self._part.open("ab") as part:
            have = part.tell()
            while block := _read(response, have, size):
                if self._client.stop.is_set():
                    raise StoppedError
                part.write(block)
                have += len(block)
                self.received += len(block)
            part.flush()
            os.fsync(part.fileno())
        if size is not None and have < size:
            raise TransientError(f"connection lost after {have:,} of {size:,} bytes")
        if size is not None and have > size:
            self._discard()
            raise TransientError(f"expected {size:,} bytes, received more")

    def _check(self) -> str:
        """The checksum of what was received. Without a published one, a .gz must at least decompress to its end."""
        published = self.file.checksum
        found = _digest(self._part, published or "sha256:")
        if published is not None:
            problem = f"the checksum is {found}, the published one {published}" if found != published else None
        else:
            problem = _gzip_problem(self._part) if self.file.path.endswith(".gz") else None
        if problem:
            self._discard()
            self._wrong_contents += 1
            if self._wrong_contents >= _WRONG_CONTENTS:
                raise PermanentError(f"{problem}; given up after {self._wrong_contents} downloads")
            raise TransientError(problem)
        return found

    def _publish(self, checksum: str) -> None:
        # The record is written first, so that the file never exists without it; before the rename it matches nothing.
        # If a power failure undoes the rename, the .part, on disk since `_append`, is published next time.
        write_json(self._record, asdict(self._describe(self._part, checksum)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._part.replace(self.path)
        self._version.unlink(missing_ok=True)

    def _describe(self, path: Path, checksum: str) -> CheckedFile:
        status, against = path.stat(), "published checksum" if self.file.checksum else "size and format"
        return CheckedFile(self.file.url, status.st_size, status.st_mtime_ns, checksum, against)

    def _discard(self) -> None:
        self.present = 0
        self._part.unlink(missing_ok=True)
        self._version.unlink(missing_ok=True)


def _read(response: requests.Response, have: int, size: int | None) -> bytes:
    """The next bytes, at most one more than expected, which shows that the server sends too many."""
    try:
        return response.raw.read1(_BLOCK if size is None else min(_BLOCK, size - have + 1))
    except NETWORK_ERRORS as error:
        of = "" if size is None else f" of {size:,}"
        raise TransientError(f"connection lost after {have:,}{of} bytes: {describe(error)}") from None


def _validator(response: requests.Response) -> str | None:
    """The identifier of this version for If-Range: a strong ETag, else the date (RFC 9110, section 13.1.5)."""
    tag = response.headers.get("ETag")
    return tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")


def _digest(path: Path, checksum: str) -> str:
    """The checksum of the file's content, of the same kind as `checksum` ("kind:hex")."""
    kind = checksum.partition(":")[0]
    with path.open("rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def _gzip_problem(path: Path) -> str | None:
    try:
        with gzip.open(path) as file:
            while file.read(_BLOCK):
                pass
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return f"the file received is no complete gzip file: {error}"
    return None
