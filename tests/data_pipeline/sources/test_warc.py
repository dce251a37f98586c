"""WET and WARC archives: damage at any byte is noticed, no text is lost, and a response's main text is extracted."""

import base64
import gzip
import hashlib
import itertools
import zlib
from pathlib import Path

import brotli
import zstandard

from tests.support.reading import encodings, flat, read, read_bytes, read_until_damage
from tests.support.tables import each

DATA = Path(__file__).parents[2] / "data" / "commoncrawl"
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


def test_a_genuine_archive_of_2014_and_its_text():
    """The first response has no body and no type. The crawler truncated two others, which are still HTML."""
    kept, stats = read("wet", GENUINE)
    assert flat(stats.counters) == {"read": 3}
    assert stats.damage == []
    assert [(page.ordinal, len(page.text.encode())) for page in kept] == [(1, 629), (2, 626), (3, 1283)]
    url = "http://0pointer.de/photos/?gallery=Australia&photo=496"
    assert (kept[0].url, kept[0].timestamp) == (url, "2014-08-21T05:52:58Z")
    assert kept[0].text.startswith("Photos\n[ style: dark classic gorilla ]\n")
    responses, stats = read("warc", GENUINE.with_suffix(""))
    assert flat(stats.counters) == {"read": 4, "not_html": 1}
    assert [(page.url, page.timestamp) for page in responses] == [(page.url, page.timestamp) for page in kept]
    assert "This image has been viewed 255" in responses[0].text


# TFDS's split by lines drops the first three lines and ends the page at the fourth
LIKE_HEADERS = "WARC is a format.\nContent-Based stuff\nCONTENT-\nWARC/1.0\nThe end."
LACKING = [record(b"", WARC_Target_URI=None, WARC_Date=None), *(record(b, WARC_Date=None) for b in (b" \n ", b"a"))]
# lines end with a line feed alone, and one header continues in a second line
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
    assert flat(stats.counters) == counters
    assert {page.language for page in found} <= ({"eng"} if OTHER_LINES in records else {""})


@each("compress", [bytes, gzip.compress])
def test_a_cut_at_any_byte_is_never_silent(tmp_path, compress):
    """Cuts at every length, except between two records, where a valid archive is left."""
    texts = ["One.\n" * 20, "Two.\n" * 20, "Three.\n" * 20]
    pages = [compress(record(text.encode(), digest=number != 1)) for number, text in enumerate(texts)]
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
            lacking = sum(stats.counters.dropped_documents[rule] for rule in ("no_url", "no_timestamp"))
            assert stats.counters.dropped_documents["damaged"] + lacking == 1
            assert stats.counters.read == 3


def test_every_changed_bit_that_zlib_notices_in_a_compressed_archive_is_noticed(tmp_path):
    """Each bit of the middle one of three gzip members. The reader inflates with zlib-ng."""
    members = [gzip.compress(record(text)) for text in (b"First page.", b"A second one.", b"The last.")]
    path = tmp_path / "a"
    unseen = 0
    for place, bit in itertools.product(range(len(members[1])), range(8)):
        changed = bytearray(members[1])
        changed[place] ^= 1 << bit
        path.write_bytes(members[0] + changed + members[2])
        inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            inflate.decompress(changed)
            noticed = not inflate.eof or bool(inflate.unused_data)
        except zlib.error:
            noticed = True
        if noticed:
            kept, _, _ = read_until_damage("wet", path)
            assert [page.text for page in kept] == ["First page."]
        else:
            unseen += 1
            kept, _ = read("wet", path)
            assert [page.text for page in kept] == ["First page.", "A second one.", "The last."]
    # RFC 1952: nothing checks the time, the extra flags, the system, the bit that only says that it is text, and those
    # that fill the last byte of the data
    assert unseen - (8 * (4 + 1 + 1) + 1) in range(8)


LENGTHS = {"3": "doesn't lead", "400": "doesn't lead", "99999999999": "max_record_bytes", "x": "is 'x'", None: "is ''"}


@each("length, reason", LENGTHS.items())
def test_a_wrong_length_costs_one_record(tmp_path, length, reason):
    data = record(b"One page.") + record(b"Its length is wrong.", Content_Length=length) + record(b"Next.") * 3
    kept, stats = read_bytes("wet", tmp_path / "a", data)
    assert [page.text for page in kept] == ["One page."] + ["Next."] * 3
    assert flat(stats.counters) == {"read": 5, "damaged": 1}
    position, why = stats.damage[0]
    assert position == f"record 1 at byte {len(record(b'One page.'))} of the content"
    assert reason in why


def test_bytes_between_records_are_noted(tmp_path):
    (tmp_path / "a").write_bytes(record(b"a") + b"<html>\n" + record(b"b") + b"more\n")
    kept, stats, damage = read_until_damage("wet", tmp_path / "a")
    assert [page.text for page in kept] == ["a", "b"]
    assert stats.damage[0][0].startswith("7 bytes before record 1 at byte ")
    assert damage.position == "the last 5 bytes"


PAGE = "<html><head><title>A  café</title></head><body><p>Größe and naïve cafés.</p></body></html>"
HTML = "Content-Type: text/html; charset=utf-8"


