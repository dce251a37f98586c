"""The content of a byte range of a file: the whole file, or some streams of a bzip2 file that has many."""

import bz2
import io
from collections.abc import Generator
from typing import cast

from data_pipeline.foundation import checksums, stores
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.sources.compression.stream import open_stream, read_chunk
from data_pipeline.sources.record import Input

_CHUNK = 1 << 18


class DamagedBeyond(DamagedInput):
    """Damage beyond the end of the range. It matters only to a record that begins in the range and ends beyond it."""


def pieces(file: Input) -> Generator[tuple[bytes, bool], None, None]:
    """The content from `file.start` to the end of the file: pieces, each with whether it lies beyond `file.stop`.

    A record that begins in the range may end beyond it, so the caller decides where to stop. Raises `UserError` if the
    file can't be opened, `DamagedInput` at the first byte that can't be decompressed.
    """
    if file.start == 0 and file.stop is None:
        with open_stream(file.path) as stream:
            # read1 yields the content before the damage, then raises
            while data := cast(io.BufferedReader, stream).read1(_CHUNK):
                yield data, False
    else:
        yield from _streams(file)


def _streams(file: Input) -> Generator[tuple[bytes, bool], None, None]:
    """The content of the bzip2 streams, one after the other."""
    try:
        opened = stores.open_file(file.path)
    except FileNotFoundError:
        raise UserError(f"{file.path}: no such file") from None
    with opened:
        stored = checksums.watched(opened, file.path)
        stored.seek(file.start)
        position, pending = file.start, b""
        while pending or (pending := read_chunk(stored)):
            beyond = file.stop is not None and position >= file.stop
            damage = DamagedBeyond if beyond else DamagedInput
            decompressor = bz2.BZ2Decompressor()
            while not decompressor.eof:
                data = b""
                if decompressor.needs_input:
                    data = pending or read_chunk(stored)
                    pending = b""
                    if not data:
                        raise damage(file.path, f"byte {position}", "bz2 stream ends before its end marker")
                try:
                    content = decompressor.decompress(data, _CHUNK)
                except (OSError, EOFError) as error:
                    raise damage(file.path, f"byte {position}", f"corrupt bz2 data ({error})") from None
                position += len(data)
                if content:
                    yield content, beyond
            pending = decompressor.unused_data
            position -= len(pending)
