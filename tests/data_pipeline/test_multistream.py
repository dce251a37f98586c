"""Ranges of a multistream dump: together they contain the whole file, wherever it is cut."""

import bz2
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from data_pipeline.foundation.errors import DamagedInput, UserError
from data_pipeline.sources.record import Input, Range, ReadStats, Record
from data_pipeline.sources.wikipedia import read
from data_pipeline.sources.wikipedia_export import index_of, ranges
from tests.conftest import SAMPLES
from tests.tables import each


@pytest.fixture(scope="module")
def xml() -> bytes:
    """60 pages of the real dump, with its head."""
    pages = bz2.decompress((SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2").read_bytes()).split(b"  <page>")
    return b"  <page>".join([pages[0], *pages[300:360]]) + b"</mediawiki>\n"


@pytest.fixture(scope="module")
def dump(xml, tmp_path_factory) -> Path:
    """A dump as Wikimedia makes it: one stream for the head, one for every 7 pages, one for the end, and the index."""
    head, *pages = re.split(rb"(?=  <page>)", xml.removesuffix(b"</mediawiki>\n"))
    path = tmp_path_factory.mktemp("dump") / "enwiki-multistream.xml.bz2"
    data, index = bz2.compress(head), b""
    for first in range(0, len(pages), 7):
        group = pages[first : first + 7]
        for page in group:
            title, number = re.search(b"<title>(.*)</title>", page)[1], re.search(rb"<id>(\d+)", page)[1]
            index += b"%d:%s:%s\n" % (len(data), number, title)
        data += bz2.compress(b"".join(group))
    path.write_bytes(data + bz2.compress(b"</mediawiki>\n"))
    Path(index_of(str(path))).write_bytes(bz2.compress(index))
    return path


def read_all(inputs: list[Input]) -> tuple[list[Record], Counter, list]:
    stats = ReadStats()
    records = [record for file in inputs for record in read(file, stats)]
    return records, stats.counters, stats.damage


def test_names_of_indexes_are_wikimedias():
    stem = "a/enwiki-x-pages-articles-multistream"
    assert index_of(f"{stem}.xml.bz2") == f"{stem}-index.txt.bz2"
    assert index_of(f"{stem}1.xml-p1p41242.bz2") == f"{stem}-index1.txt-p1p41242.bz2"


def inputs_of(dump: Path, index_path: str | None, target_bytes: int) -> list[Input]:
    return [Input(str(dump), *cut) for cut in ranges(str(dump), index_path, target_bytes)]


@each("target, indexed", itertools.product([1, 20_000, 100_000, 10**9], [True, False]))
def test_ranges_together_are_the_file(dump, target, indexed):
    inputs = inputs_of(dump, index_of(str(dump)) if indexed else None, target)
    assert inputs[0].start == 0
    assert inputs[-1].stop is None
    assert all(left.stop == right.start for left, right in itertools.pairwise(inputs))
    assert all(file.stop - file.start >= target for file in inputs[:-1])
    whole, counters, _ = read_all([Input(str(dump))])
    assert counters["read"] == 60
    assert len(whole) > 15
    assert read_all(inputs) == (whole, counters, [])


def test_index_and_scan_find_the_same_streams(dump):
    by_index, by_scan = ranges(str(dump), index_of(str(dump)), 1), ranges(str(dump), None, 1)
    assert by_scan[:-1] == [*by_index[:-1], by_index[-1]._replace(stop=by_scan[-1].start)]
    assert by_scan[-1].first_ordinal == 60  # the last stream, which no line of the index names


@pytest.mark.slow
def test_streams_cut_anywhere(xml, tmp_path):
    """pbzip2 cuts at any byte; a page belongs to the range that has its first byte."""
    path, rng = tmp_path / "a.xml.bz2", random.Random(0)
    path.write_bytes(bz2.compress(xml))
    whole = read_all([Input(str(path))])
    tag = [match.start() for match in re.finditer(b"<page>", xml)]
    at_tags = sorted({at + n for at in tag[5:9] for n in (0, 3, 7)})
    for cuts in (at_tags, *(sorted(rng.sample(range(len(xml)), 6)) for _ in range(11))):
        parts = [xml[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]
        path.write_bytes(b"".join(map(bz2.compress, parts)))
        inputs = inputs_of(path, None, 1)
        assert len(inputs) == len(parts)
        assert read_all(inputs) == whole


@each("at", ["page", "between"])
def test_a_dump_cut_off_is_noted_once(xml, tmp_path, at):
    path = tmp_path / "a.xml.bz2"
    end = xml.rindex(b"</text>") if at == "page" else xml.rindex(b"</mediawiki>")
    parts = [xml[:40_000], xml[40_000:90_000], xml[90_000 : end - 20], xml[end - 20 : end]]
    path.write_bytes(b"".join(map(bz2.compress, parts)))
    whole, counters, damage = read_all([Input(str(path))])
    assert counters["truncated_xml"] == len(damage) == 1
    assert counters["damaged"] == (at == "page")
    cut = read_all(inputs_of(path, None, 1))
    assert cut[:2] == (whole, counters)
    assert [reason for _, reason in cut[2]] == [reason for _, reason in damage]


def test_a_corrupt_stream_costs_only_its_own_range(dump, tmp_path):
    inputs = inputs_of(dump, index_of(str(dump)), 1)
    data = bytearray(dump.read_bytes())
    data[inputs[4].start + 3000] ^= 0xFF
    path = tmp_path / "a.xml.bz2"
    path.write_bytes(data)
    for number, file in enumerate(inputs):
        stats = ReadStats()
        damaged = Input(str(path), file.start, file.stop, file.first_ordinal)
        if number == 4:
            with pytest.raises(DamagedInput, match="corrupt bz2"):
                list(read(damaged, stats))
        else:
            assert list(read(damaged, stats)) == list(read(file, ReadStats()))


def test_a_file_of_one_stream_or_none_is_one_range(xml, tmp_path):
    for name, data in [("a.xml.bz2", bz2.compress(xml)), ("a.xml", xml)]:
        (tmp_path / name).write_bytes(data)
        assert ranges(str(tmp_path / name), None, 1) == [Range()]


@each(
    "index, message",
    [
        (b"12:1:A\n", "no bzip2 stream begins at its byte 12"),
        (b"999999999:1:A\n", "no bzip2 stream begins at its byte 999999999"),
        (b"not an index\n", "line 1: expected offset:page id:title"),
        (b"", "empty file"),
        (b"600:1:A\n500:2:B\n", "line 2: offset 500 comes after 600"),
        (None, "7 pages begin at its byte [0-9]+, not 6"),  # its own index, but for one page
    ],
)
def test_an_index_that_is_not_the_files_is_one_clear_error(dump, tmp_path, index, message):
    path = tmp_path / "index.txt"
    lines = bz2.decompress(Path(index_of(str(dump))).read_bytes()).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]) if index is None else index)
    with pytest.raises(UserError, match=message):
        ranges(str(dump), str(path), 1000)