def response(body: bytes, *headers: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in (status, *headers))
    return record(head.encode() + b"\r\n" + body, WARC_Type="response")


def read_all(folder: Path, *responses: bytes, **options):
    return read_bytes("warc", folder / "a", b"".join(responses), **options)


def test_main_text_of_a_genuine_page():
    """It has the article's sentences, as its WET file does, but not the menus, which the WET file has too."""
    [page], _ = read("warc", DATA / "whirlwind.warc.gz")
    [wet], _ = read("wet", DATA / "whirlwind.warc.wet.gz")
    assert (wet.url, wet.language) == ("https://an.wikipedia.org/wiki/Escopete", "spa")
    assert len(wet.text.encode()) == 4456  # its Content-Length
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
    assert flat(stats.counters) == {"read": 1}


def paragraph(text: bytes, head: bytes = b"") -> bytes:
    return b"<html><head>%b<title>t</title></head><body><p>%b</p></body></html>" % (head, text)


def in_meta(label: str) -> bytes:
    return f'<meta http-equiv="Content-Type" content="text/html; charset={label}">'.encode()


JAPANESE = "会社の概要です。①会社名：㈱テスト商事 ②所在地：東京都 ℡03-0000-0000 №5 髙橋"
IN_SHIFT_JIS = (
    "89ef8ed082cc8a54977682c582b78142 8740 89ef8ed096bc8146 878a 8365835883678fa48e96 20 8741 8f8a8ddd926e8146938c8b9e"
    "9373 20 8784 30332d303030302d30303030 20 8782 3520 eee0 8bb4"
)
CHINESE = "這是一個網頁，裏面有恒生銀行與化粧品，嫺熟的人用墻。"
IN_BIG5 = (
    "b36fac4fa440add3baf4adb6a141 f9d8 adb1a6b3 f9da a5cdbbc8a6e6bb50a4c6 f9db ab7ea141 f9dc bcf4aabaa448a5ce f9d9 a143"
)
ENGLISH = "Plain English text and more words"
KOREAN = "한국어 문장이 있습니다. 똠방각하. " * 10
HEBREW = "זהו דף אינטרנט בעברית " * 10


@each(
    "text, body, label",
    [
        (JAPANESE, paragraph(bytes.fromhex(IN_SHIFT_JIS), in_meta("Shift_JIS")), ""),
        (CHINESE, paragraph(bytes.fromhex(IN_BIG5), in_meta("big5")), ""),
        *(
            (text, paragraph(text.encode(), in_meta(label)), "")
            for text in (ENGLISH, f"{ENGLISH}x")  # an odd and an even number of bytes
            for label in ("unicode", "utf-16")
        ),
        # the bytes of a page whose header says UTF-16
        (ENGLISH, paragraph(ENGLISH.encode()), "utf-16"),
        ("Большой.", paragraph("Большой.".encode("cp1251"), in_meta("windows-1251")), "utf-16"),
        (JAPANESE, paragraph(JAPANESE.encode()).decode().encode("utf-16-le"), "utf-16"),
        (JAPANESE, paragraph(JAPANESE.encode()).decode().encode("utf-16-be"), "unicode"),
        (JAPANESE, ('<?xml version="1.0"?>' + paragraph(JAPANESE.encode()).decode()).encode("utf-16-be"), ""),
        # the header comes first, then <meta>, wherever it is in the head, then <?xml
        ("Größe", paragraph("Größe".encode("cp1252"), in_meta("koi8-r")), "latin1"),
        ("Größe", b'<?xml version="1.0" encoding="koi8-r"?>' + paragraph("Größe".encode("cp1252"), in_meta("l1")), ""),
        ("Größe", paragraph("Größe".encode("iso8859-15"), b"<style>" + b" " * 2000 + b"</style>" + in_meta("l9")), ""),
        ("Größe", paragraph("Größe".encode("cp1252"), b"<!-- <meta charset=koi8-r> --><meta charset='latin1'/>"), ""),
        ("Größe", paragraph("Größe".encode("cp1252"), b"<meta charset=bogus><meta name=a charset = latin1 >"), ""),
        ("ý", paragraph(b"\xfd", b"<meta charset=x-user-defined>"), ""),
        # a wrong label: the page is UTF-8, or nearly nothing can be decoded
        ("Это Россия.", paragraph("Это Россия.".encode()), "iso-8859-1"),
        ("Größe", paragraph("Größe".encode("cp1252"), in_meta("latin1")), "utf-8"),
        (KOREAN, paragraph(KOREAN.encode("cp949")), "utf-8"),
        (KOREAN, paragraph(KOREAN.encode("cp949")), ""),
        # a right label, and a byte that no character has
        (f"{HEBREW}\x81.", paragraph(f"{HEBREW}".encode("cp1255") + b"\x81."), "windows-1255"),
    ],
)
def test_pages_are_decoded_as_browsers_do(tmp_path, text, body, label):
    [page], stats = read_all(tmp_path, response(body, f"Content-Type: text/html{label and '; charset='}{label}"))
    assert page.text.split() == text.split()
    assert flat(stats.counters) == {"read": 1}


