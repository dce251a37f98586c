"""The sha256 of a file, computed while a reader reads it, so that its bytes are read once."""

import contextlib
import hashlib
import io
from collections.abc import Iterator
from typing import Any

from data_pipeline.foundation import stores
from data_pipeline.foundation.stores import ReadableFile

_BYTES_AT_A_TIME = 1 << 20


class Checksum:
    """The sha256 of the file at `path`, as far as it has been read without a gap."""

    def __init__(self, path: str):
        self.path = path
        self._digest, self._size = hashlib.sha256(), 0
        self._at_end = False

    def update(self, position: int, data: bytes | memoryview) -> None:
        """Adds the bytes of the file from `position` on, b"" at its end. Bytes after a gap are ignored."""
        if not data and position == self._size:
            self._at_end = True
        elif position <= self._size < position + len(data):
            self._digest.update(data[self._size - position :])
            self._size = position + len(data)

    def finish(self) -> tuple[int, str]:
        """Bytes and sha256 of the whole file. Reads what hasn't been read yet; the sha256 is "" if that fails."""
        try:
            if not self._at_end:
                with stores.open_file(self.path) as file:
                    file.seek(self._size)
                    while chunk := file.read(_BYTES_AT_A_TIME):
                        self.update(self._size, chunk)
        except OSError:
            return self._size, ""  # listed as damaged by then
        return self._size, self._digest.hexdigest()


_current: Checksum | None = None  # of the file that this process reads


@contextlib.contextmanager
def while_reading(path: str) -> Iterator[Checksum]:
    """Within the block, files opened through `watched` at `path` update this checksum."""
    global _current
    _current = Checksum(path)
    try:
        yield _current
    finally:
        _current = None


def watched(file: Any, path: str) -> Any:
    """The open `file` at `path`; while its checksum is taken, reading it updates the checksum."""
    return _Watched(file, _current) if _current is not None and _current.path == path else file


class _Watched(ReadableFile):
    """A file whose reads update a checksum."""

    def __init__(self, file: Any, checksum: Checksum):
        self._file, self._checksum = file, checksum

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        position = self._file.tell()
        data = self._file.read(-1 if size is None else size)
        if data or size:
            self._checksum.update(position, data)
        return data
