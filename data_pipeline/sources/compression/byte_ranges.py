"""The content of a byte range of a file: the whole file, or some streams of a bzip2 file that has many."""

import contextlib
import io
from collections.abc import Generator
from typing import cast

from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources.compression.decompress import BZIP2, Members, open_file, open_stream
from data_pipeline.sources.record import Input

_CHUNK = 1 << 18


class DamagedBeyond(DamagedInput):
    """Damage beyond the end of the range. It matters only to a record that begins in the range and ends beyond it."""


def chunks(file: Input) -> Generator[tuple[bytes, bool], None, None]:
    """The content from `file.start` to the end of the file: chunks, each with whether it lies beyond `file.stop`.

    A record that begins in the range may end beyond it, so the caller decides where to stop. Raises `UserError` if the
    file can't be opened, `DamagedInput` at the first byte that can't be decompressed.
    """
    if file.start == 0 and file.stop is None:
        with open_stream(file.path, file.verified) as stream:
            # read1 yields the content before the damage, then raises
            while data := cast(io.BufferedReader, stream).read1(_CHUNK):
                yield data, False
    else:
        yield from _streams(file)


def _streams(file: Input) -> Generator[tuple[bytes, bool], None, None]:
    """The content of the bzip2 streams, one after the other."""
    with open_file(file.path) as stored, contextlib.ExitStack() as scratch:
        stored.seek(file.start)
        streams = Members(stored, file.path, BZIP2, scratch, start=file.start)
        beyond = False
        try:
            while streams.has_next():
                beyond = file.stop is not None and streams.position >= file.stop
                for content in streams.content():
                    yield content, beyond
        except DamagedInput as damage:
            raise DamagedBeyond(file.path, damage.position, damage.reason) if beyond else damage from None