@each("position", ["header", "meta", "xml"])
def test_all_labels_of_the_encoding_standard(tmp_path, position):
    """UTF-16 in a page whose tags are ASCII is UTF-8, and what the standard replaces can't be read."""
    pages, expected = [], []
    for row in encodings():
        name, text, data = row["name"], row["text"], row["bytes"]
        if name.startswith("utf-16"):
            text, data = "é中", "é中".encode().hex()
        if name == "x-user-defined" and position == "meta":
            text = bytes.fromhex(data).decode("cp1252")
        for label in row["labels"].split():
            body = paragraph(b"hanzi" if name == "replacement" else bytes.fromhex(data))
            if position == "meta":
                body = body.replace(b"<head>", f'<head><meta charset=" {label.upper()} ">'.encode())
            if position == "xml":
                body = f'<?xml version="1.0" encoding="{label}"?>'.encode() + body
            in_header = f"; charset={label}" if position == "header" else ""
            pages.append(response(body, f"Content-Type: text/html{in_header}"))
            expected.append((label, text))
    kept, stats = read_all(tmp_path, *pages)
    found = {page.ordinal: page.text.strip() for page in kept}
    replaced = [number for number, (_, text) in enumerate(expected) if text == "-"]
    wanted = {number: expected[number] for number in range(len(expected)) if number not in replaced}
    assert {number: (expected[number][0], text) for number, text in found.items()} == wanted
    assert flat(stats.counters) == {"read": 228, "undecodable": 6, "no_content": 6}
    assert len(replaced) == 6


SJIS, UTF_8 = (paragraph("① 文章".encode(codec)) for codec in ("cp932", "utf-8"))


@each(
    "headers, body, is_html",
    [
        (["Content-Type: text/html, text/html; charset=shift_jis"], SJIS, True),
        (["Content-Type: text/html; charset=shift_jis, text/html"], SJIS, True),
        (["Content-Type: text/html", 'Content-Type: TEXT/HTML; a="b,c"; Charset="Shift_JIS"'], SJIS, True),
        (["Content-Type: text/plain, text/html;charset=sjis, */*"], SJIS, True),
        (["Content-Type: text/html; charset=shift_jis, text/plain"], SJIS, False),
        *(([f"Content-Type: {value}"], UTF_8, True) for value in ("", " ", "html", "text/html charset=koi8-r", ", ;")),
        ([], UTF_8, True),
        (["Content-Type: image/png"], UTF_8, False),
    ],
)
def test_several_content_types_and_none(tmp_path, headers, body, is_html):
    kept, stats = read_all(tmp_path, response(body, *headers))
    assert [page.text.strip() for page in kept] == ["① 文章"] * is_html
    assert flat(stats.counters) == {"read": 1, **({} if is_html else {"not_html": 1})}


def test_a_body_without_a_content_type_is_html_if_it_begins_so(tmp_path):
    html = paragraph(ENGLISH.encode())
    bodies = [html, b"\n " + html, b"\xef\xbb\xbf" + html, html.decode().encode("utf-16")]
    encoded = response(gzip.compress(html), "Content-Type:", "Content-Encoding: gzip")
    other = [response(body, "Content-Type:") for body in (b"{}", b"%PDF-1.4", gzip.compress(html)[:-9], b"")]
    kept, stats = read_all(tmp_path, *(response(body, "Content-Type:") for body in bodies), encoded, *other)
    assert [page.text.strip() for page in kept] == [ENGLISH] * 5
    assert flat(stats.counters) == {"read": 9, "not_html": 4}


def test_the_character_set_may_stand_in_the_page_and_one_bad_byte_costs_one_character(tmp_path):
    html = '<html><head><meta charset="windows-1251"></head><body><p>Большой.</p></body></html>'
    bad = PAGE.encode().replace(b"and", b"\x81\xff")
    kept, stats = read_all(tmp_path, response(html.encode("cp1251"), "Content-Type: text/html"), response(bad, HTML))
    assert [page.text.strip() for page in kept] == ["Большой.", "Größe \ufffd\ufffd naïve cafés."]
    assert flat(stats.counters) == {"read": 2, "undecodable": 1}


def chunked(body: bytes) -> bytes:
    pieces = [body[at : at + 30] for at in range(0, len(body), 30)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


ENCODINGS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate, raw": lambda body: zlib.compress(body)[2:-4],
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
    assert flat(stats.counters) == {"read": 2}


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
    assert flat(stats.counters) == {"read": 3, "damaged": 2}
    assert [position.partition(" at")[0] for position, _ in stats.damage] == ["record 0", "record 1"]


def test_a_small_body_that_unpacks_to_a_huge_one_is_damage(tmp_path):
    huge = gzip.compress(bytes(1 << 22))
    _, stats = read_all(tmp_path, response(huge, HTML), max_record_bytes=1 << 20)
    assert flat(stats.counters) == {"read": 1, "damaged": 1}


def test_dropped_records_are_counted(tmp_path):
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
    assert flat(stats.counters) == {"read": 6, "not_200": 3, "not_html": 2, "no_content": 1}
