"""The interface to the files of a corpus, in a folder that all nodes see (`local_store`) or in a bucket
(`object_store`).

A file appears whole or not at all. Names of files are relative to the corpus, with slashes. One process at a time, the
driver of a build, has claimed a corpus. Workers write only while their driver has the claim.
"""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from data_pipeline.base.atomic import json_bytes
from data_pipeline.base.json_file import read_content, read_valid

T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")
ReadRanges = Callable[[Sequence[tuple[int, int]]], list[bytes]]
_AT_ONCE = 64  # items that a thread takes: handing over a single item takes longer than a request to a local disk


class Store(abc.ABC):
    """The files of a corpus; str() gives its path or URL. A copy in a worker has no claim. Stores of one
    place are equal.

    A missing file raises FileNotFoundError; a bucket that refuses or doesn't answer raises StoreError.
    """

    seconds_between_appends = 0.0
    """How long lines should be collected before they are appended; in a bucket, each append makes an object."""
    most_opens = 1_000_000
    """How often the units of a stage may open files of other units. With more, files are merged first."""
    least_read = 16_384
    """Bytes that take about as long to read as one byte."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    @abc.abstractmethod
    def disk(self) -> Path:
        """The local folder to which files are written first."""

    def at(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        return f"{self}/{name}"

    @abc.abstractmethod
    def get(self, name: str) -> bytes:
        """The content of a file."""

    @abc.abstractmethod
    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of a file in each of `ranges`, (start, stop); fewer at its end."""

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[ReadRanges]:
        """Within the block, a function like `ranges` of one file, which a folder opens once."""
        yield lambda ranges: self.ranges(name, ranges)

    @abc.abstractmethod
    def readable(self, name: str) -> str | BinaryIO:
        """A file for Arrow to read: its path, or an open file that can seek."""

    @abc.abstractmethod
    def local(self, names: Iterable[str]) -> contextlib.AbstractContextManager[Path]:
        """Within the block, a local folder with copies of the small files `names`; missing files are left out."""

    @abc.abstractmethod
    def put(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A local path. The file written there appears as `name` when the block succeeds."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file."""
        with self.put(name) as path:
            path.write_bytes(content)

    @abc.abstractmethod
    def checksum(self, name: str) -> tuple[int, str]:
        """Bytes and sha256 of a file."""

    def written(self, name: str) -> tuple[int, str]:
        """Bytes and sha256 of a file that this process has just written."""
        return self.checksum(name)

    @abc.abstractmethod
    def names(self, folder: str = "", deep: bool = True) -> list[str]:
        """The names of the files in a folder and, if `deep`, below it; none if the folder doesn't exist."""

    @abc.abstractmethod
    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder, relative to it."""

    @abc.abstractmethod
    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """The bytes of each of the files that exist."""

    @abc.abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Removes files, if they exist."""

    @abc.abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Removes a folder and its content."""

    @abc.abstractmethod
    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file that was written by `append` or `replace_lines`; b"" for an incomplete line; no lines
        if the file doesn't exist."""

    @abc.abstractmethod
    def append(self, name: str, lines: bytes, files: Collection[str]) -> None:
        """Adds lines to a file. The lines, and the `files` written before, survive a power cut once this returns."""

    @abc.abstractmethod
    def replace_lines(self, name: str, lines: bytes) -> None:
        """Replaces all lines of a file."""

    @abc.abstractmethod
    def claim(self) -> None:
        """Claims the corpus until `release`. Call this before any change.

        Raises FailedError if another build has the corpus, UserError if nothing can be written there.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Ends the claim, if any."""

    @abc.abstractmethod
    def begin(self) -> str:
        """Claims the corpus, and returns this build's token. Workers of earlier builds can no longer write."""

    @abc.abstractmethod
    def at_work(self, token: str) -> contextlib.AbstractContextManager[None]:
        """A worker may write only inside this block. A file below `.stages` is safe from a power cut after the driver
        has passed its name to `append`. Raises NodeUnfit if this isn't the corpus of the token's build, or another
        build has it."""

    @abc.abstractmethod
    def remove_leftovers(self, folders: Iterable[str]) -> None:
        """Removes unfinished files of killed writers in `folders` of the corpus and below `.stages`."""

    def each(self, function: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
        """The result of `function`, which reads from the corpus, for each of `items`; several at once in a bucket."""
        return [function(item) for item in items]

    def write_json(self, name: str, value: Any, sealed: bool = False) -> None:
        """Like `atomic.write_json`."""
        self.write(name, json_bytes(value, sealed))

    def read_json(self, name: str, kind: type[T]) -> T:
        """Like `json_file.read_json`."""
        return read_content(lambda: self.get(name), kind, self.at(name))

    def read_valid_json(self, name: str, kind: type[T]) -> T | None:
        """Like `json_file.read_valid_json`."""
        return read_valid(lambda: self.read_json(name, kind))


def in_threads(
    function: Callable[[Item], Answer], items: Collection[Item], at_once: int = _AT_ONCE, threads: int | None = None
) -> list[Answer]:
    """`function`'s result for each of `items`, in order. A thread takes `at_once` items. Raises the first error.

    `threads`: how many threads there are at most. None: a few more than cores.
    """
    given = [*items]
    chunks = [given[at : at + at_once] for at in range(0, len(given), at_once)]
    with ThreadPoolExecutor(threads) as pool:
        return [one for of_chunk in pool.map(lambda chunk: [*map(function, chunk)], chunks) for one in of_chunk]
