"""Reads files from S3 and any other store of fsspec, and repeats requests while the store doesn't answer.

Also computes the sha256 of a file while a reader reads it, so that its bytes are read once.
"""

import hashlib
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from data_pipeline.base import hub
from data_pipeline.base.errors import StoreError, StoreUnavailable, UserError, one_line
from data_pipeline.base.formatting import masked
from data_pipeline.base.paths import opening
from data_pipeline.base.progress import Activity

Result = TypeVar("Result")
WAIT_SECONDS = 300.0  # for a store that doesn't answer
LISTING_SECONDS = 15.0  # WAIT_SECONDS at the start of a build, when the address may be wrong
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0
_SILENT = 2.0  # seconds of failures before a warning
READ_AHEAD = 16 << 20  # bytes of a remote file that are requested at once

# Temporary failures, by the package and name of their class. `_is_temporary` has those that are an OSError.
_TEMPORARY = {
    "aiohttp.ClientError",
    "azure.AzureError",
    "botocore.ConnectionError",
    "botocore.HTTPClientError",
    "botocore.IncompleteReadError",
    "botocore.ResponseParserError",
    "gcsfs.HttpError",
    "google.TransportError",
    "http.HTTPException",
    "httpx.TransportError",  # of huggingface_hub 1
    "httpx2.TransportError",
    "huggingface_hub.HfHubHTTPError",
    "requests.RequestException",
    "urllib3.HTTPError",
}
_NO_LOGIN = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
_FORBIDDEN = {"PermissionError", "ClientAuthenticationError", "DefaultCredentialsError", "RefreshError"}
_BUSY = {
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "OperationAborted",
    "Throttling",
    "ConditionalRequestConflict",
    "NoSuchUpload",  # the answer that ended the upload was lost, and s3fs has asked again: the file is sent anew
}
_S3_TRIES = 3
_S3_URLS = ("s3://", "s3a://")
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}  # protocols of stores without folders
_S3 = {
    # s3fs retries the failed parts of an upload or read; `with_retries` retries all other requests
    "config_kwargs": {"connect_timeout": 10, "read_timeout": 15, "retries": {"total_max_attempts": 1}},
}


class Checksum:
    """The sha256 of the file at `path`, as far as the file was read without a gap, and the `progress` of reading it."""

    def __init__(self, path: str, progress: Activity | None = None):
        self.path, self.progress = path, progress or Activity("")
        self._digest, self._size = hashlib.sha256(), 0

    def update(self, position: int, data: bytes) -> None:
        """Adds `data`, the file's bytes from `position` on. Bytes after a gap are ignored."""
        if position <= self._size < position + len(data):
            self._digest.update(data[self._size - position :])
            self._size = position + len(data)

    def finish(self) -> tuple[int, str]:
        """Bytes and sha256 of the whole file. Reads the rest of the file; the sha256 is "" if this fails."""
        try:
            with open_file(self.path) as file:
                file.seek(self._size)
                while chunk := file.read(READ_AHEAD):
                    self.update(self._size, chunk)
        except StoreError:
            raise
        except (OSError, UserError):
            return self._size, ""  # the reader reports the damage
        return self._size, self._digest.hexdigest()


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it. The environment has S3's address and credentials, as boto3
    reads them: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE, …

    Raises StoreError if the file system's package isn't installed.
    """
    if "::" in url and os.path.lexists(path := url.removeprefix("file://")):  # a file's name, no chain of file systems
        return LocalFileSystem(), str(Path(path).absolute())
    is_s3 = url.startswith(_S3_URLS)
    options: dict[str, Any] = {"endpoint": hub.endpoint()} if url.startswith("hf://") else {}
    if url.partition("://")[0] in OBJECT_STORES:
        options = {"use_listings_cache": False, **(_S3 if is_s3 else {})}  # other processes write there, too
    try:
        found, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = "pip install 'encdec-pretrain[s3]'" if is_s3 else one_line(error)
        raise StoreError(f"{url}: the package of this file system isn't installed: {extra}") from None
    if is_s3:
        found.retries = _S3_TRIES
    return found, path


def is_local(found: Any) -> bool:
    return isinstance(found, LocalFileSystem)


def protocols(found: Any) -> set[str]:
    """The protocols of a file system's URLs."""
    return {found.protocol} if isinstance(found.protocol, str) else {*found.protocol}


