"""Atomic writes: a file or directory appears whole or not at all (temporary name, flush, fsync, rename); and locks.

A file is on the disk when its writer returns. With `begun_in`, the caller flushes the file's folder instead, once for
all files of the folder. That is for files that can be written again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from data_pipeline.base.errors import UserError

SEAL = b',\n "sha256": "'  # at the end of a sealed JSON file
TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)
_BYTES_AT_A_TIME = 1 << 20
_warned: set[str] = set()  # the warnings that this process has printed


@contextlib.contextmanager
def atomic_path(path: Path, begun_in: Path | None = None) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to `path` when the block succeeds and removed when it raises.

    `begun_in`: a folder for the temporary path. The content is on the disk before the file is renamed, but a power cut
    may lose the new name until the caller has flushed the file's folder.
    """
    temporary = temporary_path(path if begun_in is None else begun_in / path.name)
    if not temporary.parent.exists():  # spares a mkdir for each file
        temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        flush(temporary)
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(path)
        if begun_in is None:
            flush(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that appears at `path` when the block succeeds."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield file


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A hidden directory beside `path`, renamed to `path` when the block succeeds and removed when it raises.

    Raises UserError if `path` exists and isn't an empty directory, or if no directory can be made there.
    """
    temporary = temporary_path(path)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path}: exists already; choose another directory")
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{path}: no directory can be made here: {(error.strerror or str(error)).lower()}") from None
    try:
        yield temporary
        for file in temporary.rglob("*"):
            flush(file)
        commit(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_path(path: Path) -> Path:
    """A unique temporary name beside `path`, which `remove_leftovers` recognises."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def commit(temporary: Path, path: Path) -> None:
    """Renames a finished file or directory to `path`. Content and name are on the disk when this returns."""
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def write_bytes(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file. `mode`: its permissions; None: as for any new file."""
    with atomic_path(path) as temporary:
        if mode is not None:
            temporary.touch(mode & 0o700)  # nobody else may open the file before it has its permissions
            temporary.chmod(mode)
        temporary.write_bytes(content)


def write_json(path: Path, value: Any, sealed: bool = False, mode: int | None = None) -> None:
    """Writes `value` as JSON; dataclasses and config sections become objects of their fields.

    `sealed`: adds a last key `sha256`, the checksum of all bytes before it, which `json_file.seal_holds` checks. `mode`
    as for `write_bytes`.
    """
    write_bytes(path, json_bytes(value, sealed), mode)


def json_bytes(value: Any, sealed: bool) -> bytes:
    """The content that `write_json` writes."""
    content = json.dumps(value, indent=1, ensure_ascii=False, default=_fields).encode()
    if sealed:
        above = content.removesuffix(b"\n}")
        content = above + SEAL + hashlib.sha256(above).hexdigest().encode() + b'"\n}'
    return content + b"\n"


def remove_leftovers(directory: Path, folders: Iterable[str] | None = None) -> None:
    """Removes the temporary files of killed writers in `directory` and below its `folders`. None: below all folders.

    If a writer is still running, its rename fails.
    """
    pattern = f".*{TEMPORARY_SUFFIX}"
    below = [directory] if folders is None else [directory / folder for folder in folders]
    found = {*directory.glob(pattern), *(path for folder in below for path in folder.rglob(pattern))}
    for leftover in (path for path in found if _TEMPORARY.fullmatch(path.name)):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sha256(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    """The sha256 of a file's content, in hexadecimal. Calls `progress` after each block read."""
    digest, buffer = hashlib.sha256(), bytearray(_BYTES_AT_A_TIME)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            progress()
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """The sha256 of `value` as canonical JSON; dataclasses and config sections count as objects of their fields."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_fields)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _fields(value: Any) -> Any:
    import pydantic_core  # 24 ms and 5 MB in each supervisor of ranks

    return pydantic_core.to_jsonable_python(value)


def flush(path: Path) -> None:
    """Waits until a file's content, or a directory's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(file: IO[Any] | int, unprotected: str | None, *, shared: bool = False, wait: bool = False) -> bool:
    """Locks `file` against other processes with flock. The kernel releases the lock when the file is closed or the
    process ends.

    Raises BlockingIOError if another process holds the lock, unless `wait` is true. With `shared`, other processes may
    hold a shared lock too. Returns False on a file system without locks. `unprotected` says what is at risk there; it
    is printed once, as a warning. None: nothing is printed.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if unprotected and unprotected not in _warned:
            _warned.add(unprotected)
            print(f"warning: no file locks here ({error.strerror}): {unprotected}", file=sys.stderr)
        return False
    return True
