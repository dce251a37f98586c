"""C4, JSON Lines, plain text, WikiExtractor output and pairs: which records are kept, counted or damaged."""

import gzip
import itertools
import json
import random

import pytest
from pydantic import ValidationError

from data_pipeline.base.errors import DamagedInput
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import Record
from tests.support.reading import flat, read, read_bytes, read_until_damage
from tests.support.tables import each

OF_LINES, PARAGRAPHS = {"sample_by": "line"}, {"sample_by": "paragraph"}


def test_every_format_has_options_that_refuse_unknown_names():
    for known in FORMATS.values():
        with pytest.raises(ValidationError):
            known.options(nonsense=1)


@each("source", ["c4", "jsonl", "text", "pairs"])
def test_a_line_longer_than_the_cap_is_damage_and_the_next_is_read(tmp_path, source):
    line = b"a\tb" if source in ("text", "pairs") else b'{"text": "a"}'
    long = line.replace(b"a", b"a" * 1_000_000)
    data, options = b"\n".join([line, long, line]), OF_LINES if source == "text" else {}
    kept, stats = read_bytes(source, tmp_path / "a", data, max_record_bytes=100, **options)
    assert [record.ordinal for record in kept] == [0, 2]
    assert flat(stats.counters) == {"read": 3, "damaged": 1}
    assert stats.damage == [("line 2", "longer than max_record_bytes, 100")]


@each("length, kept, end", [(n, n == 10, end) for n in (10, 11, 12, 13) for end in (b"\n", b"\r\n", b"")])
def test_the_cap_is_exact(tmp_path, length, kept, end):
    found, _ = read_bytes("text", tmp_path / "a", b"x" * length + end, sample_by="line", max_record_bytes=10)
    assert len(found) == kept


# --- C4 and JSON Lines


NO_RECORDS = [
    *(b'{"text": "cut o', b'{"url": "https://a.org/"}', b'{"text": null}', b"[]", b'{"text": "\\ud800"}', b"\xff"),
    *(b"[" * 100_000, b'{"text": "a", "url": 3}', b'{"text": "\xff"}', b"1" * 5000),
]


@each("source, line", itertools.product(["c4", "jsonl"], NO_RECORDS))
def test_a_line_that_is_no_record_is_damage_at_its_number(tmp_path, source, line):
    kept, stats = read_bytes(source, tmp_path / "a", b'{"text": "a"}\n' + line + b'\n\n{"text": " "}\n{"text": "b"}')
    assert kept == [Record(0, "a"), Record(4, "b")]
    assert flat(stats.counters) == {"read": 4, "damaged": 1, "empty": 1}
    assert stats.damage[0][0] == "line 2"


@each("source", ["c4", "jsonl", "pairs"])
def test_objects_inside_one_another_at_any_depth_are_damage(tmp_path, source):
    """Up to the depth that json reads, which in Python 3.12 is more than functions may recurse into."""
    lines = [b'{"a": ' * depth + b'"b"' + b"}" * depth for depth in range(900, 1600, 7)]
    kept, stats = read_bytes(source, tmp_path / "a", b"\n".join(lines))
    assert kept == []
    assert flat(stats.counters) == {"read": len(lines), "damaged": len(lines)}


# --- what is read from a whole file


def texts(*found: str) -> list[Record]:
    return [Record(number, text) for number, text in enumerate(found)]


def doc(title: str, text: str) -> bytes:
    return f'<doc id="1" url="u" title="{title}">\n{text}\n</doc>\n'.encode()


def three(second: str | None) -> list[Record]:
    """Sequences with the titles 1, 2 and 3; `second` is None: it is damaged."""
    found = [Record(number, text or "", title=str(number + 1)) for number, text in enumerate(("ACGT", second, "ACGT"))]
    return [record for record in found if record.text]


def lines(*objects: object) -> bytes:
    return "\n".join(map(json.dumps, objects)).encode()


