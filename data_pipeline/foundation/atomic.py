"""Files that are whole or not there: a temporary name unique to the attempt, flush, fsync, rename."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"
_BYTES_AT_A_TIME = 1 << 20


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; renamed to it when the block ends well, removed when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that appears under `path` when the block ends well."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield file


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def remove_leftovers(directory: Path) -> None:
    """Removes what killed attempts left under `directory`. A writer still alive fails at its rename, harmlessly."""
    for leftover in list(directory.rglob(f".*{TEMPORARY_SUFFIX}")):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sha256(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    """Of a file's content, in hexadecimal. `progress` is called as it is read."""
    digest, buffer = hashlib.sha256(), bytearray(_BYTES_AT_A_TIME)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            progress()
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """sha256 of `value` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def flush(path: Path) -> None:
    """Waits until the file, or what a directory lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
