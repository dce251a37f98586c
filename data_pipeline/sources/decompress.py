"""Decompresses gzip, bzip2 and zstandard. Damage is an error, never a short read."""

import bz2
import contextlib
import io
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, cast

import zstandard
from zlib_ng import zlib_ng

from data_pipeline.base import stores
from data_pipeline.base.errors import OF_DISKS, DamagedInput

_CHUNK = 1 << 18
_BUFFER = 1 << 20
_BUFFERED = 64 << 20  # bytes of a member's content kept in memory until its checksum is verified
_ZLIB_ERROR: type[Exception] = cast(Any, zlib_ng.error)  # its stub calls the class an instance


class CorruptMember(DamagedInput):
    """A gzip member or zstandard frame fails its checksum or can't be decompressed. Nothing of it was returned."""


class _CutOff(DamagedInput):
    """The file ends inside a member, before its checksum. The content before the cut is taken as right."""


@contextlib.contextmanager
def open_stream(
    path: str,
    checksum: stores.Checksum | None = None,
    verified: bool = True,
    read_ahead: int = stores.READ_AHEAD,
) -> Iterator[BinaryIO]:
    """A buffered stream of the bytes in `path` (any fsspec path), with gzip, bzip2 and zstandard decompressed.

    The compression is recognised by the first bytes, not by the name. Several gzip members, bzip2 streams or zstandard
    frames in one file are read one after the other.

    The content of a gzip member or zstandard frame is returned after its checksum has been verified; bzip2 verifies
    each block. A member of more than 64 MiB is decompressed twice: first to verify it, then to return its content.

    `checksum`, such as `Input.checksum`, sees which stored bytes are read, and how far reading is. `verified=False`:
    checksums of members aren't waited for, which is enough to recognise a format. `read_ahead`: as `open_file` has it.

    Raises `UserError` if the file can't be opened and `DamagedInput` if it is empty. `read` raises `DamagedInput` where
    bytes are cut off or corrupt. Two kinds of damage can't be seen here: a cut exactly between two members, and a
    changed byte in a zstandard frame without its optional checksum.

        with open_stream("pages.xml.bz2") as stream: stream.read(10)  ->  b"<mediawiki"
    """
    advance = advancing(checksum)
    with stores.open_file(path, checksum, read_ahead) as file, contextlib.ExitStack() as scratch:
        head = _peek(file, advance)
        if not head:
            raise DamagedInput(path, "byte 0", "empty file")
        codec = next((codec for codec in _CODECS if head.startswith(codec.magics)), None)
        if codec is None:
            content: Iterator[bytes] = chain([head], iter(lambda: _read_chunk(file, advance), b""))
        else:
            members = Members(file, path, codec, scratch, head, advance=advance)
            content = chain.from_iterable(members.content(verified) for _ in iter(members.has_next, False))
        with io.BufferedReader(Chunks(content), _BUFFER) as stream:
            yield cast(BinaryIO, stream)


def copy_of(file: Any, scratch: contextlib.ExitStack) -> Any:
    """A temporary copy of the rest of `file`, which `scratch` removes."""
    try:
        copy = scratch.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed with `scratch`)
        shutil.copyfileobj(file, copy, _BUFFER)
    except OSError as error:
        if error.errno in OF_DISKS:  # not the disk of the corpus
            raise OSError(error.errno, error.strerror, tempfile.gettempdir()) from None
        raise
    return copy


Advance = Callable[[int], None]
"""Counts so many stored bytes as read."""


def advancing(checksum: stores.Checksum | None) -> Advance:
    """The function that counts the progress of reading a file."""
    return checksum.progress.advance if checksum else lambda size: None


def _read_chunk(file: Any, advance: Advance) -> bytes:
    data = file.read(_CHUNK)
    advance(len(data))
    return data


def _peek(file: Any, advance: Advance) -> bytes:
    """The first bytes, enough to recognise the compression. One read may return fewer before the end of the file."""
    head = b""
    while len(head) < 4 and (more := _read_chunk(file, advance)):
        head += more
    return head