NOON, HOUSE = "2019-04-25T12:57:54Z", "translate English to German: "
TEXT = b"\xef\xbb\xbfOne,\r\ntwo.\r\n\r\n \r\nna\xefve.\n"
WHOLE = "One,\r\ntwo.\r\n\r\n \r\nnaïve.\n"
LONG = b"abcd\n" * 3 + b"\nab\n\n" + b"x" * 99 + b"\n\nlast"
ARTICLES = doc("A &amp; B", "A &amp; B\n\nFirst.\n\nSecond: 1 &lt; 2.\n") + doc('The "B" of C', "No title.\n<doc\n")
CUT = doc("C", "Text").removesuffix(b"</doc>\n")
STRAY = doc("A", "a") + CUT + doc("B", "b") + b"stray\nlines\n" + doc("D", "d" * 300) + CUT
NAMED = {"content": "A", "meta": {"url": "u", "lang": "en"}, "name": "N", "timestamp": 1234567890}
NAMES = {"text": "content", "url": "meta.url", "title": "name", "language": "meta.lang", "timestamp": ""}
UNPAIRED = [{"inputs": "a", "targets": "b"}, {"inputs": "a"}, {"inputs": "c", "targets": " "}]
ANSWERS = [
    {"inputs": "a", "targets": ["b", "c"], "choices": ["b", "d"]},
    *({"inputs": "a", **other} for other in ({"targets": []}, {"targets": "b", "choices": "bd"}, {"targets": [1]})),
]
LOST = {"read": 1, "damaged": 1}
HEADER = "sp|P1|A_HUMAN Some protein OS=Homo sapiens"
PROTEINS = f"\n>{HEADER}\r\nMKTAY\r\nIAKq*\r\n\r\n>P2\n> P3  a\tb\nM K V\n\n-x.".encode()
HEADED = [Record(0, "MKTAYIAKq*", title=HEADER), Record(2, "MKV-x.", title="P3  a\tb")]


