"""WET archives: real ones are read whole, damage at any byte is noticed, and no text is lost as in a split by lines."""

import base64
import hashlib
import itertools
from pathlib import Path

from tests.data_pipeline.reading import read, read_bytes, read_until_damage
from tests.tables import each

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


def test_a_genuine_archive_of_2014():
    kept, stats = read("wet", GENUINE)
    assert stats.counters == {"read": 3}
    assert stats.damage == []
    assert [(page.ordinal, len(page.text.encode())) for page in kept] == [(1, 629), (2, 626), (3, 1283)]
    url = "http://0pointer.de/photos/?gallery=Australia&photo=496"
    assert (kept[0].url, kept[0].timestamp) == (url, "2014-08-21T05:52:58Z")
    assert kept[0].text.startswith("Photos\n[ style: dark classic gorilla ]\n")


def test_a_genuine_compressed_archive_of_2024_names_the_language():
    kept, stats = read("wet", DATA / "whirlwind.warc.wet.gz")
    assert stats.counters == {"read": 1}
    assert (kept[0].url, kept[0].language) == ("https://an.wikipedia.org/wiki/Escopete", "spa")
    assert len(kept[0].text.encode()) == 4456  # its Content-Length


# TFDS's split by lines drops the first three lines and ends the page at the fourth
LIKE_HEADERS = "WARC is a format.\nContent-Based stuff\nCONTENT-\nWARC/1.0\nThe end."
LACKING = [record(b"", WARC_Target_URI=None, WARC_Date=None), *(record(b, WARC_Date=None) for b in (b" \n ", b"a"))]
# lines end with a line feed alone, and one header goes on in a second line
OTHER_LINES = record(b"a", WARC_Identified_Content_Language="eng,\r\n fra").replace(b"\r\n", b"\n")
NAMELESS = record(b"b").replace(b"WARC-Date", b": nameless\r\nWARC-Date")
CAPPED = [record(b"a" * 5000), record(b"b" * 5000, WARC_Type="metadata"), record(b"c")]
UNVERIFIED = record(b"a", WARC_Block_Digest="sha1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")


@each(
    "records, kept, counters, options",
    [
        ([record(LIKE_HEADERS.encode())] * 2, {0: LIKE_HEADERS, 1: LIKE_HEADERS}, {"read": 2}, {}),
        # what a page lacks is counted in this order
        ([*LACKING, record(b"b")], {3: "b"}, {"read": 4, "no_url": 1, "no_content": 1, "no_timestamp": 1}, {}),
        (
            [record(b"na\xefve \xe2\x82"), record("naïve".encode())],
            *({0: "na\ufffdve \ufffd", 1: "naïve"}, {"read": 2, "undecodable": 1}, {}),
        ),
        ([record(b"x", WARC_Type="metadata"), OTHER_LINES], {1: "a"}, {"read": 1}, {}),
        ([record(b"a"), NAMELESS, record(b"c")], {0: "a", 2: "c"}, {"read": 3, "damaged": 1}, {}),
        (CAPPED, {2: "c"}, {"read": 2, "damaged": 1}, {"max_record_bytes": 4000}),
        ([UNVERIFIED], {}, {"read": 1, "damaged": 1}, {}),
        ([UNVERIFIED], {0: "a"}, {"read": 1}, {"verify_digests": False}),
    ],
)
def test_records_of_an_archive(tmp_path, records, kept, counters, options):
    found, stats = read_bytes("wet", tmp_path / "a", b"".join(records), **options)
    assert {page.ordinal: page.text for page in found} == kept
    assert stats.counters == counters
    assert {page.language for page in found} <= ({"eng"} if OTHER_LINES in records else {""})


def test_a_cut_at_any_byte_is_never_silent(tmp_path):
    """Cuts at every length, except between two records, where a valid archive is left."""
    texts = ["One.\n" * 20, "Two.\n" * 20, "Three.\n" * 20]
    pages = [record(text.encode(), digest=number != 1) for number, text in enumerate(texts)]
    whole, ends = b"".join(pages), list(itertools.accumulate(map(len, pages)))
    path = tmp_path / "a"
    for length in set(range(4, len(whole))) - set(ends):
        path.write_bytes(whole[:length])
        kept, _, damage = read_until_damage("wet", path)
        assert len(kept) >= sum(end <= length for end in ends)
        assert [page.text for page in kept] == texts[: len(kept)]
        assert "byte" in damage.position


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
        kept, stats = read("wet", path)
        texts = [page.text for page in kept]
        assert texts in (["First page.", "A second one.", "The last."], ["First page.", "The last."])
        if len(texts) == 2:
            lacking = sum(stats.counters[rule] for rule in ("no_url", "no_timestamp"))
            assert stats.counters["damaged"] + lacking == 1
            assert stats.counters["read"] == 3


LENGTHS = {"3": "doesn't lead", "400": "doesn't lead", "99999999999": "max_record_bytes", "x": "is 'x'", None: "is ''"}


@each("length, reason", LENGTHS.items())
def test_a_wrong_length_costs_one_record(tmp_path, length, reason):
    data = record(b"One page.") + record(b"Its length is wrong.", Content_Length=length) + record(b"Next.") * 3
    kept, stats = read_bytes("wet", tmp_path / "a", data)
    assert [page.text for page in kept] == ["One page."] + ["Next."] * 3
    assert stats.counters == {"read": 5, "damaged": 1}
    position, why = stats.damage[0]
    assert position == f"record 1 at byte {len(record(b'One page.'))} of the content"
    assert reason in why


def test_bytes_between_records_are_noted(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(record(b"a") + b"<html>\n" + record(b"b") + b"more\n")
    kept, stats, damage = read_until_damage("wet", path)
    assert [page.text for page in kept] == ["a", "b"]
    assert stats.damage[0][0].startswith("7 bytes before record 1 at byte ")
    assert damage.position == "the last 5 bytes"


@each("data", [b"<head>\n<body>", b"\n\n", b'{"text": "a"}\n'])
def test_anything_but_an_archive_is_damage(tmp_path, data):
    path = tmp_path / "a"
    path.write_bytes(data)
    assert "not a WARC archive" in read_until_damage("wet", path)[2].reason
