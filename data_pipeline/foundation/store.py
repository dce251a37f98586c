"""Where a corpus is: a folder that all nodes see (`local_store`), or a prefix in a bucket (`object_store`).

A file appears whole, under its name, or not at all. Names are relative to the corpus, with slashes. One process at a
time, the driver of a build, has claimed a corpus; workers write to it only while their driver has it.
"""

import abc
import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from data_pipeline.foundation.atomic import json_bytes
from data_pipeline.foundation.json_file import read_content, read_valid

T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Store(abc.ABC):
    """The files of a corpus. Its text is the path or URL of the corpus. In a worker it has no claim.

    A file that isn't there raises FileNotFoundError; a bucket that refuses or doesn't answer raises StoreError.
    """

    seconds_between_appends = 0.0
    """How long lines should wait for others before they are appended: in a bucket, each time makes an object."""

    @property
    @abc.abstractmethod
    def disk(self) -> Path:
        """The folder of this machine to which files are written first."""

    def at(self, name: str) -> str:
        """The path or URL of a file, for messages."""
        return f"{self}/{name}"

    @abc.abstractmethod
    def get(self, name: str) -> bytes:
        """The content of a file."""

    @abc.abstractmethod
    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of a file in each of some ranges (start, stop); fewer at its end."""

    @abc.abstractmethod
    def readable(self, name: str) -> str | BinaryIO:
        """What Arrow reads of a file: its path, or the file open at any position."""

    @abc.abstractmethod
    def local(self, names: Iterable[str]) -> contextlib.AbstractContextManager[Path]:
        """Within the block, a folder on this machine with copies of the small files `names`, but for missing ones."""

    @abc.abstractmethod
    def put(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A path on this machine. What is written there appears as the file `name` when the block succeeds."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file."""
        with self.put(name) as path:
            path.write_bytes(content)

    def send(self, path: Path, name: str) -> None:
        """Copies `path`, a file of this machine, to the file `name`."""
        with self.put(name) as copy:
            shutil.copyfile(path, copy)

    def is_copy(self, name: str, path: Path, checksum: tuple[int, str]) -> bool:
        """Whether the file `name` is there with the content of `path`, whose bytes and sha256 are `checksum`."""
        return self.sizes([name]).get(name) == checksum[0] and self.checksum(name) == checksum

    @abc.abstractmethod
    def checksum(self, name: str) -> tuple[int, str]:
        """Bytes and sha256 of a file."""

    def written(self, name: str) -> tuple[int, str]:
        """Bytes and sha256 of a file that this process has just put."""
        return self.checksum(name)

    @abc.abstractmethod
    def names(self, folder: str = "", deep: bool = True) -> list[str]:
        """The names of the files in a folder and, if `deep`, below it; none if there is no such folder."""

    @abc.abstractmethod
    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder, within it."""

    @abc.abstractmethod
    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """The bytes of those of the files that are there."""

    @abc.abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Removes files. Those that aren't there count as removed."""

    @abc.abstractmethod
    def delete_folder(self, folder: str) -> None:
        """Removes a folder with all that is in it."""

    @abc.abstractmethod
    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file that was made by `append` or `replace_lines`, b"" for one that was cut; none if there is
        no such file."""

    @abc.abstractmethod
    def append(self, name: str, lines: bytes, files: Collection[str]) -> None:
        """Adds lines to a file. They, and the `files` that were put before, last when this returns."""

    @abc.abstractmethod
    def replace_lines(self, name: str, lines: bytes) -> None:
        """Replaces all lines that were appended to a file."""

    @abc.abstractmethod
    def claim(self) -> None:
        """Claims the corpus for this object until `release`, before anything is changed.

        Raises FailedError if another build has it, UserError if nothing can be written there.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Ends the claim, if there is one."""

    @abc.abstractmethod
    def begin(self) -> str:
        """Claims the corpus, and returns the token of this build. Workers of earlier builds can't write any more."""

    @abc.abstractmethod
    def at_work(self, token: str) -> contextlib.AbstractContextManager[None]:
        """Lets a worker write inside the block. Files below `.stages` may last only once their names were given to
        `append`. Raises NodeUnfit if this isn't the corpus of the build with the token, or another build has it."""

    @abc.abstractmethod
    def remove_leftovers(self, folders: Iterable[str]) -> None:
        """Removes what killed writers have left unfinished in `folders` of the corpus, and below `.stages`."""

    def each(self, function: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
        """`function`, which reads something of the corpus, of each of `items`; several at once where requests take
        long."""
        return [function(item) for item in items]

    def exists(self, name: str) -> bool:
        return name in self.sizes([name])

    def write_json(self, name: str, value: Any, sealed: bool = False) -> None:
        """Like `atomic.write_json`."""
        self.write(name, json_bytes(value, sealed))

    def read_json(self, name: str, kind: type[T]) -> T:
        """Like `json_file.read_json`."""
        return read_content(lambda: self.get(name), kind, self.at(name))

    def read_valid_json(self, name: str, kind: type[T]) -> T | None:
        """Like `json_file.read_valid_json`."""
        return read_valid(lambda: self.read_json(name, kind))