@each(
    "source, options, data, kept, counters, damaged",
    [
        # C4 in its variants
        (
            *("c4", {}, lines({"text": "Größe\n2", "timestamp": NOON, "url": "https://a.org/"})),
            *([Record(0, "Größe\n2", "https://a.org/", timestamp=NOON)], {"read": 1}, []),
        ),
        *(
            ("c4", {}, lines({"text": "a", key: time}), [Record(0, "a", timestamp=NOON)], {"read": 1}, [])
            for key, time in (("timestamp", "2019-04-25 12:57:54"), ("date", "2019-04-25T12:57:54.000Z"))
        ),
        *(
            ("c4", {}, lines({"text": "a", "date": given}), [Record(0, "a", timestamp=kept)], {"read": 1}, [])
            for given, kept in (
                ("2019-04-25 12:57:54.250", "2019-04-25T12:57:54.25Z"),
                ("2019-04-25 12:57:54+02:00", "2019-04-25T12:57:54+02:00"),
            )
        ),
        ("c4", {}, lines({"text": "a", "url": None, "more": [1]}), texts("a"), {"read": 1}, []),
        # keys under the names of the options
        ("jsonl", NAMES, lines(NAMED), [Record(0, "A", "u", "N", "", "en")], {"read": 1}, []),
        # plain text
        ("text", OF_LINES, TEXT, texts("One,", "two."), {"read": 3, "damaged": 1}, ["line 5"]),
        ("text", PARAGRAPHS, TEXT, texts("One,\ntwo."), {"read": 2, "damaged": 1}, ["line 5"]),
        ("text", {}, TEXT, [], LOST, ["the whole file"]),
        *(
            ("text", {"encoding": name}, TEXT[3:].decode("cp1252").encode(name), texts(WHOLE), {"read": 1}, [])
            for name in ("cp1252", "utf-16", "utf-16-be", "utf-32")
        ),
        *(
            (source, options | {"encoding": "gb18030"}, text.encode("gb18030"), [record], {"read": 1}, [])
            for source, options, text, record in (
                ("csv", {}, "text,url\n书,u\n", Record(0, "书", "u")),
                ("pairs", {}, "书\tbook\n", Record(0, "书", target="book")),
                ("pairs", {}, '{"inputs": "书", "targets": "book"}', Record(0, "书", target="book")),
                ("wikiextractor", {}, doc("书", "书\n\n文。\n").decode(), Record(0, "文。", "u", "书")),
                ("jsonl", {}, '{"text": "书"}', Record(0, "书")),
            )
        ),
        (
            *("text", PARAGRAPHS | {"max_record_bytes": 10}, LONG),
            *([Record(1, "ab"), Record(3, "last")], {"read": 4, "damaged": 2}, ["line 1", "line 7"]),
        ),
        ("text", {"max_record_bytes": 10}, LONG, [], LOST, ["the whole file"]),
        ("text", {}, "Größe".encode("utf-16"), [], LOST, ["the whole file"]),
        # pieces of five bytes: behind lines, words or characters; what is blank is no document
        *(
            ("text", {"max_document_bytes": 5}, "".join(whole).encode(), texts(*pieces), {"read": len(pieces)}, [])
            for whole, pieces in (
                ("a\nbb\nccc\ndddd\n", ["a\nbb\n", "ccc\n", "dddd\n"]),
                ("a bb ccc dddd", ["a bb ", "ccc ", "dddd"]),
                ("ééééé", ["éé", "éé", "é"]),
                ("aa\n\nb\nc\n\n\n\n\n\n\nd", ["aa\n\n", "b\nc\n\n", "d"]),
            )
        ),
        # of ten: at a blank line, also one of Windows
        (
            *("text", {"max_document_bytes": 10}, b"a\r\n \r\nb\r\nccc"),
            *(texts("a\r\n \r\n", "b\r\nccc"), {"read": 2}, []),
        ),
        # WikiExtractor: articles lose the title that is repeated and their escapes
        (
            *("wikiextractor", {}, ARTICLES + doc("D", "D\n")),
            [Record(0, "First.\n\nSecond: 1 < 2.", "u", "A & B"), Record(1, "No title.\n<doc", "u", 'The "B" of C')],
            *({"read": 3, "empty": 1}, []),
        ),
        *(
            ("wikiextractor", {}, data, [Record(0, "Text.", "u", "A")], {"read": 1}, [])
            for data in (
                doc("A", "Text.").replace(b" url=", b' revid="7" url='),
                lines({"id": "1", "revid": "7", "url": "u", "title": "A", "text": "Text."}),
            )
        ),
        # the same article in each form: version 2 writes the title into the text of --json, too
        *(
            ("wikiextractor", {}, data, [Record(0, "AT&T < A & B.", "u?a&b", "AT&T")], {"read": 1}, [])
            for data in (
                doc("AT&amp;T", "AT&amp;T\n\nAT&amp;T &lt; A &amp; B.\n").replace(b'"u"', b'"u?a&amp;b"'),
                lines({"url": "u?a&amp;b", "title": "AT&amp;T", "text": "AT&amp;T &lt; A &amp; B.\n"}),
                lines({"url": "u?a&amp;b", "title": "AT&amp;T", "text": "AT&amp;T\n\nAT&amp;T &lt; A &amp; B.\n"}),
            )
        ),
        ("wikiextractor", {}, lines({"title": "A", "text": "A\n\n"}), [], {"read": 1, "empty": 1}, []),
        # articles that are cut off, and stray lines
        (
            *("wikiextractor", {"max_record_bytes": 200}, STRAY),
            *([Record(0, "a", "u", "A"), Record(2, "b", "u", "B")], {"read": 6, "damaged": 4}),
            ["line 4", "line 9", "line 11", "line 14"],
        ),
        # pairs
        (
            *("pairs", {"prefix": HOUSE}, b"A house.\tEin Haus.\r\nno tab\na\tb\tc\n\tb\nna\xefve\tx\n"),
            [Record(0, HOUSE + "A house.", target="Ein Haus.")],
            *({"read": 5, "damaged": 3, "empty_input": 1}, ["line 2", "line 3", "line 5"]),
        ),
        ("pairs", {"layout": "tsv"}, b"{\t}\n", [Record(0, "{", target="}")], {"read": 1}, []),
        (
            *("pairs", {}, lines(*UNPAIRED), [Record(0, "a", target="b")]),
            *({"read": 3, "damaged": 1, "empty_target": 1}, ["line 2"]),
        ),
        (
            *("pairs", {"inputs": "to.en", "targets": "to.de"}, lines({"to": {"en": "a", "de": "b"}})),
            *([Record(0, "a", target="b")], {"read": 1}, []),
        ),
        # the first character that isn't white space tells objects from lines with a tab
        *(
            (source, {}, before + lines(pair), [Record(before.count(b"\n"), "a", **found)], {"read": 1}, [])
            for before in (b"\n", b" ", b"\t", b"\r\n \n", b"\n" * 200_000, b" " * 20_000)
            for source, pair, found in (
                ("pairs", {"inputs": "a", "targets": "b"}, {"target": "b"}),
                ("wikiextractor", {"text": "a", "url": "u"}, {"url": "u"}),
            )
        ),
        ("pairs", {}, b"\n\n a\tb\n", [Record(2, " a", target="b")], {"read": 1}, []),
        ("pairs", {}, b"\t\na\tb\n", [Record(1, "a", target="b")], {"read": 2, "empty_input": 1}, []),
        ("wikiextractor", {}, b"\n" + doc("A", "Text."), [Record(0, "Text.", "u", "A")], {"read": 1}, []),
        # sequences: line breaks and white space go, letter case stays by default; one without residues is dropped
        ("fasta", {}, PROTEINS, HEADED, {"read": 3, "empty": 1}, []),
        ("fasta", {"upper": True}, b">x\nacGT", [Record(0, "ACGT", title="x")], {"read": 1}, []),
        ("fasta", {}, b">only a header", [], {"read": 1, "empty": 1}, []),
        # the cap is for the residues of a sequence, in one line or in several
        *(
            ("fasta", {"max_record_bytes": 12}, b">1\nACGT\n>2\n" + long + b"\n>3\nAC\nGT", *kept)
            for long, kept in (
                (b"ACGT\nACGT\nACGT", (three("ACGT" * 3), {"read": 3}, [])),
                (b"ACGT\nACGT\nACGTA", (three(None), {"read": 3, "damaged": 1}, ["line 3"])),
                (b"ACGTACGTACGTA", (three(None), {"read": 3, "damaged": 1}, ["line 3"])),
            )
        ),
        *(
            ("fasta", {}, b">1\nACGT\n>2" + bad + b"\n>3\nACGT", three(None), {"read": 3, "damaged": 1}, ["line 3"])
            for bad in (b" na\xefve\nACGT", b"\nAC\xffGT", b"\nAC\0GT")
        ),
        # several right answers, and choices
        (
            *("pairs", {}, lines(*ANSWERS), [Record(0, "a", target="b", targets=["b", "c"], choices=["b", "d"])]),
            *({"read": 4, "damaged": 2, "empty_target": 1}, ["line 3", "line 4"]),
        ),
    ],
)
def test_records_of_a_file(tmp_path, source, options, data, kept, counters, damaged):
    found, stats = read_bytes(source, tmp_path / "a", data, **options)
    assert found == kept
    assert flat(stats.counters) == counters
    assert [position for position, _ in stats.damage] == damaged


