"""Opens any file for reading and decompresses it by its content. Damage is an error, never a short read."""

import bz2
import contextlib
import io
import shutil
import tempfile
import zlib
from collections import deque
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
_FEW = 4  # bytes: no more than a checksum, so that what precedes it is given before it is compared
_HELD = 64 << 20  # bytes of a member's content that wait in memory for its checksum; a larger member is read twice


class CorruptMember(DamagedInput):
    """A gzip member or zstandard frame that fails its checksum, or can't be decompressed. None of it was read."""


class _CutOff(DamagedInput):
    """The file ends inside a member. No checksum is left to compare, and what precedes the cut is as it was."""


@contextlib.contextmanager
def open_stream(path: str, verified: bool = True) -> Iterator[BinaryIO]:
    """A buffered stream of the bytes in `path` (any fsspec path), with gzip, bzip2 and zstandard decompressed.

    The compression is recognised by the first bytes, not by the name. Several gzip members, bzip2 streams or zstandard
    frames in one file are read one after the other. Raises `UserError` if the file can't be opened and `DamagedInput`
    if it is empty; `read` raises `DamagedInput` where bytes are cut off or corrupt. Two kinds of damage can't be seen
    here: a cut exactly between two members, which the format inside has to notice, and a changed byte in a zstandard
    frame without its optional checksum.

    The content of a gzip member or zstandard frame is read only once its checksum is known to hold; bzip2 has a
    checksum for each block. A member of more than 64 MiB is decompressed twice for it, first only to verify it. With
    `verified=False`, the content is read at once, up to the last byte that can be decompressed, and may be wrong: that
    is enough to recognise a format or to count what is lost.

        with open_stream("pages.xml.bz2") as stream: stream.read(10)  ->  b"<mediawiki"
    """
    with open_file(path) as file, contextlib.ExitStack() as scratch:
        head = _peek(file)
        if not head:
            raise DamagedInput(path, "byte 0", "empty file")
        codec = next((codec for codec in _CODECS if head.startswith(codec.magics)), None)
        if codec is None:
            raw: io.RawIOBase = _Plain(file, head)
        else:
            raw = _Pieces(_contents(Members(file, path, codec, scratch, head), verified))
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


class _Sliced:
    """A decompressor that can't limit its output, so its input is given in slices of `size` bytes."""

    def __init__(self, decompressor: Any, size: int) -> None:
        self._decompressor, self._slice = decompressor, size
        self._waiting, self._at, self._content = b"", 0, b""  # the next slice begins at `_at`

    def decompress(self, data: bytes, limit: int) -> bytes:
        self._waiting, self._at = self._waiting[self._at :] + data, 0
        while not self._content and self._at < len(self._waiting) and not self._decompressor.eof:
            data = self._waiting[self._at : self._at + self._slice]
            self._at += len(data)
            self._content = self._decompressor.decompress(data)
        content, self._content = self._content[:limit], self._content[limit:]
        return content

    @property
    def needs_input(self) -> bool:
        return self._at == len(self._waiting) and not self._content

    @property
    def eof(self) -> bool:
        return self._decompressor.eof and not self._content

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data + self._waiting[self._at :]


def _bzip2() -> _Sliced:
    # Without a limit of its output, it returns the content of a block after it has compared the block's checksum. A
    # block of at most 46 MB takes at least 37 bytes, so a slice yields at most 630 MB.
    return _Sliced(bz2.BZ2Decompressor(), 512)


def _zstandard() -> _Sliced:
    # A block of 128 KiB takes at least four bytes, so a slice yields at most 128 MiB. `zstd --long=31` needs a window
    # of 2 GiB; the memory is only allocated if a frame asks for it.
    return _Sliced(zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(), 1 << 12)


@dataclass(frozen=True)
class Codec:
    """`magics`: what a member (or stream, or frame) can begin with. `checked_at_end`: one checksum, at its end, covers
    all of a member. `length_at_end`: its last four bytes are the length of its content. `trailing`: padding that may
    follow the members."""

    name: str
    magics: tuple[bytes, ...]
    member: Callable[[], _Gzip | _Sliced]
    checked_at_end: bool = True
    length_at_end: bool = False
    trailing: bytes = b""


