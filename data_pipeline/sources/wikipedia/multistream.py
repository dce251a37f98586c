"""Cuts a dump of many bzip2 streams (`…-pages-articles-multistream.xml.bz2`) into ranges, and reads one of them.

Wikimedia compresses the dump's head, then every hundred pages, then its end, each as a bzip2 stream of its own, and
publishes an index: `offset of the stream:page id:title`, a line for each page.
"""

import contextlib
import io
import os
import re
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import BinaryIO, cast

from data_pipeline.foundation import stores
from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.sources.decompress import BZIP2, Members, open_file, open_stream
from data_pipeline.sources.record import Input, Range
from data_pipeline.sources.wikipedia.export import PAGE, page_tags

# The header of a stream, followed by the header of its first block, or by its end marker if it is empty.
_STREAM = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
_MAGIC_BYTES = 10
_SEARCHED, _CHUNK = 1 << 22, 1 << 18  # bytes read at once, to find streams and to decompress


def index_of(path: str) -> str:
    """The path of the index that Wikimedia publishes for a multistream dump.

    "a-multistream.xml.bz2"  ->  "a-multistream-index.txt.bz2"      "a-multistream1.xml-p1p9.bz2"  ->
    "a-multistream-index1.txt-p1p9.bz2"
    """
    return re.sub(r"multistream(\d*)\.xml([^/]*)$", r"multistream-index\1.txt\2", path)


def ranges(path: str, index_path: str | None, target_bytes: int) -> list[Range]:
    """Ranges that together make up the file: each of `target_bytes` or somewhat more, cut where bzip2 streams begin.

    A file with one stream or another compression is one range. Without an index, the streams are found by their first
    bytes, and their pages are counted by decompressing the file on all cores. That works
    for any concatenated bzip2 (pbzip2's too), but takes as long as reading the file once. Raises `UserError` if the
    index belongs to another file, `DamagedInput` if it can't be read.

        ranges("a.bz2", None, 1 << 26)  ->  [Range(0, 67108901), Range(67108901, None, 1420)]
    """
    with stores.open_file(path) as file:
        if not _begins_stream(file, 0):
            return [Range()]
    if index_path is None:
        cuts = _cut(_stream_offsets(path), target_bytes)
        if len(cuts) == 1:
            return cuts
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # decompression releases the GIL
            pages = pool.map(_count_pages, [Input(path, cut.start, cut.stop) for cut in cuts])
            before = list(accumulate(pages, initial=0))
        return [cut._replace(first_ordinal=first) for cut, first in zip(cuts, before, strict=False)]
    offsets, counts = _read_index(index_path)
    cuts = _cut(offsets, target_bytes)
    _check_index(path, index_path, offsets, counts, [cut.start for cut in cuts])
    before = list(accumulate(counts, initial=0))
    return [cut._replace(first_ordinal=before[bisect_left(offsets, cut.start)]) for cut in cuts]


def _cut(offsets: Iterable[int], target_bytes: int) -> list[Range]:
    """offsets 10, 90, 110, 205 by 100  ->  Range(0, 110), Range(110, None)"""
    starts = [0]
    for offset in offsets:
        if offset - starts[-1] >= target_bytes:
            starts.append(offset)
    return [Range(start, stop) for start, stop in pairwise([*starts, None]) if start is not None]


def _begins_stream(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    return _STREAM.match(file.read(_MAGIC_BYTES)) is not None


# --- without an index -----------------------------------------------------------------------------


def _stream_offsets(path: str) -> Iterator[int]:
    with stores.open_file(path) as file:
        base, rest = 0, b""
        while data := file.read(_SEARCHED):
            data = rest + data
            for stream in _STREAM.finditer(data):
                yield base + stream.start()
            overlap = min(len(data), _MAGIC_BYTES - 1)
            base, rest = base + len(data) - overlap, data[len(data) - overlap :]


def _count_pages(file: Input) -> int:
    """The number of pages that begin in the range, up to the first damage: the pages that its reader will number."""
    pages = 0
    try:
        for tag in page_tags(chunks(file)):
            if tag.beyond and tag.name != b"":
                break
            pages += tag.name == PAGE
    except DamagedInput:
        pass
    return pages


# --- with an index --------------------------------------------------------------------------------


def _read_index(index_path: str) -> tuple[list[int], list[int]]:
    """The offsets of the streams that hold pages, in order, and the number of pages in each."""
    offsets: list[int] = []
    counts: list[int] = []
    with open_stream(index_path) as lines:
        for number, line in enumerate(lines, 1):
            offset, _, rest = line.partition(b":")
            if not (offset.isdigit() and rest.partition(b":")[0].isdigit()):
                raise UserError(f"{index_path}: line {number}: expected offset:page id:title")
            if not offsets or int(offset) > offsets[-1]:
                offsets.append(int(offset))
                counts.append(0)
            elif int(offset) < offsets[-1]:
                raise UserError(f"{index_path}: line {number}: offset {int(offset)} comes after {offsets[-1]}")
            counts[-1] += 1
    return offsets, counts


def _check_index(path: str, index_path: str, offsets: list[int], counts: list[int], starts: list[int]) -> None:
    """Each cut must be where a stream begins, and the first stream must hold as many pages as the index says."""
    with stores.open_file(path) as file:
        for offset in [*starts, offsets[0], offsets[-1]]:
            if not _begins_stream(file, offset):
                raise UserError(f"{index_path}: is no index of {path}: no bzip2 stream begins at its byte {offset}")
    pages = _count_pages(Input(path, offsets[0], offsets[1] if len(offsets) > 1 else None))
    if pages != counts[0]:
        raise UserError(
            f"{index_path}: is no index of {path}: {pages} pages begin at its byte {offsets[0]}, not {counts[0]}"
        )


# --- reading a range ------------------------------------------------------------------------------


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