def with_retries(attempt: Callable[[], Result], url: str, wait: float = WAIT_SECONDS) -> Result:
    """The result of `attempt`, which is called again with growing pauses while the store at `url` doesn't answer.

    Raises StoreUnavailable `wait` seconds after the first failure, StoreError at once if the store refuses, and errors
    about the file itself, such as FileNotFoundError, unchanged.
    """
    failing_since, pause, warned = None, _FIRST_PAUSE, False
    while True:
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:  # each file system raises its own errors
            if refusal := _refusal(error, url):
                raise refusal from None
            if not _is_temporary(error):
                raise
            reason = masked(one_line(error))
        failing_since = failing_since or time.monotonic()
        waited = time.monotonic() - failing_since
        if waited + pause > wait:
            raise StoreUnavailable(f"{url}: unavailable for {waited:.0f} s: {reason}; run the same command again later")
        if waited > _SILENT and not warned:
            warned = True
            print(f"warning: {masked(url)}: {reason}; waiting for it, up to {wait:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def open_file(path: str, checksum: Checksum | None = None, read_ahead: int = READ_AHEAD) -> BinaryIO:
    """The file at a path or URL as it is stored, opened for reading at any position.

    `checksum`: is updated by all reads. `read_ahead`: bytes of a remote file that are fetched beyond those that are
    read.

    Raises UserError if the file can't be opened. Errors of reading pass through. If a remote store doesn't answer,
    requests are retried; then StoreUnavailable is raised.
    """
    with opening(path):
        found, inside = filesystem(path)
        if is_local(found):
            file = found.open(inside, "rb")
        else:
            file = with_retries(lambda: found.open(inside, "rb", block_size=read_ahead), path)
    return cast(BinaryIO, file if is_local(found) and not checksum else RetriedFile(file, path, checksum=checksum))


def exists(url: str, wait: float = WAIT_SECONDS) -> bool:
    """Whether there is a file or directory at a path or URL; raises what `with_retries` raises."""
    found, path = filesystem(url)
    try:
        with_retries(lambda: found.info(path), url, wait)
    except FileNotFoundError:
        return False
    return True


def lists(url: str) -> bool:
    """Whether an object store lists the object at `url`. If so, a store that refuses to send the object refuses this
    object alone."""
    found, path = filesystem(url)
    if not OBJECT_STORES & protocols(found):
        return False
    within, _, name = path.rpartition("/")
    try:
        return path in with_retries(lambda: found.find(within, prefix=name), url)
    except (UserError, FileNotFoundError):
        return False


def check_bucket(url: str) -> None:
    """Raises StoreError if the S3 bucket of `url` doesn't exist; call this where no file was found."""
    if url.startswith(_S3_URLS):
        found, path = filesystem(url)
        with_retries(lambda: found.find(path.split("/")[0], prefix="no such folder/"), url)


class RetriedFile(io.RawIOBase):
    """A `file` of fsspec that is read `retried`, after a failure from the same position.

    `beginning`: the file's first bytes, if they were read before. `retried`: a function with the parameters `attempt`
    and `url` of `with_retries`. Reading the file updates its `checksum`.
    """

    def __init__(
        self,
        file: Any,
        path: str,
        beginning: bytes = b"",
        retried: Callable[..., Any] = with_retries,
        checksum: Checksum | None = None,
    ):
        self._file, self._path, self._at = file, path, 0
        self._beginning, self._retried, self._checksum = beginning, retried, checksum

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = self._retried(lambda: self._file.seek(offset, whence), self._path)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        def attempt() -> bytes:
            if self._file.tell() != start:
                self._file.seek(start)
            return self._file.read(wanted)

        wanted = -1 if size is None else size
        content = self._beginning[self._at : None if wanted < 0 else self._at + wanted]
        start, wanted = self._at + len(content), max(-1, wanted - len(content))
        content += self._retried(attempt, self._path) if wanted else b""
        if self._checksum is not None:
            self._checksum.update(self._at, content)
        self._at += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self.read()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _refusal(error: Exception, url: str) -> StoreError | None:
    """The error to raise if the store refuses a request, with the way out. None: a later request may succeed, or the
    error is about the file."""
    if refused := hub.refusal(error, url):
        return refused
    code = code_of(error)
    if code == "NoSuchBucket":
        return StoreError(f"{url}: there is no bucket {url.partition('://')[2].split('/')[0]!r}")
    if type(error).__name__ in _NO_LOGIN:
        way_out = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; FSSPEC_S3_ANON=true if it is public"
        return StoreError(f"{url}: no credentials: {way_out}")
    forbidden = type(error) is OSError and str(error).startswith("Forbidden: ")  # gcsfs's
    forbidden |= bool(_FORBIDDEN & {kind.__name__ for kind in type(error).__mro__})
    if forbidden or status_of(error) in (401, 403):
        return StoreError(f"{url}: permission denied: {code + ': ' if code else ''}{one_line(error)}")
    if type(error).__name__ == "FileExpired":
        return StoreError(f"{url}: was replaced while it was read; run the same command again")
    return None


def _is_temporary(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if 400 <= status_of(error) < 500 and status_of(error) not in (408, 425, 429):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    response = getattr(error.__cause__, "response", None)
    if isinstance(error, OSError) and isinstance(response, dict):
        http = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return (http >= 500 and http != 501) or http == 429 or code_of(error) in _BUSY  # 501: never implemented
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return bool(names & _TEMPORARY)


def status_of(error: Exception) -> int:
    """The HTTP status that an error of aiohttp, httpx, Azure or gcsfs reports; 0 if none."""
    answer = getattr(error, "response", None)
    found = (getattr(error, "status", None), getattr(answer, "status_code", None), getattr(error, "code", None))
    return next((status for status in found if isinstance(status, int)), 0)


def code_of(error: Exception) -> str:
    """S3's code of an error; "" if none."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