@dataclass(frozen=True)
class Codec:
    """A compression.

    Attributes:
        magics: the bytes that a member (or stream, or frame) can begin with.
        slice: bytes to decompress at a time, since not every library can limit its output.
        checked_at_end: True if one checksum at the end of a member covers all of it.
        length_at_end: True if the last four bytes of a member are the length of its content.
        trailing: padding that may follow the members.
    """

    name: str
    magics: tuple[bytes, ...]
    decompressor: Callable[[], Any]
    slice: int
    checked_at_end: bool = True
    length_at_end: bool = False
    trailing: bytes = b""


def _gzip() -> Any:
    return zlib_ng.decompressobj(wbits=16 + zlib_ng.MAX_WBITS)


def _zstandard() -> Any:
    # `zstd --long=31` needs a window of 2 GiB; the memory is only allocated if a frame asks for it.
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_FRAME = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = [bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60)]
# bzip2 returns the content of a block after it has compared the block's checksum. A block of at most 46 MB takes at
# least 37 bytes, so a slice yields at most 630 MB.
BZIP2 = Codec("bz2", (b"BZh",), bz2.BZ2Decompressor, 512, checked_at_end=False)
_CODECS = (
    Codec("gzip", (b"\x1f\x8b\x08",), _gzip, 1 << 14, length_at_end=True, trailing=b"\0"),  # at most 16 MiB of content
    BZIP2,
    # A block of 128 KiB takes at least four bytes, so a slice yields at most 128 MiB.
    Codec("zstandard", (_FRAME, *_SKIPPABLE), _zstandard, 1 << 12),
)


