"""WET archives: real ones are read whole, damage at any byte is noticed, and no text is lost as in a split by lines."""

import base64
import gzip
import hashlib
from pathlib import Path

import pytest

from data_pipeline.foundation.errors import DamagedInput
from tests.data_pipeline.reading import read, read_until_damage

DATA = Path(__file__).parents[1] / "data" / "commoncrawl"
GENUINE = DATA / "CC-MAIN-20140820021334-00006.warc.wet"


def record(block: bytes, digest: bool = True, **headers: str | None) -> bytes:
    """A conversion record with these headers in addition to its own; None removes one."""
    sha1 = base64.b32encode(hashlib.sha1(block).digest()).decode()
    fields: dict[str, str | None] = {
        "WARC-Type": "conversion",
        "WARC-Target-URI": "http://a.org/",
        "WARC-Date": "2019-07-17T12:15:59Z",
        "WARC-Block-Digest": f"sha1:{sha1}" if digest else None,
        "Content-Length": str(len(block)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{name}: {value}\r\n" for name, value in fields.items() if value is not None]
    return b"WARC/1.0\r\n" + "".join(lines).encode() + b"\r\n" + block + b"\r\n\r\n"


def read_bytes(path: Path, data: bytes, **options):
    path.write_bytes(data)
    return read("wet", path, **options)


def test_a_header_field_without_a_name_costs_its_record_alone(tmp_path):
    record = b"WARC/1.0\r\nWARC-Type: conversion\r\n%sWARC-Target-URI: http://a.org/%d\r\n"
    record += b"WARC-Date: 2019-07-17T12:15:59Z\r\nContent-Length: 5\r\n\r\nWords\r\n\r\n"
    path = tmp_path / "a.warc.wet"
    path.write_bytes(record % (b"", 1) + record % (b": nameless\r\n", 2) + record % (b"", 3))
    records, intake = read("wet", path)
    assert [record.url for record in records] == ["http://a.org/1", "http://a.org/3"]
    assert intake.counters["damaged"] == 1


def test_a_genuine_archive_of_2014():
    kept, intake = read("wet", GENUINE)
    assert intake.counters == {"read": 3}
    assert intake.damage == []
    assert [(page.ordinal, page.url, page.timestamp, len(page.text.encode())) for page in kept] == [
        (1, "http://0pointer.de/photos/?gallery=Australia&photo=496", "2014-08-21T05:52:58Z", 629),
        *[
            (number, page.url, page.timestamp, length)
            for number, page, length in zip((2, 3), kept[1:], (626, 1283), strict=True)
        ],
    ]
    assert kept[0].text.startswith("Photos\n[ style: dark classic gorilla ]\n")


def test_a_genuine_compressed_archive_of_2024_names_the_language():
    kept, intake = read("wet", DATA / "whirlwind.warc.wet.gz")
    assert intake.counters == {"read": 1}
    assert (kept[0].url, kept[0].language) == ("https://an.wikipedia.org/wiki/Escopete", "spa")
    assert len(kept[0].text.encode()) == 4456  # its Content-Length


def test_lines_that_look_like_headers_are_text(tmp_path):
    """TFDS's split by lines drops the first three and ends the page at the fourth."""
    text = "WARC is a format.\nContent-Based stuff\nCONTENT-\nWARC/1.0\nThe end."
    kept, intake = read_bytes(tmp_path / "a", record(text.encode()) * 2)
    assert [page.text for page in kept] == [text] * 2
    assert intake.counters == {"read": 2}


def test_what_a_page_lacks_is_counted_in_this_order(tmp_path):
    lacking = {"WARC_Target_URI": None, "WARC_Date": None}
    data = record(b"", **lacking) + record(b" \n ", WARC_Date=None) + record(b"a", WARC_Date=None) + record(b"b")
    kept, intake = read_bytes(tmp_path / "a", data)
    assert [(page.ordinal, page.text) for page in kept] == [(3, "b")]
    assert intake.counters == {"read": 4, "no_url": 1, "no_content": 1, "no_timestamp": 1}


def test_undecodable_bytes_are_replaced_and_counted(tmp_path):
    kept, intake = read_bytes(tmp_path / "a", record(b"na\xefve \xe2\x82") + record("naïve".encode()))
    assert [page.text for page in kept] == ["na\ufffdve \ufffd", "naïve"]
    assert intake.counters == {"read": 2, "undecodable": 1}


def test_other_records_are_passed_by_and_other_line_ends_and_continued_headers_read(tmp_path):
    other = record(b"x", WARC_Type="metadata")
    page = record(b"a", WARC_Identified_Content_Language="eng,\r\n fra").replace(b"\r\n", b"\n")
    kept, intake = read_bytes(tmp_path / "a", other + page + other)
    assert [(page.ordinal, page.text, page.language) for page in kept] == [(1, "a", "eng")]
    assert intake.counters == {"read": 1}


def starts(data: bytes) -> list[int]:
    return [at for at in range(len(data)) if data.startswith(b"WARC/1.0\r\n", at)]


@pytest.mark.parametrize("compression", ["none", "each record", "whole"])
def test_a_cut_at_any_byte_is_never_silent(tmp_path, compression):
    """Cuts at every length, except between two records, where a valid archive is left."""
    pages = [record(b"One.\n" * 20), record(b"Two.\n" * 20, digest=False), record(b"Three.\n" * 20)]
    compress = {"none": bytes, "each record": gzip.compress, "whole": bytes}[compression]
    stored = [compress(page) for page in pages]
    whole = gzip.compress(b"".join(pages)) if compression == "whole" else b"".join(stored)
    ends = [sum(map(len, stored[:number])) for number in range(1, 4)] if compression != "whole" else []
    path = tmp_path / "a"
    for length in set(range(4, len(whole))) - set(ends):
        path.write_bytes(whole[:length])
        kept, _, damage = read_until_damage("wet", path)
        assert len(kept) >= sum(end <= length for end in ends)
        assert [page.text for page in kept] == ["One.\n" * 20, "Two.\n" * 20, "Three.\n" * 20][: len(kept)]
        assert "byte" in damage.position


def test_cutting_a_genuine_archive_loses_only_what_is_behind_the_cut(tmp_path):
    data = GENUINE.read_bytes()
    begins = starts(data)
    whole = [page.text for page in read("wet", GENUINE)[0]]
    path = tmp_path / "a"
    for length in (length for length in range(begins[1] + 1, len(data), 37) if length not in begins):
        path.write_bytes(data[:length])
        kept, _, _ = read_until_damage("wet", path)
        assert [page.text for page in kept] == whole[: len(kept)]
        assert len(kept) >= sum(begin <= length for begin in begins[2:])


def test_a_changed_bit_never_changes_a_text_or_loses_another_page(tmp_path):
    """Changes each bit of the middle record in turn. Other pages stay, and one page is noted or unchanged.

    Only the value of a header that nothing can check may change unnoticed: the page's address, date and language.
    """
    pages = [record(b"First page."), record(b"A second one."), record(b"The last.")]
    data = b"".join(pages)
    path = tmp_path / "a"
    for place in range(len(pages[0]), len(pages[0]) + len(pages[1]) - 4):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        kept, intake = read("wet", path)
        texts = [page.text for page in kept]
        assert texts in (["First page.", "A second one.", "The last."], ["First page.", "The last."])
        if len(texts) == 2:
            lacking = sum(intake.counters[rule] for rule in ("no_url", "no_timestamp"))
            assert intake.counters["damaged"] + lacking == 1
            assert intake.counters["read"] == 3


def test_a_changed_byte_in_a_compressed_archive_is_damage(tmp_path):
    data = (DATA / "whirlwind.warc.wet.gz").read_bytes()
    for place in range(20, len(data), 50):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        path = tmp_path / "a"
        path.write_bytes(changed)
        _, intake, damage = None, None, None
        try:
            kept, intake = read("wet", path)
        except DamagedInput as error:
            damage = error
        assert damage or intake.damage or kept == read("wet", DATA / "whirlwind.warc.wet.gz")[0]


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        ("3", "doesn't lead"),
        ("400", "doesn't lead"),
        ("99999999999", "max_record_bytes"),
        ("x", "is 'x'"),
        (None, "is ''"),
    ],
)
def test_a_wrong_length_costs_one_record(tmp_path, length, reason):
    data = record(b"One page.") + record(b"Its length is wrong.", Content_Length=length) + record(b"Next.") * 3
    kept, intake = read_bytes(tmp_path / "a", data)
    assert [page.text for page in kept] == ["One page."] + ["Next."] * 3
    assert intake.counters == {"read": 5, "damaged": 1}
    position, why = intake.damage[0]
    assert position == f"record 1 at byte {len(record(b'One page.'))} of the content"
    assert reason in why