_SKIPPABLE = [bytes([low]) + b"\x2a\x4d\x18" for low in range(0x50, 0x60)]
BZIP2 = Codec("bz2", (b"BZh",), _bzip2, checked_at_end=False)
_CODECS = (
    Codec("gzip", (b"\x1f\x8b\x08",), _Gzip, length_at_end=True, trailing=b"\0"),
    BZIP2,
    Codec("zstandard", (b"\x28\xb5\x2f\xfd", *_SKIPPABLE), _zstandard),
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


class _Pieces(io.RawIOBase):
    """A file whose content comes in pieces, none of them empty."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._piece = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._piece = self._piece or memoryview(next(self._pieces, b""))
        data, self._piece = self._piece[: len(buffer)], self._piece[len(buffer) :]
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
        self._pending = head  # read but not yet decompressed
        self._counted = start + len(head)  # as progress
        self._latest = start  # where the bytes begin that were decompressed last
        self.position = start  # of the next byte to decompress

    def has_next(self) -> bool:
        """Whether a member follows. Raises `DamagedInput` for anything else that isn't padding."""
        while True:
            if self._codec.trailing:
                rest = self._pending.lstrip(self._codec.trailing)
                self.position += len(self._pending) - len(rest)
                self._pending = rest
            begins = self._pending[: len(self._codec.magics[0])]
            if not any(magic.startswith(begins) for magic in self._codec.magics):
                reason = f"bytes after the end of the {self._codec.name} stream that don't belong to it"
                raise DamagedInput(self._path, self._place(), reason)
            if begins in self._codec.magics:
                return True
            more = self._file.read(_CHUNK)
            if not more:
                if self._pending:
                    self.position += len(self._pending)
                    raise self._cut_off()
                return False
            self._pending += more

    def content(self, verified: bool = True) -> Iterator[bytes]:
        """The content of the next member, in pieces; see `open_stream`."""
        if not self._codec.checked_at_end:
            pieces = self._pieces()
        else:
            pieces = self._verified() if verified else self._to_the_last_byte()
        for position, piece in pieces:
            if position > self._counted:
                advance(position - self._counted)
                self._counted = position
            yield piece

    def _verified(self) -> Iterator[tuple[int, bytes]]:
        start, held, length = self.position, list[tuple[int, bytes]](), 0
        pieces = self._pieces()
        try:
            for position, piece in pieces:
                held.append((position, piece))
                length += len(piece)
                if length > _HELD:
                    break
        except _CutOff:
            yield from held
            raise
        if length <= _HELD:
            yield from held
            return
        held.clear()
        if not self._is_local:
            self._copy(start)
        with contextlib.suppress(_CutOff):  # raised again at the end of the second reading
            deque(pieces, maxlen=0)
        self._go_back(start)
        yield from self._pieces()

    def _to_the_last_byte(self) -> Iterator[tuple[int, bytes]]:
        """A decompressor that fails keeps what it made of the bytes just given, so it is given the last ones singly."""
        start, length = self.position, 0
        try:
            for position, piece in self._pieces():
                length += len(piece)
                yield position, piece
        except CorruptMember:
            few_from = self._latest
            self._go_back(start)
            for position, piece in self._pieces(few_from):
                if length < len(piece):
                    yield position, piece[length:]
                length = max(0, length - len(piece))

    def _pieces(self, few_from: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The content of a member, each piece with the position behind what was read for it.

        From the position `few_from` on, the decompressor is given few bytes at a time.
        """
        known, member, length, end = self.position, self._codec.member(), 0, b""
        while not member.eof:
            data = b""
            if member.needs_input:
                data = self._take(few_from)
                end = (end + data)[-4:]
                if not data and self._codec.length_at_end and _nearly(length, int.from_bytes(end, "little")):
                    raise CorruptMember(self._path, self._place(known), self._cut_off().reason)
                if not data:
                    raise self._cut_off()
            try:
                content = member.decompress(data, _BUFFER)
            except (zlib.error, OSError, EOFError, zstandard.ZstdError, MemoryError) as error:
                kind = CorruptMember if self._codec.checked_at_end else DamagedInput
                raise kind(self._path, self._place(known), f"corrupt {self._codec.name} data ({error})") from None
            if content:
                length += len(content)
                known = known if self._codec.checked_at_end else self._latest
                yield self.position, content
        self._pending = member.unused_data + self._pending
        self.position -= len(member.unused_data)

    def _take(self, few_from: int | None) -> bytes:
        """Bytes to decompress; b"" at the end of the file."""
        size = _CHUNK
        if few_from is not None:
            size = min(size, few_from - self.position) if self.position < few_from else _FEW
        data, self._pending = self._pending or self._file.read(size), b""
        self._latest = self.position
        self.position += len(data)
        return data

    def _copy(self, start: int) -> None:
        """Copies the rest of a remote file, from `start` on, to this machine: it is requested once, but read twice."""
        read = self._file.tell() - start
        copy = self._scratch.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (it is closed with the stream)
        self._file.seek(start)
        shutil.copyfileobj(self._file, copy, _BUFFER)
        copy.seek(read)
        self._file, self._origin, self._is_local = copy, start, True

    def _go_back(self, position: int) -> None:
        self._file.seek(position - self._origin)
        self.position, self._pending = position, b""

    def _place(self, known: int | None = None) -> str:
        """The damaged byte of the stored file or, if `known` is given, the bytes from there to where it was noticed."""
        of = f" of {self._size}" if self._size else ""
        return f"byte {self.position}{of}" if known is None else f"bytes {known} to {self.position}{of}"

    def _cut_off(self) -> _CutOff:
        return _CutOff(self._path, self._place(), f"{self._codec.name} stream ends before its end marker")


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
