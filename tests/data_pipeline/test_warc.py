"""WARC archives: HTTP responses are decoded, HTML is recognised, and its main text is extracted."""

import gzip
import itertools
import zlib
from pathlib import Path

import brotli
import zstandard

from tests.data_pipeline.reading import read, read_bytes
from tests.data_pipeline.test_wet import record
from tests.tables import each

DATA = Path(__file__).parents[1] / "data" / "commoncrawl"
PAGE = "<html><head><title>A  café</title></head><body><p>Größe and naïve cafés.</p></body></html>"
HTML = "Content-Type: text/html; charset=utf-8"


def response(body: bytes, *headers: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in (status, *headers))
    return record(head.encode() + b"\r\n" + body, WARC_Type="response")


def read_all(folder: Path, *responses: bytes, **options):
    return read_bytes("warc", folder / "a", b"".join(responses), **options)


def test_a_genuine_archive_of_2014():
    """The first response has no body and no type. The crawler truncated two others, which are still HTML."""
    kept, stats = read("warc", DATA / "CC-MAIN-20140820021334-00006.warc")
    assert stats.counters == {"read": 4, "not_html": 1}
    wet, _ = read("wet", DATA / "CC-MAIN-20140820021334-00006.warc.wet")
    assert [(page.url, page.timestamp) for page in kept] == [(page.url, page.timestamp) for page in wet]
    assert "This image has been viewed 255" in kept[0].text


def test_main_text_of_a_genuine_page():
    """It has the article's sentences, as its WET file does, but not the menus, which the WET file has too."""
    [page], _ = read("warc", DATA / "whirlwind.warc.gz")
    [wet], _ = read("wet", DATA / "whirlwind.warc.wet.gz")
    assert page.title == "Escopete - Biquipedia, a enciclopedia libre"
    sentence = "A suya población ye de 84 habitants (2007)"
    assert sentence in page.text
    assert sentence in wet.text
    assert "Menú principal" in wet.text
    assert "Menú principal" not in page.text
    [everything], _ = read("warc", DATA / "whirlwind.warc.gz", main_content=False)
    assert "Menú principal" in everything.text


@each(
    "charset, headers",
    [
        ("utf-8", ["Content-Type: text/html; charset=UTF-8"]),
        ("windows-1252", ["Content-Type: text/html; charset=ISO-8859-1"]),
        ("utf-8-sig", ["Content-Type: text/html; charset=iso-8859-1"]),
        ("utf-16", ["Content-Type: text/html"]),
        ("utf-8", ["Content-Type: text/html"]),
        ("utf-8", ["Content-Type: text/html; charset=nonsense"]),
        ("utf-8", ["Content-Type: application/xhtml+xml"]),
        ("utf-8", []),
    ],
)
def test_character_sets(tmp_path, charset, headers):
    [page], stats = read_all(tmp_path, response(PAGE.encode(charset), *headers))
    assert (page.text.strip(), page.title) == ("Größe and naïve cafés.", "A café")
    assert stats.counters == {"read": 1}


def test_the_character_set_may_stand_in_the_page_and_one_bad_byte_costs_one_character(tmp_path):
    html = '<html><head><meta charset="windows-1251"></head><body><p>Большой.</p></body></html>'
    bad = PAGE.encode().replace(b"and", b"\x81\xff")
    kept, stats = read_all(tmp_path, response(html.encode("cp1251"), "Content-Type: text/html"), response(bad, HTML))
    assert [page.text.strip() for page in kept] == ["Большой.", "Größe \ufffd\ufffd naïve cafés."]
    assert stats.counters == {"read": 2, "undecodable": 1}


def chunked(body: bytes) -> bytes:
    pieces = [body[at : at + 30] for at in range(0, len(body), 30)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def raw_deflate(body: bytes) -> bytes:
    return zlib.compress(body)[2:-4]


ENCODINGS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate, raw": raw_deflate,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor(write_content_size=False).compress,
    "identity": bytes,
}


@each("transfer, encoding", itertools.product([bytes, chunked], ENCODINGS))
def test_encodings_are_undone_and_headers_of_those_already_undone_are_ignored(tmp_path, transfer, encoding):
    headers = [HTML, f"Content-Encoding: {encoding.partition(',')[0]}", "Transfer-Encoding: chunked"]
    encoded = transfer(ENCODINGS[encoding](PAGE.encode()))
    kept, stats = read_all(tmp_path, response(encoded, *headers), response(PAGE.encode(), *headers))
    assert [page.text.strip() for page in kept] == ["Größe and naïve cafés."] * 2
    assert stats.counters == {"read": 2}


@each("encoding", ["gzip", "deflate", "br", "zstd"])
def test_an_encoding_that_is_cut_off_is_damage_and_the_rest_goes_on(tmp_path, encoding):
    headers = [HTML, f"Content-Encoding: {encoding}"]
    cut = ENCODINGS[encoding](PAGE.encode())[:-9]
    broken_chunks = chunked(ENCODINGS[encoding](PAGE.encode()))[:-9]
    kept, stats = read_all(
        tmp_path,
        response(cut, *headers),
        response(broken_chunks, *headers, "Transfer-Encoding: chunked"),
        response(PAGE.encode(), HTML),
    )
    assert [page.ordinal for page in kept] == [2]
    assert stats.counters == {"read": 3, "damaged": 2}
    assert [position.partition(" at")[0] for position, _ in stats.damage] == ["record 0", "record 1"]


def test_a_small_body_that_unpacks_to_a_huge_one_is_damage(tmp_path):
    huge = gzip.compress(bytes(1 << 22))
    _, stats = read_all(tmp_path, response(huge, HTML), max_record_bytes=1 << 20)
    assert stats.counters == {"read": 1, "damaged": 1}


def test_what_is_dropped_is_counted(tmp_path):
    _, stats = read_all(
        tmp_path,
        response(b"", "Location: /b", status="HTTP/1.1 301 Moved"),
        response(PAGE.encode(), HTML, status="HTTP/1.1 404 Not Found"),
        record(b"20190717121559\na.org. 300 IN A 127.0.0.1\n", WARC_Type="response"),
        response(b"%PDF-1.4", "Content-Type: application/pdf"),
        response(b'{"a": 1}', "Content-Type: application/json; charset=utf-8"),
        response(b"<html><body><script>a()</script></body></html>", HTML),
        record(b"GET / HTTP/1.1\r\n\r\n", WARC_Type="request"),
    )
    assert stats.counters == {"read": 6, "not_200": 3, "not_html": 2, "no_content": 1}