# --- FASTA


@each("data, line", [(b"ACGT\n>1\nACGT", 1), (b"\n \n; 1\nACGT\n", 3), (b"@1\nACGT\n+\n>>>>\n", 1)])
def test_a_file_whose_first_line_is_no_header_is_no_fasta(tmp_path, data, line):
    """Nothing of it is read: a line of qualities in FASTQ may begin like a header."""
    (tmp_path / "a.fa").write_bytes(data)
    kept, stats, damage = read_until_damage("fasta", tmp_path / "a.fa")
    assert (kept, flat(stats.counters)) == ([], {})
    said = (str(tmp_path / "a.fa"), f"line {line}", "expected a header, a line that begins with >")
    assert (damage.path, damage.position, damage.reason) == said


@each("compress", [bytes, gzip.compress])
def test_a_sequence_of_a_million_residues_is_one_text(tmp_path, compress):
    residues = "".join(random.Random(0).choices("ACGTacgtN", k=1_000_000))
    wrapped = "\n".join(residues[start : start + 60] for start in range(0, len(residues), 60))
    kept, stats = read_bytes("fasta", tmp_path / "a.fna", compress(f">1\n{wrapped}\n>2\n{residues}".encode()))
    assert kept == [Record(0, residues, title="1"), Record(1, residues, title="2")]
    assert (flat(stats.counters), stats.damage) == ({"read": 2}, [])


