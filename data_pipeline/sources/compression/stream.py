"""Opens any file for reading and decompresses it by its content. Damage is an error, never a short read."""

import bz2
import contextlib
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import zstandard

from data_pipeline.foundation import checksums, stores
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.foundation.paths import opening
from data_pipeline.foundation.progress import advance

_CHUNK = 1 << 18
_BUFFER = 1 << 20


@contextlib.contextmanager
def open_stream(path: str) -> Iterator[BinaryIO]:
    """A buffered stream of the bytes in `path` (any fsspec path), with gzip, bzip2 and zstandard decompressed.

    The compression is recognised by the first bytes, not by the name. Several gzip members, bzip2 streams or zstandard
    frames in one file are read one after the other. Raises `UserError` if the file can't be opened and `DamagedInput`
    if it is empty; `read` raises `DamagedInput` where bytes are cut off or corrupt. Two kinds of damage can't be seen
    here: a cut exactly between two members, which the format inside has to notice, and a changed byte in a zstandard
    frame without its optional checksum.

        with open_stream("pages.xml.bz2") as stream: stream.read(10)  ->  b"<mediawiki"
    """
    with open_file(path) as file:
        size = _size(file)
        head = _peek(file)
        if not head:
            raise DamagedInput(path, "byte 0", "empty file")
        codec = next((codec for codec in _CODECS if head.startswith(codec.magics)), None)
        if codec is None:
            raw: io.RawIOBase = _Plain(file, head)
        else:
            raw = _Decompressed(file, head, path, size, codec)
        with io.BufferedReader(raw, _BUFFER) as stream:
            yield cast(BinaryIO, stream)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[Any]:
    """The file at `path` (any fsspec path) as it is stored, for random access; `UserError` if it can't be opened.

    Only errors of opening are converted; errors of reading the file pass through. A remote store that doesn't answer is
    waited for, and then raises StoreUnavailable.
    """
    with contextlib.ExitStack() as stack:
        with opening(path):
            file = stack.enter_context(stores.open_file(path))
        yield checksums.watched(file, path)


@contextlib.contextmanager
def open_to_jump_about(path: str) -> Iterator[Any]:
    """Like `open_file`, for a format that isn't read from start to end.

    A remote file is first copied to a temporary file of this machine: it would be requested more than once, in part.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_file(path))
        if not stores.is_local(stores.filesystem(path)[0]):
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(file, copy, _BUFFER)
            copy.seek(0)
            file = copy
        yield file


def read_chunk(file: Any, size: int = _CHUNK) -> bytes:
    """Reads up to `size` stored bytes and counts them as progress."""
    data = file.read(size)
    advance(len(data))
    return data


def _size(file: Any) -> int | None:
    """The size of the stored file, if the file system knows it; only used in messages about damage."""
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
    except (OSError, ValueError, NotImplementedError):
        return getattr(file, "size", None)
    return size


def _peek(file: Any) -> bytes:
    """The first bytes, enough to recognise the compression. A short read isn't the end of the file, so it repeats."""
    head = b""
    while len(head) < 4 and (more := read_chunk(file)):
        head += more
    return head


class _Gzip:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def decompress(self, data: bytes, limit: int) -> bytes:
        return self._inflate.decompress(self._inflate.unconsumed_tail + data, limit)

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data


class _Zstandard:
    """Frames, and the skippable frames that parallel writers put between them.

    The library can't limit its output, so its input is limited: a block of 128 KiB takes at least four bytes, so a
    slice of 4 KiB yields at most 128 MiB.
    """

    _slice = 1 << 12

    def __init__(self) -> None:
        # `zstd --long=31` needs 2 GiB; the memory is only allocated if a frame asks for it.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._waiting, self._content = b"", b""

    def decompress(self, data: bytes, limit: int) -> bytes:
        self._waiting += data
        while not self._content and self._waiting and not self._decompressor.eof:
            data, self._waiting = self._waiting[: self._slice], self._waiting[self._slice :]
            self._content = self._decompressor.decompress(data)
        content, self._content = self._content[:limit], self._content[limit:]
        return content

    @property
    def needs_input(self) -> bool:
        return not self._waiting and not self._content

    @property
    def eof(self) -> bool:
        return self._decompressor.eof and not self._content

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data + self._waiting


_Member = _Gzip | bz2.BZ2Decompressor | _Zstandard


@dataclass(frozen=True)
class _Codec:
    """`magics`: what a member can begin with. `trailing`: padding that may follow the members."""

    name: str
    magics: tuple[bytes, ...]
    member: Callable[[], _Member]
    trailing: bytes = b""


_SKIPPABLE = [bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60)]
_CODECS = (
    _Codec("gzip", (b"\x1f\x8b\x08",), _Gzip, trailing=b"\0"),
    _Codec("bz2", (b"BZh",), bz2.BZ2Decompressor),
    _Codec("zstandard", (b"\x28\xb5\x2f\xfd", *_SKIPPABLE), _Zstandard),
)


class _Plain(io.RawIOBase):
    """An uncompressed file, with the bytes already read put back in front."""

    def __init__(self, file: Any, head: bytes):
        self._file, self._head = file, head

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or read_chunk(self._file, len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


class _Decompressed(io.RawIOBase):
    """The concatenated contents of the members of a compressed file, in bounded memory."""

    def __init__(self, file: Any, head: bytes, path: str, size: int | None, codec: _Codec):
        self._file, self._pending, self._path, self._size, self._codec = file, head, path, size, codec
        self._taken = 0  # stored bytes given to a decompressor
        self._member: _Member | None = codec.member()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._decompress(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _decompress(self, limit: int) -> bytes:
        """Some bytes of content; b"" only at the true end."""
        while self._member or self._next_member():
            assert self._member
            data = b""
            if self._member.needs_input:
                data = self._pending or read_chunk(self._file)
                self._pending = b""
                if not data:
                    raise self._damage(f"{self._codec.name} stream ends before its end marker")
            try:
                content = self._member.decompress(data, limit)
            except (zlib.error, OSError, EOFError, zstandard.ZstdError, MemoryError) as error:
                raise self._damage(f"corrupt {self._codec.name} data ({error})") from None
            self._taken += len(data)
            if self._member.eof:
                self._pending = self._member.unused_data
                self._taken -= len(self._pending)
                self._member = None
            if content:
                return content
        return b""

    def _next_member(self) -> bool:
        """Starts the member that follows the one just finished, if there is one."""
        while True:
            if self._codec.trailing:
                rest = self._pending.lstrip(self._codec.trailing)
                self._taken += len(self._pending) - len(rest)
                self._pending = rest
            begins = self._pending[: len(self._codec.magics[0])]
            if not any(magic.startswith(begins) for magic in self._codec.magics):
                raise self._damage(f"bytes after the end of the {self._codec.name} stream that don't belong to it")
            if begins in self._codec.magics:
                self._member = self._codec.member()
                return True
            more = read_chunk(self._file)
            if not more:
                if self._pending:
                    self._taken += len(self._pending)
                    raise self._damage(f"{self._codec.name} stream ends before its end marker")
                return False
            self._pending += more

    def _damage(self, reason: str) -> DamagedInput:
        return DamagedInput(self._path, f"byte {self._taken}" + (f" of {self._size}" if self._size else ""), reason)