class Chunks(io.RawIOBase):
    """A file made of chunks, none of them empty. A read returns at least four bytes before the end, so that `peek` of a
    buffer around it shows how the content begins."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._chunk = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while len(self._chunk) < 4 and (more := next(self._chunks, b"")):
            self._chunk = memoryview(bytes(self._chunk) + more if self._chunk else more)
        data, self._chunk = self._chunk[: len(buffer)], self._chunk[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


class Members:
    """The members of a compressed file, one after the other: while `has_next`, read the next with `content`.

    `head` are the bytes from `start` on that have been read from `file` already. `scratch` closes temporary files.
    `advance` counts the stored bytes.
    """

    def __init__(
        self,
        file: Any,
        path: str,
        codec: Codec,
        scratch: contextlib.ExitStack,
        head: bytes,
        start: int = 0,
        advance: Advance = lambda size: None,
    ):
        self._advance = advance
        self._file, self._path, self._codec, self._scratch = file, path, codec, scratch
        self._size = _size(file, start + len(head))
        self._is_local = stores.is_local(stores.filesystem(path)[0])
        self._origin = 0  # the position in the stored file of the first byte of `_file`
        self._read, self._used = head, 0  # bytes read, and how many of them are decompressed
        self._counted = start + len(head)  # as progress
        self.position = start  # of the next byte to decompress

    def has_next(self) -> bool:
        """Whether a member follows. Raises `DamagedInput` for bytes that are neither a member nor padding."""
        if self._read.startswith(self._codec.magics, self._used):  # the usual case, without a copy of the bytes
            return True
        while True:
            rest = self._read[self._used :].lstrip(self._codec.trailing)
            self.position += len(self._read) - self._used - len(rest)
            begins = rest[: len(self._codec.magics[0])]
            if not any(magic.startswith(begins) for magic in self._codec.magics):
                reason = f"bytes after the end of the {self._codec.name} stream that don't belong to it"
                raise DamagedInput(self._path, self._where(), reason)
            more = b"" if begins in self._codec.magics else self._file.read(_CHUNK)
            self._read, self._used = rest + more, 0
            if begins in self._codec.magics:
                return True
            if not more:
                if rest:
                    self.position += len(rest)
                    raise self._cut_off()
                return False

    def content(self, verified: bool = True) -> Iterator[bytes]:
        """The content of the next member, in chunks; see `open_stream`."""
        chunks = self._verified() if self._codec.checked_at_end and verified else self._decompressed()
        for position, chunk in chunks:
            if position > self._counted:
                self._advance(position - self._counted)
                self._counted = position
            yield chunk

    def _verified(self) -> Iterator[tuple[int, bytes]]:
        start, buffered, length = self.position, list[tuple[int, bytes]](), 0
        chunks = self._decompressed()
        try:
            for position, chunk in chunks:
                buffered.append((position, chunk))
                length += len(chunk)
                if length > _BUFFERED:
                    break
        except _CutOff:
            yield from buffered
            raise
        if length <= _BUFFERED:
            yield from buffered
            return
        buffered.clear()
        if not self._is_local:
            self._copy(start)
        with contextlib.suppress(_CutOff):  # raised again at the end of the second reading
            deque(chunks, maxlen=0)
        self._file.seek(start - self._origin)
        self.position, self._read, self._used = start, b"", 0
        yield from self._decompressed()

    def _decompressed(self) -> Iterator[tuple[int, bytes]]:
        """(position in the file, content up to there) of a member, a slice at a time."""
        known, length, end = self.position, 0, b""
        decompressor = self._codec.decompressor()
        while not decompressor.eof:
            start, data = self.position, self._take(self._codec.slice)
            end = (end + data)[-4:]
            if not data and self._codec.length_at_end and _nearly(length, int.from_bytes(end, "little")):
                raise self._corrupt(known, self._cut_off().reason)
            if not data:
                raise self._cut_off()
            try:
                content = decompressor.decompress(data)
            except (_ZLIB_ERROR, OSError, EOFError, zstandard.ZstdError, MemoryError) as error:
                raise self._corrupt(known, f"corrupt {self._codec.name} data ({error})") from None
            if content:
                length += len(content)
                known = known if self._codec.checked_at_end else start
                yield self.position, content
        self._used -= len(decompressor.unused_data)
        self.position -= len(decompressor.unused_data)

    def _take(self, size: int) -> bytes:
        """Bytes to decompress; b"" at the end of the file."""
        if self._used == len(self._read):
            self._read, self._used = self._file.read(_CHUNK), 0
        data = self._read[self._used : self._used + size]
        self._used += len(data)
        self.position += len(data)
        return data

    def _copy(self, start: int) -> None:
        """Copies a remote file from `start` on to this machine, so that it can be read twice but is requested once."""
        read = self._file.tell() - start
        self._file.seek(start)
        self._file, self._origin, self._is_local = copy_of(self._file, self._scratch), start, True
        self._file.seek(read)

    def _where(self, known: int | None = None) -> str:
        """The damaged byte of the stored file or, with `known`, the range from there to where damage was noticed."""
        size = f" of {self._size}" if self._size else ""
        return f"byte {self.position}{size}" if known is None else f"bytes {known} to {self.position}{size}"

    def _corrupt(self, known: int, reason: str) -> DamagedInput:
        if not self._codec.checked_at_end:
            return DamagedInput(self._path, self._where(known), reason)
        left_out = "which byte is wrong can't be known, so all records from there on are left out"
        return CorruptMember(self._path, self._where(known), f"{reason}; {left_out}")

    def _cut_off(self) -> _CutOff:
        return _CutOff(self._path, self._where(), f"{self._codec.name} stream ends before its end marker")


def _size(file: Any, position: int) -> int | None:
    """The size of the stored file, for messages; None if the file system doesn't know it."""
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(position)
    except (OSError, ValueError, NotImplementedError):
        return getattr(file, "size", None)
    return size


def _nearly(length: int, stored: int) -> bool:
    """Whether a gzip member that seems cut off is whole: its content's `length` is nearly the `stored` one, mod 2³².

    A changed bit can hide a member's end marker. The marker, the checksum and the length are then decompressed as
    content: a few bytes; two bits give 258 characters at most.
    """
    return min((length - stored) % (1 << 32), (stored - length) % (1 << 32)) < 1 << 16
