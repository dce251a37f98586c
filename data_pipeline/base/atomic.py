"""Atomic writes: a file or directory appears whole or not at all (temporary name, flush, fsync, rename); and locks.

A file has the permissions of any new file, whatever the library that writes its content asks for (safetensors: 0600).

A file is on the disk when its writer returns. Without `flush_folder`, the caller flushes the file's folder, once for
all files in it. That is for files that can be written again.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from data_pipeline.base.errors import OF_DISKS, FailedError, UserError

SEAL = b',\n "sha256": "'  # at the end of a sealed JSON file
TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(rf"\..+\.[0-9a-f]{{32}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)
_BYTES_AT_A_TIME = 1 << 20
_warned: set[str] = set()  # the warnings that this process has printed


@contextlib.contextmanager
def atomic_path(path: Path, flush_folder: bool = True, mode: int | None = None) -> Iterator[Path]:
    """An empty temporary file beside `path`, renamed to `path` when the block succeeds and removed when it raises.

    `mode`: the file's permissions; None: as for any new file. Without `flush_folder`, the content is on the disk before
    the file is renamed, but a power cut may lose the new name until the caller has flushed the file's folder.
    """
    temporary = temporary_path(path)
    with naming(path, temporary):
        if not temporary.parent.exists():  # spares a mkdir for each file
            temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            # nobody else may open the file before it has its permissions
            temporary.touch(0o666 if mode is None else mode & 0o700)
            wanted = stat.S_IMODE(temporary.stat().st_mode) if mode is None else mode
            yield temporary
            _give_mode(temporary, wanted)
            flush(temporary)
            temporary.replace(path)
            if flush_folder:
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

    Raises UserError if `path` exists and isn't an empty directory, or if no directory can be made there; FailedError if
    the disk is full or the folder above can't be written.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path}: exists already; choose another directory")
        temporary = temporary_path(path.absolute())  # the current folder, ".", has no name
        temporary.mkdir(parents=True)
    except OSError as error:
        kind = FailedError if isinstance(error, PermissionError) or error.errno in OF_DISKS else UserError
        raise kind(f"{path}: no directory can be made here: {(error.strerror or str(error)).lower()}") from None
    with naming(path, temporary):
        try:
            yield temporary
            mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666
            for file in temporary.rglob("*"):
                if file.is_file():
                    _give_mode(file, mode)
                flush(file)
            commit(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Within the block, an error of a full disk names `path`, and an error that names a file in `temporary` names the
    file in `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in OF_DISKS:
            error.filename = str(path)
        elif temporary and isinstance(error.filename, str) and Path(error.filename).is_relative_to(temporary):
            error.filename = str(path / Path(error.filename).relative_to(temporary))
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
    with atomic_path(path, mode=mode) as temporary:
        temporary.write_bytes(content)


def _give_mode(file: Path, mode: int) -> None:
    """Sets a file's permissions, unless it has them."""
    if stat.S_IMODE(file.stat().st_mode) != mode:
        file.chmod(mode)


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Writes files: all of them or, if the disk refuses one, none."""
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            stack.enter_context(atomic_path(path)).write_bytes(content)


def write_json(path: Path, value: Any, sealed: bool = False, mode: int | None = None) -> None:
    """Writes `value` as JSON; dataclasses and config sections become objects of their fields.

    `sealed`: adds a last key `sha256`, the checksum of all bytes before it, which `json_file.seal_holds` checks. `mode`
    as for `write_bytes`.
    """
    write_bytes(path, json_bytes(value, sealed), mode)


def strict_json(value: Any) -> Any:
    """`value`, of dicts, lists and scalars, with each NaN and infinity, which JSON lacks, as the string "NaN",
    "Infinity" or "-Infinity". `float()` reads them back."""
    if isinstance(value, dict):
        return {key: strict_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def json_bytes(value: Any, sealed: bool) -> bytes:
    """The content that `write_json` writes."""
    content = bytearray()  # json.dumps would hold each key and each space as a string of its own
    for piece in json.JSONEncoder(indent=1, ensure_ascii=False, default=_fields).iterencode(value):
        content += piece.encode()
    if sealed:
        if content.endswith(b"\n}"):
            del content[-2:]
        content += SEAL + hashlib.sha256(content).hexdigest().encode() + b'"\n}'
    content += b"\n"
    return bytes(content)


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