def test_a_sequence_that_is_cut_off_is_not_kept(tmp_path):
    residues = [random.Random(number).choices("ACGT", k=10_000) for number in range(50)]
    stored = gzip.compress("".join(f">{number}\n{''.join(one)}\n" for number, one in enumerate(residues)).encode())
    (tmp_path / "a.fa.gz").write_bytes(stored[: len(stored) // 2])
    kept, _, damage = read_until_damage("fasta", tmp_path / "a.fa.gz")
    assert 0 < len(kept) < 50
    assert [record.text for record in kept] == ["".join(one) for one in residues[: len(kept)]]
    assert damage.position == f"byte {len(stored) // 2} of {len(stored) // 2}"


# --- encodings

GERMAN, CHINESE = "Die Größe der Straße ist schön, über Österreich. ", "我们今天去公园散步，天气很好。这是一本书。"
JAPANESE, KOREAN = "①これは日本語の文章です。②漢字もあります。", "이것은 한국어 문장입니다. 똠방각하도 있습니다."


@each(
    "text, encoding, looks_like",
    [
        *((GERMAN, "latin-1", "cp1252"), (CHINESE, "gb18030", "gb18030"), (GERMAN, "utf-16", "utf-16")),
        *((JAPANESE, "cp932", "cp932"), (KOREAN, "cp949", "cp949")),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_the_encoding_that_reads_it(tmp_path, text, encoding, looks_like):
    kept, stats = read_bytes("text", tmp_path / "a", text.encode(encoding))
    advice = f" set options: {{encoding: {looks_like}}}"
    assert (kept, stats.counters.dropped_documents["damaged"], stats.damage[0].reason.endswith(advice)) == ([], 1, True)
    assert [record.text for record in read("text", tmp_path / "a", encoding=looks_like)[0]] == [text]


PAGES = [f"{GERMAN}{number}" for number in range(25)]
IN_WIDE = {  # 25 documents in each format, and what its records have
    "jsonl": (lines(*({"text": page} for page in PAGES)), {}),
    "csv": (("text\n" + "\n".join(PAGES).replace(",", ";")).encode(), {}),
    "pairs": ("\n".join(f"{page}\tx" for page in PAGES).encode(), {}),
    "text": ("\n".join(PAGES).encode(), OF_LINES),
    "wikiextractor": (b"".join(doc("A", page) for page in PAGES), {}),
    "fasta": ("".join(f">{page}\nMKT\n" for page in PAGES).encode(), {}),
}


@each("source, encoding", itertools.product(IN_WIDE, ["utf-16", "utf-16-be", "utf-32", "utf-32-be"]))
def test_wide_text_is_refused_as_a_whole_with_the_option_that_reads_it(tmp_path, source, encoding):
    """Python's "utf-16" and "utf-32" write a byte order mark; in the others the first bytes say which they are."""
    content, options = IN_WIDE[source]
    (tmp_path / "a").write_bytes(content.decode().encode(encoding))
    try:
        kept, stats = read(source, tmp_path / "a", **options)
        reason = stats.damage[0].reason
    except DamagedInput as damage:
        kept, reason = [], damage.reason
    assert kept == []
    if source != "wikiextractor":  # no article begins
        assert reason.endswith(f"for {encoding.upper()} set options: {{encoding: {encoding}}}")
    kept, stats = read(source, tmp_path / "a", encoding=encoding, **options)
    assert (len(kept), stats.damage) == (25, [])


MARK, HOUSES = b"\xef\xbb\xbf", lines({"inputs": "a", "targets": "b"}, {"inputs": "c", "targets": "d"})


@each(
    "source, options, data",
    [
        ("c4", {}, lines({"text": "a"}, {"text": "b"})),
        ("jsonl", {}, lines({"text": "a"}, {"text": "b"})),
        ("csv", {}, b"text\na\n"),
        ("csv", {}, b'"text",url\na,u\n'),
        ("pairs", {}, b"a\tb\nc\td\n"),
        *(("pairs", {"layout": layout}, HOUSES) for layout in ("auto", "jsonl")),
        *(("text", {"sample_by": unit}, b"a\n\nb\n") for unit in ("document", "paragraph", "line")),
        ("wikiextractor", {}, doc("A", "Text.")),
        ("fasta", {}, b">1\nACGT\n"),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path, source, options, data):
    """Also where a decompressed stream gives a byte at a time, and in an encoding that keeps it."""
    kept, stats = read_bytes(source, tmp_path / "a", data, **options)
    assert kept
    assert "\ufeff" not in kept[0].text
    bytewise = b"".join(gzip.compress((MARK + data)[n : n + 1]) for n in range(len(MARK + data)))
    for marked, how in (
        (MARK + data, {}),
        (bytewise, {}),
        *[((MARK + data).decode().encode("utf-16-le"), {"encoding": "utf-16-le"})] * (source != "c4"),
    ):
        found = read_bytes(source, tmp_path / "a", marked, **options, **how)
        assert (found[0], found[1].counters, found[1].damage) == (kept, stats.counters, stats.damage)


def test_bytes_that_are_not_in_the_encoding_end_the_file(tmp_path):
    (tmp_path / "a").write_bytes("Größe".encode("utf-16") + b"\0")
    damage = read_until_damage("text", tmp_path / "a", encoding="utf-16")[2]
    assert (damage.position, damage.reason[:13]) == ("bytes 13 to 13 of the content", "isn't utf-16:")
    (tmp_path / "a").write_bytes("日本①".encode("cp932"))
    damage = read_until_damage("text", tmp_path / "a", encoding="Shift_JIS")[2]
    assert damage.reason.startswith("isn't Shift_JIS: ")
    assert damage.reason.endswith("; cp932 has more characters")
    with pytest.raises(ValueError, match="Python has no encoding 'base64'"):
        FORMATS["text"].options(encoding="base64")