def test_bytes_between_records_are_noted(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(record(b"a") + b"<html>\n" + record(b"b") + b"more\n")
    kept, intake, damage = read_until_damage("wet", path)
    assert [page.text for page in kept] == ["a", "b"]
    assert intake.damage[0][0].startswith("7 bytes before record 1 at byte ")
    assert damage.position == "the last 5 bytes"


def test_records_longer_than_the_cap_are_noted_where_they_are_wanted(tmp_path):
    data = record(b"a" * 5000) + record(b"b" * 5000, WARC_Type="metadata") + record(b"c")
    kept, intake = read_bytes(tmp_path / "a", data, max_record_bytes=4000)
    assert [page.text for page in kept] == ["c"]
    assert intake.counters == {"read": 2, "damaged": 1}


def test_digests_need_not_be_verified(tmp_path):
    data = record(b"a", WARC_Block_Digest="sha1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
    assert read_bytes(tmp_path / "a", data)[1].counters == {"read": 1, "damaged": 1}
    assert read_bytes(tmp_path / "a", data, verify_digests=False)[1].counters == {"read": 1}


@pytest.mark.parametrize("data", [b"<head>\n<body>", b"\n\n", b'{"text": "a"}\n'])
def test_anything_but_an_archive_is_damage(tmp_path, data):
    path = tmp_path / "a"
    path.write_bytes(data)
    assert "not a WARC archive" in read_until_damage("wet", path)[2].reason
