"""The store of a corpus in a bucket: S3, or another object store that can refuse to replace an object.

Nodes share nothing but the bucket. A claim is an object `.stages/claims/NUMBER`, which a driver creates only if no
object has this number. The driver with the highest number has the corpus. It renews the claim by writing the object
again. If the object stays unchanged for `LEASE_SECONDS`, the driver is gone, and another driver may create the next
number; no clocks are compared. The driver and its workers look for the claim before they write or delete, at most ten
times per lease.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import psutil

from data_pipeline.base import stores
from data_pipeline.base.atomic import sha256
from data_pipeline.base.errors import FailedError, NodeUnfit, StoreError, StoreUnavailable, UserError, one_line
from data_pipeline.base.json_file import parse_json
from data_pipeline.base.store import Answer, Item, Store, in_threads

LEASE_SECONDS = 30.0
READ_AHEAD = 32 << 20  # bytes of a file that are requested at once: most files of documents are smaller
_LOOKS = 10  # at a claim per lease; also renewals
_CLAIMS = ".stages/claims"
_DIGITS = 8  # in the numbers of claims and of the pieces of a file of lines
_WHOLE = ".whole"  # ends the name of a piece that replaces all earlier pieces
_SCRATCH = f"encdec-pretrain.{socket.gethostname()}."  # begins the names of scratch folders; the process's id follows
_THREADS_OF_WORKER = 4  # thousands of workers ask the store at once
_PART = 32 << 20  # bytes of a part of a multipart upload
_ELSEWHERE = "build in a folder, then copy its files there, manifest.json last"


class ObjectStore(Store):
    seconds_between_appends = 10.0
    most_opens = 100_000  # two or three requests each; S3 answers 5,500 a second
    least_read = 1 << 18

    def __init__(self, url: str, at_start: bool = False):
        """`at_start`: the address may be wrong, so until `claim` the store has `stores.LISTING_SECONDS` to answer."""
        self._url, self._at_start = url.rstrip("/"), at_start
        self._filesystem, root = stores.filesystem(self._url)
        self._root = root.rstrip("/")
        self._protocols = stores.protocols(self._filesystem)
        self._is_away = self._keeps_uploads = False
        self._claimed = 0  # the number of this driver's claim
        self._driver = 0  # the claim of this worker's driver
        self._seen, self._looked = 0, 0.0  # the last claim that was found, and when
        self._written: dict[str, tuple[int, str]] = {}
        self._pieces: dict[str, list[str]] = {}  # the pieces of each file of lines

    def __str__(self) -> str:
        return self._url

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ObjectStore, (self._url,)

    @property
    def disk(self) -> Path:
        return Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir())

    def _ask(self, request: Callable[..., Answer], name: str, *given: Any, **options: Any) -> Answer:
        """The answer of the file system to a `request` about a file or folder."""
        path = f"{self._root}/{name}".rstrip("/")
        return self._retried(lambda: request(path, *given, **options), self.at(name))

    def _retried(self, attempt: Callable[[], Answer], url: str) -> Answer:
        """The result of an attempt, with_retries; at once, if the store was away when it was last asked."""
        wait = stores.LISTING_SECONDS if self._at_start else stores.WAIT_SECONDS
        try:
            answer = stores.with_retries(attempt, url, 0.0 if self._is_away else wait)
        except StoreUnavailable:
            self._is_away = True  # whoever still wants to write what is finished needn't wait as long again
            raise
        self._is_away = False
        return answer

    def each(self, function: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
        return in_threads(function, [*items], 1, _THREADS_OF_WORKER if self._driver else None)

    def get(self, name: str) -> bytes:
        whole = {"max_concurrency": 1} if "s3" in self._protocols else {}  # s3fs then doesn't ask for the size first
        return self._ask(self._filesystem.cat_file, name, **whole)

    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        def read(path: str) -> list[bytes]:
            starts, stops = zip(*asked, strict=True)
            return self._filesystem.cat_ranges([path] * len(asked), list(starts), list(stops), on_error="raise")

        def content(start: int, stop: int) -> bytes:
            at, found = next(one for one in answers if one[0][0] <= start and stop <= one[0][1])
            return found[start - at[0] : stop - at[0]]

        asked = list[tuple[int, int]]()  # ranges that are near each other are one request
        for start, stop in sorted(one for one in ranges if one[0] < one[1]):
            if asked and start <= asked[-1][1] + self.least_read:
                asked[-1] = asked[-1][0], max(stop, asked[-1][1])
            else:
                asked.append((start, stop))
        answers = [*zip(asked, self._ask(read, name), strict=True)] if asked else []
        return [content(start, stop) if start < stop else b"" for start, stop in ranges]

    def readable(self, name: str) -> BinaryIO:
        try:  # reads most files whole, without a request for the size
            beginning = self._ask(self._filesystem.cat_file, name, start=0, end=READ_AHEAD)
        except UserError:
            raise
        except Exception:  # an empty file has no such range; opening the file reports anything else
            beginning = b""
        if 0 < len(beginning) < READ_AHEAD:
            return io.BytesIO(beginning)
        file = self._ask(self._filesystem.open, name, "rb", block_size=READ_AHEAD)
        return cast(BinaryIO, stores.RetriedFile(file, self.at(name), beginning, self._retried))

    @contextlib.contextmanager
    def local(self, names: Iterable[str]) -> Iterator[Path]:
        def fetch(name: str) -> None:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.write_bytes(self.get(name))

        with self._scratch() as directory:
            self.each(fetch, names)
            yield directory

    @contextlib.contextmanager
    def put(self, name: str) -> Iterator[Path]:
        with self._scratch() as directory:
            path = directory / PurePosixPath(name).name
            yield path
            self._send(path, name)
            self._written[name] = path.stat().st_size, sha256(path)

    def _send(self, path: Path, name: str) -> None:
        def sent(target: str) -> None:
            self._check_claim()  # before each attempt: another driver may have taken over while the store was away
            if not stores.OBJECT_STORES & self._protocols:  # on an object store, makedirs may create a bucket
                self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._filesystem.put_file(str(path), target, **of_s3)

        of_s3 = {"chunksize": _PART, "max_concurrency": 2} if "s3" in self._protocols else {}
        self._ask(sent, name)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A temporary folder. If this process is killed, a later worker removes the folder."""
        with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}.", dir=self.disk) as directory:
            yield Path(directory)

    def write(self, name: str, content: bytes) -> None:
        self._check_claim()
        self._ask(self._filesystem.pipe_file, name, content)
        self._written[name] = len(content), hashlib.sha256(content).hexdigest()

    def checksum(self, name: str) -> tuple[int, str]:
        with self.readable(name) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            return file.seek(0, os.SEEK_END), digest

    def written(self, name: str) -> tuple[int, str]:
        return self._written.pop(name, None) or self.checksum(name)

    def names(self, folder: str = "", deep: bool = True) -> list[str]:
        return [*self._files(folder, deep)]

    def _files(self, folder: str, deep: bool = True) -> dict[str, int]:
        """The bytes of each file, by name."""
        return {name: info["size"] for name, info in self._listed(folder, deep).items() if info["type"] == "file"}

    def folders(self, folder: str) -> list[str]:
        found = self._listed(folder, deep=False).items()
        return [PurePosixPath(name).name for name, info in found if info["type"] == "directory"]

    def _listed(self, folder: str, deep: bool) -> dict[str, dict[str, Any]]:
        def listed(path: str) -> list[dict[str, Any]]:
            self._filesystem.invalidate_cache(path)
            within, _, last = path.rpartition("/")
            find = self._filesystem.find
            try:
                if "s3" in self._protocols and within:  # s3fs's ls sends three requests for a missing folder
                    depth = {} if deep else {"maxdepth": 1, "withdirs": True}
                    return [*find(within, prefix=f"{last}/", detail=True, **depth).values()]
                return [*find(path, detail=True).values()] if deep else self._filesystem.ls(path, detail=True)
            except FileNotFoundError:
                return []

        found = self._ask(listed, folder)
        return {one["name"].removeprefix(f"{self._root}/").rstrip("/"): one for one in found}

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        folders = sorted({name.rpartition("/")[0] for name in names})
        listed = self.each(partial(self._files, deep=False), folders)
        found = {name: size for files in listed for name, size in files.items()}
        return {name: found[name] for name in names if name in found}

    def delete(self, names: Iterable[str]) -> None:
        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._ask(self._filesystem.rm_file, name)

        self._check_claim()
        self.each(remove, names)

    def delete_folder(self, folder: str) -> None:
        self.delete(self.names(folder))
        self._pieces.clear()

    # A file of lines is a folder of numbered pieces. A piece that ends in _WHOLE replaces all earlier pieces.

    def lines(self, name: str) -> Iterator[bytes]:
        pieces = self._pieces_of(name)
        first = max((at for at, piece in enumerate(pieces) if piece.endswith(_WHOLE)), default=0)
        contents = self.each(self.get, pieces[first:])
        return (line for content in contents for line in content.splitlines())

    def _pieces_of(self, name: str) -> list[str]:
        """All pieces of a file of lines. The driver, which alone adds pieces, lists them once: a listing may be old."""
        if name not in self._pieces or not self._claimed:
            self._pieces[name] = sorted(self.names(name))
        return self._pieces[name]

    def append(self, name: str, lines: bytes, files: Collection[str]) -> None:
        self._add(name, lines, "")

    def replace_lines(self, name: str, lines: bytes) -> None:
        self._add(name, lines, _WHOLE)
        self.delete(self._pieces[name][:-1])
        del self._pieces[name][:-1]

    def _add(self, name: str, lines: bytes, end: str) -> None:
        pieces = self._pieces_of(name)
        piece = f"{name}/{_number(pieces[-1]) + 1 if pieces else 1:0{_DIGITS}d}{end}"
        self.write(piece, lines)
        pieces.append(piece)

    def claim(self) -> None:
        """Waits until the lease of a killed driver has ended. Raises StoreError if the bucket can't be used."""
        if self._claimed:
            return
        if not stores.OBJECT_STORES & self._protocols:
            expected = "expected a path, or a URL of an object store (s3, gs, az, abfs)"
            raise UserError(f"output: {self}: {expected}; {_ELSEWHERE}")
        self._pieces.clear()  # another driver may have added pieces
        token, known, since, told = uuid.uuid4().hex, b"", time.monotonic(), False
        while True:
            newest, content = self._newest()
            if content != known:
                known, since = content, time.monotonic()
                if told and not _is_released(content):
                    other = f"another build is at work on it ({_holder(content)})"
                    raise FailedError(f"{self}: {other}; wait for it or stop it")
            if not content or _is_released(content) or time.monotonic() - since > LEASE_SECONDS:
                mine = _holding(token, 0)
                # if the first request's answer was lost, a retry finds this driver's own object
                if self._create(newest + 1, mine) or self._content(newest + 1) == mine:
                    break
                time.sleep(LEASE_SECONDS / _LOOKS)  # until the other driver's claim is listed
                continue
            if not told:
                told = True
                seconds = f"{LEASE_SECONDS:.0f} s for a sign of the build that last worked on it ({_holder(content)})"
                print(f"{self}: waiting up to {seconds}", file=sys.stderr, flush=True)
            time.sleep(LEASE_SECONDS / _LOOKS)
        try:
            self._check_conditions(newest + 1)
        except UserError:
            self.delete([_claim(newest + 1)])
            raise
        self._claimed, self._ended, self._at_start = newest + 1, threading.Event(), False
        self._renewal = threading.Thread(target=self._renew, args=[self._claimed, token, self._ended], daemon=True)
        self._renewal.start()
        for name in sorted(self.names(_CLAIMS)):  # oldest first: a claim without a successor counts as the newest
            if _number(name) < self._claimed:
                self.delete([name])

    def _newest(self) -> tuple[int, bytes]:
        """The highest number of a claim, and its content; (0, b"") if there is none."""
        while claims := sorted(self.names(_CLAIMS)):
            with contextlib.suppress(FileNotFoundError):  # a driver with a newer claim has just removed it
                return _number(claims[-1]), self.get(claims[-1])
        return 0, b""

    def _create(self, number: int, content: bytes) -> bool:
        """Creates a claim; returns False if another claim has this number."""
        try:
            self._ask(self._filesystem.pipe_file, _claim(number), content, mode="create")
        except UserError as error:
            way_out = "a build lists, reads, writes and deletes objects there"
            raise type(error)(f"output: {error}; {way_out}") from None
        except Exception as error:  # each file system raises its own errors
            if isinstance(error, FileExistsError) or stores.code_of(error) == "PreconditionFailed":
                return False
            if isinstance(error, FileNotFoundError) or stores.status_of(error) == 404:
                raise StoreError(f"output: {self}: there is no bucket {self._root.split('/')[0]!r}") from None
            raise StoreError(f"output: {self.at(_claim(number))}: can't be written: {one_line(error)}") from None
        return True

    def _check_conditions(self, number: int) -> None:
        """Raises StoreError if the store replaces the claim in spite of the condition to create it."""
        if self._create(number, b""):
            reason = "its store replaces objects in spite of the condition If-None-Match: *"
            way_out = f"two builds at once would damage the corpus; {_ELSEWHERE}"
            raise StoreError(f"output: {self}: {reason}; {way_out}")

    def _renew(self, number: int, token: str, ended: threading.Event) -> None:
        for times in itertools.count(1):
            if ended.wait(LEASE_SECONDS / _LOOKS):
                return
            with contextlib.suppress(Exception):  # `_look` finds out if another driver has taken over
                if not self._has(number):
                    return
                self._filesystem.pipe_file(f"{self._root}/{_claim(number)}", _holding(token, times))

    def release(self) -> None:
        if self._claimed:
            self._ended.set()
            self._renewal.join()
            with contextlib.suppress(UserError):  # the next build then waits until the lease has ended
                self.write(_claim(self._claimed), _holding("", -1))
            self._claimed = 0

    def begin(self) -> str:
        self.claim()
        return str(self._claimed)

    @contextlib.contextmanager
    def at_work(self, token: str) -> Iterator[None]:
        self._look_again(int(token))
        self._driver = int(token)
        for folder in self.disk.glob(f"{_SCRATCH}*"):
            process = folder.name.removeprefix(_SCRATCH).partition(".")[0]
            if process.isdecimal() and not psutil.pid_exists(int(process)):
                shutil.rmtree(folder, ignore_errors=True)
        try:
            yield
        finally:
            self._driver = 0

    def _check_claim(self) -> None:
        """Raises NodeUnfit if another driver has the corpus than this driver, or this worker's."""
        self._look_again(self._driver or self._claimed)

    def _look_again(self, claim: int) -> None:
        """Like `_look`, unless the claim was found a moment ago. Does nothing for claim 0, which no driver has."""
        if claim and (claim != self._seen or time.monotonic() - self._looked > LEASE_SECONDS / _LOOKS):
            self._look(claim)

    def _look(self, claim: int) -> None:
        """Raises NodeUnfit if another driver has the corpus than the one of `claim`."""
        if not self._has(claim):
            raise NodeUnfit(f"{self}: another build has taken over, or this isn't the bucket that the build writes to")
        self._seen, self._looked = claim, time.monotonic()

    def _has(self, claim: int) -> bool:
        """Whether the driver of `claim` has the corpus. Reads the objects, since a listing may be old."""
        return bool(self._content(claim)) and not self._content(claim + 1)

    def _content(self, claim: int) -> bytes:
        """The content of a claim; b"" if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self.get(_claim(claim))
        return b""

    def remove_leftovers(self, folders: Iterable[str]) -> None:
        """Aborts unfinished multipart uploads of files in `folders`: their parts are invisible and cost money.

        If the store refuses, a line says so, once: a build needs no permission for it.
        """
        if "s3" not in self._protocols or self._keeps_uploads:
            return
        self._check_claim()
        within = self._root.partition("/")[2]
        names = {f"{within}/{folder}/".removeprefix("/") for folder in folders}
        try:
            for upload in [*self._uploads()]:
                if upload["Key"].startswith(tuple(names)):
                    self._of_uploads("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        except StoreUnavailable:
            raise
        except StoreError as error:
            self._keeps_uploads = True
            way_out = (
                "unfinished uploads of killed builds stay; AbortIncompleteMultipartUpload is a bucket's rule for them"
            )
            print(f"note: {error}; {way_out}", file=sys.stderr)

    def _uploads(self) -> Iterator[dict[str, str]]:
        """The unfinished uploads below the corpus's URL. The store lists at most 1,000 at once."""
        prefix, after = f"{self._root}/".partition("/")[2], dict[str, str]()
        while True:
            page = self._of_uploads("list_multipart_uploads", Prefix=prefix, **after)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _of_uploads(self, method: str, **given: str) -> dict[str, Any]:
        def asked() -> dict[str, Any]:
            try:
                return self._filesystem.call_s3(method, Bucket=bucket, **given)
            except FileNotFoundError as error:
                if stores.code_of(error) != "NoSuchUpload":
                    raise
                return {}  # the upload has ended

        bucket = self._root.partition("/")[0]
        return self._retried(asked, self._url)


def _claim(number: int) -> str:
    return f"{_CLAIMS}/{number:0{_DIGITS}d}"


def _number(name: str) -> int:
    """The number in the name of a claim or of a piece of lines."""
    return int(PurePosixPath(name).name.removesuffix(_WHOLE))


def _holding(token: str, renewed: int) -> bytes:
    holder = f"host {socket.gethostname()}, process {os.getpid()}"
    return json.dumps({"holder": holder, "token": token, "renewed": renewed}).encode()


def _is_released(content: bytes) -> bool:
    return not parse_json(content, dict[str, Any], _CLAIMS).get("token")


def _holder(content: bytes) -> str:
    return str(parse_json(content, dict[str, Any], _CLAIMS).get("holder"))
