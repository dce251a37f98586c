"""Opens any file for reading and decompresses it by its content. Damage is an error, never a short read."""

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

from data_pipeline.foundation import stores
from data_pipeline.foundation.errors import OF_DISKS, DamagedInput
from data_pipeline.foundation.paths import opening
from data_pipeline.foundation.progress import advance

_CHUNK = 1 << 18
_BUFFER = 1 << 20
_BUFFERED = 64 << 20  # bytes of a member's content that wait in memory for its checksum; a larger member is read twice
_ZLIB_ERROR: type[Exception] = cast(Any, zlib_ng.error)  # its stub calls the class an instance


class CorruptMember(DamagedInput):
    """A gzip member or zstandard frame that fails its checksum, or can't be decompressed. None of it was read."""


class _CutOff(DamagedInput):
    """The file ends inside a member. No checksum is left to compare, and what precedes the cut is as it was."""


@contextlib.contextmanager
def open_stream(path: str) -> Iterator[BinaryIO]:
    """A buffered stream of the bytes in `path` (any fsspec path), with gzip, bzip2 and zstandard decompressed.

    The compression is recognised by the first bytes, not by the name. Several gzip members, bzip2 streams or zstandard
    frames in one file are read one after the other. Raises `UserError` if the file can't be opened and `DamagedInput`
    if it is empty; `read` raises `DamagedInput` where bytes are cut off or corrupt. Two kinds of damage can't be seen
    here: a cut exactly between two members, which the format inside has to notice, and a changed byte in a zstandard
    frame without its optional checksum.

    The content of a gzip member or zstandard frame is read only once its checksum is known to hold; bzip2 has a
    checksum for each block. A member of more than 64 MiB is decompressed twice for it, first only to verify it.

        with open_stream("pages.xml.bz2") as stream: stream.read(10)  ->  b"<mediawiki"
    """
    with open_file(path) as file, decompressed(file, path) as stream:
        yield stream


@contextlib.contextmanager
def decompressed(file: Any, path: str, verified: bool = True) -> Iterator[BinaryIO]:
    """As `open_stream`, of a `file` that stands at its start. With `verified=False`, the content is read at once, and
    may be wrong: that is enough to recognise a format."""
    with contextlib.ExitStack() as scratch:
        head = _peek(file)
        if not head:
            raise DamagedInput(path, "byte 0", "empty file")
        codec = next((codec for codec in _CODECS if head.startswith(codec.magics)), None)
        if codec is None:
            content: Iterator[bytes] = chain([head], iter(lambda: read_chunk(file), b""))
        else:
            content = _contents(Members(file, path, codec, scratch, head), verified)
        with io.BufferedReader(Chunks(content), _BUFFER) as stream:
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
        yield file


@contextlib.contextmanager
def open_for_random_access(path: str, copied: bool = True) -> Iterator[Any]:
    """Like `open_file`, for a format that isn't read from start to end.

    A remote file is first copied to a temporary file of this machine: it would be requested more than once, in part.
    Without `copied` it isn't, which is quicker if little of it will be read.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_file(path))
        if copied and not stores.is_local(stores.filesystem(path)[0]):
            file = _copy_of(file, stack)
            file.seek(0)
        yield file


def _copy_of(file: Any, scratch: contextlib.ExitStack) -> Any:
    """A temporary file of this machine, until the end of `scratch`, with what is left of `file`."""
    try:
        copy = scratch.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed with `scratch`)
        shutil.copyfileobj(file, copy, _BUFFER)
    except OSError as error:
        if error.errno in OF_DISKS:  # not the disk of the corpus
            raise OSError(error.errno, error.strerror, tempfile.gettempdir()) from None
        raise
    return copy


def read_chunk(file: Any) -> bytes:
    """Reads some stored bytes and counts them as progress."""
    data = file.read(_CHUNK)
    advance(len(data))
    return data


def _peek(file: Any) -> bytes:
    """The first bytes, enough to recognise the compression. A short read isn't the end of the file, so it repeats."""
    head = b""
    while len(head) < 4 and (more := read_chunk(file)):
        head += more
    return head


@dataclass(frozen=True)
class Codec:
    """`magics`: what a member (or stream, or frame) can begin with. `slice`: bytes to decompress at a time, since not
    every library can limit its output. `checked_at_end`: one checksum, at its end, covers all of a member.
    `length_at_end`: its last four bytes are the length of its content. `trailing`: padding that may follow the members.
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


def has_no_checksum(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zstandard frame without its checksum (RFC 8878, 3.1.1.1.1)."""
    while head.startswith(tuple(_SKIPPABLE)):
        head = head[8 + int.from_bytes(head[4:8], "little") :]
    return head.startswith(_FRAME) and len(head) > len(_FRAME) and not head[len(_FRAME)] & 0b100


class Chunks(io.RawIOBase):
    """A file whose content comes in chunks, none of them empty. A read gives four bytes or more, or the last ones, so
    that a `peek` behind a buffer shows how the content begins."""

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


def _contents(members: "Members", verified: bool) -> Iterator[bytes]:
    while members.has_next():
        yield from members.content(verified)


class Members:
    """The members of a compressed file, one after the other: while `has_next`, read the next with `content`.

    `file` stands at byte `start` plus the length of `head`, the bytes before. `scratch` closes what this opens.
    """

    def __init__(
        self, file: Any, path: str, codec: Codec, scratch: contextlib.ExitStack, head: bytes = b"", start: int = 0
    ):
        self._file, self._path, self._codec, self._scratch = file, path, codec, scratch
        self._size = _size(file, start + len(head))
        self._is_local = stores.is_local(stores.filesystem(path)[0])
        self._origin = 0  # the position in the stored file of the first byte of `_file`
        self._read, self._used = head, 0  # bytes read, and how many of them are decompressed
        self._counted = start + len(head)  # as progress
        self.position = start  # of the next byte to decompress

    def has_next(self) -> bool:
        """Whether a member follows. Raises `DamagedInput` for anything else that isn't padding."""
        if self._read.startswith(self._codec.magics, self._used):  # as most do, without a copy of what was read
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
                advance(position - self._counted)
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
        """The content of a member, decompressed a slice at a time, with the position after each slice."""
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
        """Copies the rest of a remote file, from `start` on, to this machine: it is requested once, but read twice."""
        read = self._file.tell() - start
        self._file.seek(start)
        self._file, self._origin, self._is_local = _copy_of(self._file, self._scratch), start, True
        self._file.seek(read)

    def _where(self, known: int | None = None) -> str:
        """The damaged byte of the stored file or, if `known` is given, the bytes from there to where it was noticed."""
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
    """The size of the stored file, if the file system knows it; only used in messages about damage."""
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(position)
    except (OSError, ValueError, NotImplementedError):
        return getattr(file, "size", None)
    return size


def _nearly(length: int, stored: int) -> bool:
    """Whether a content of this length may belong to a gzip member with the length `stored`, modulo 2³², at its end.

    A changed bit can hide the end marker of a member. What follows is then taken for content up to the end of the file,
    so that the file seems cut off. Those are the marker, the checksum and the length: some bytes, and 258 characters
    for every two bits at most.
    """
    return min((length - stored) % (1 << 32), (stored - length) % (1 << 32)) < 1 << 16
