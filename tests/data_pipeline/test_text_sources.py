"""C4, JSON Lines, plain text, Parquet, WikiExtractor output and pairs: which records are kept, counted or damaged."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from data_pipeline.foundation.errors import UserError
from data_pipeline.sources import OPTIONS, READERS, Record
from tests.data_pipeline.reading import read, read_until_damage

DATA = Path(__file__).parents[1] / "data" / "c4"
OF_LINES = {"text": {"sample_by": "line"}}


def read_bytes(source: str, path: Path, data: bytes, **options):
    path.write_bytes(data)
    return read(source, path, **options)


def test_every_format_has_options_that_refuse_unknown_names():
    assert READERS.keys() == OPTIONS.keys()
    for options in OPTIONS.values():
        with pytest.raises(ValidationError):
            options(nonsense=1)


@pytest.mark.parametrize("source", ["c4", "jsonl", "text", "pairs", "wikiextractor"])
def test_a_file_that_is_cut_off_yields_what_precedes_the_cut(tmp_path, source):
    line = b"Input.\tTarget.\n" if source in ("text", "pairs") else b'{"text": "A", "url": "u"}\n'
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(line) * 3 + gzip.compress(line)[:-1])
    kept, _, damage = read_until_damage(source, path, **OF_LINES.get(source, {}))
    assert len(kept) >= 3
    assert "ends before its end marker" in damage.reason


@pytest.mark.parametrize("source", ["c4", "jsonl", "text", "pairs"])
def test_a_line_longer_than_the_cap_is_damage_and_the_next_is_read(tmp_path, source):
    line = b"a\tb" if source in ("text", "pairs") else b'{"text": "a"}'
    long = line.replace(b"a", b"a" * 1_000_000)
    data = b"\n".join([line, long, line])
    kept, intake = read_bytes(source, tmp_path / "a", data, max_record_bytes=100, **OF_LINES.get(source, {}))
    assert [record.ordinal for record in kept] == [0, 2]
    assert intake.counters == {"read": 3, "damaged": 1}
    assert intake.damage == [("line 2", "longer than max_record_bytes, 100")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_cap_is_exact(tmp_path, end):
    for length, kept in ((10, 1), (11, 0), (12, 0), (13, 0)):
        found, _ = read_bytes("text", tmp_path / "a", b"x" * length + end, sample_by="line", max_record_bytes=10)
        assert len(found) == kept


# --- C4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"text": "Größe\n2", "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.org/"},
            Record(0, "Größe\n2", "https://a.org/", timestamp="2019-04-25T12:57:54Z"),
        ),
        ({"text": "a", "timestamp": "2019-04-25 12:57:54"}, Record(0, "a", timestamp="2019-04-25T12:57:54Z")),
        ({"text": "a", "date": "2019-04-25T12:57:54.000Z"}, Record(0, "a", timestamp="2019-04-25T12:57:54Z")),
        ({"text": "a", "url": None, "more": [1]}, Record(0, "a")),
    ],
)
def test_c4_in_its_variants(tmp_path, line, expected):
    kept, intake = read_bytes("c4", tmp_path / "a", json.dumps(line).encode() + b"\n")
    assert kept == [expected]
    assert intake.counters == {"read": 1}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_real_records_with_a_date(number):
    path = DATA / f"olmo-c4-sample.0{number}.json.gz"
    kept, intake = read("c4", path)
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert intake.counters == {"read": 10}
    assert [(record.text, record.url) for record in kept] == [(line["text"], line["url"]) for line in lines]
    assert all(record.timestamp.startswith(line["date"][:10] + "T") for record, line in zip(kept, lines, strict=True))


@pytest.mark.parametrize("source", ["c4", "jsonl"])
@pytest.mark.parametrize(
    "line",
    [
        *(b'{"text": "cut o', b'{"url": "https://a.org/"}', b'{"text": null}', b"[]", b'{"text": "\\ud800"}', b"\xff"),
        *(b"[" * 100_000, b'{"text": "a", "url": 3}', b'{"text": "\xff"}', b"1" * 5000),
    ],
)
def test_a_line_that_is_no_record_is_damage_at_its_number(tmp_path, source, line):
    kept, intake = read_bytes(source, tmp_path / "a", b'{"text": "a"}\n' + line + b'\n\n{"text": " "}\n{"text": "b"}')
    assert kept == [Record(0, "a"), Record(4, "b")]
    assert intake.counters == {"read": 4, "damaged": 1, "empty": 1}
    assert intake.damage[0][0] == "line 2"


# --- JSON Lines


def test_jsonl_keys_have_the_names_of_the_options(tmp_path):
    line = {"content": "A", "meta": {"url": "u", "lang": "en"}, "name": "N", "timestamp": 1234567890}
    names = {"text": "content", "url": "meta.url", "title": "name", "language": "meta.lang", "timestamp": ""}
    kept, _ = read_bytes("jsonl", tmp_path / "a", json.dumps(line).encode(), **names)
    assert kept == [Record(0, "A", "u", "N", "", "en")]


# --- plain text

TEXT = b"\xef\xbb\xbfOne,\r\ntwo.\r\n\r\n \r\nna\xefve.\n"


@pytest.mark.parametrize(
    ("sample_by", "texts"),
    [
        ("line", ["One,", "two.", "na\ufffdve."]),
        ("paragraph", ["One,\ntwo.", "na\ufffdve."]),
        ("document", ["One,\r\ntwo.\r\n\r\n \r\nna\ufffdve.\n"]),
    ],
)
def test_plain_text(tmp_path, sample_by, texts):
    kept, intake = read_bytes("text", tmp_path / "a", TEXT, sample_by=sample_by)
    assert [record.text for record in kept] == texts
    assert [record.ordinal for record in kept] == list(range(len(texts)))
    assert intake.counters == {"read": len(texts), "undecodable": 1}


def test_paragraphs_and_documents_have_the_cap_too(tmp_path):
    data = b"abcd\n" * 3 + b"\nab\n\n" + b"x" * 99 + b"\n\nlast"
    kept, intake = read_bytes("text", tmp_path / "a", data, sample_by="paragraph", max_record_bytes=10)
    assert [(record.ordinal, record.text) for record in kept] == [(1, "ab"), (3, "last")]
    assert [position for position, _ in intake.damage] == ["line 1", "line 7"]
    kept, intake = read_bytes("text", tmp_path / "a", data, sample_by="document", max_record_bytes=10)
    assert (kept, intake.counters) == ([], {"read": 1, "damaged": 1})


def test_a_file_is_one_document_by_default_and_a_large_one_is_cut_at_blank_lines(tmp_path):
    verses = [f"{number} In the beginning\r\nwas the word {'é' * (number % 7)}.\r\n \r\n" for number in range(300)]
    data = "".join(verses).encode()
    assert [record.text for record in read_bytes("text", tmp_path / "a", data)[0]] == [data.decode()]
    kept, intake = read_bytes("text", tmp_path / "a", data, max_document_bytes=1000)
    assert "".join(record.text for record in kept) == data.decode()  # nothing is lost, moved or changed
    assert [record.ordinal for record in kept] == list(range(len(kept)))
    assert all(record.text.endswith("\r\n \r\n") for record in kept)
    sizes = [len(record.text.encode()) for record in kept]
    assert max(sizes) <= 1000
    assert min(sizes[:-1]) > 1000 - max(len(verse.encode()) for verse in verses)  # no piece ends before it must
    assert intake.counters == {"read": len(kept)}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a\nbb\nccc\ndddd\n", ["a\nbb\n", "ccc\n", "dddd\n"]),  # no blank line: behind lines
        ("a bb ccc dddd", ["a bb ", "ccc ", "dddd"]),  # one line: behind words
        ("ééééé", ["éé", "éé", "é"]),  # one word of ten bytes: between characters
        ("aa\n\nb\nc\n\n\n\n\n\n\nd", ["aa\n\n", "b\nc\n\n", "d"]),  # what is blank is no document
    ],
)
def test_where_there_is_no_blank_line_a_piece_ends_behind_a_line_a_word_or_a_character(tmp_path, text, pieces):
    kept, _ = read_bytes("text", tmp_path / "a", text.encode(), max_document_bytes=5)
    assert [record.text for record in kept] == pieces


def test_what_is_no_utf8_text_is_damage(tmp_path):
    kept, intake = read_bytes("text", tmp_path / "a", "Größe".encode("utf-16"), sample_by="document")
    assert (kept, intake.counters) == ([], {"read": 1, "damaged": 1})


# --- Parquet


def table(path: Path, columns: dict, **options) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_parquet_rows_become_records(tmp_path):
    times = pa.array([0, None, 0, 0], pa.timestamp("s"))
    columns = {"text": ["a", None, " ", "b"], "url": ["u", "v", "w", None], "timestamp": times, "other": [1, 2, 3, 4]}
    kept, intake = read("parquet", table(tmp_path / "a", columns, row_group_size=2))
    assert kept == [
        Record(0, "a", "u", timestamp="1970-01-01T00:00:00"),
        Record(3, "b", timestamp="1970-01-01T00:00:00"),
    ]
    assert intake.counters == {"read": 4, "empty": 2}


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_parquet_strings_of_any_kind_under_any_name(tmp_path, kind):
    column = pa.array(["a", "b", "a"]).cast(kind) if not pa.types.is_dictionary(kind) else pa.array("aba").cast(kind)
    if pa.types.is_dictionary(kind):
        column = pa.array(["a", "b", "a"]).dictionary_encode()
    kept, _ = read("parquet", table(tmp_path / "a", {"content": column}), text="content")
    assert [record.text for record in kept] == ["a", "b", "a"]


def test_columns_that_are_not_there_are_the_users_to_mend(tmp_path):
    path = table(tmp_path / "a", {"text": ["a"], "url": [1]})
    assert len(read("parquet", path)[0]) == 1
    with pytest.raises(UserError, match="no column 'content' for the text; there are text, url"):
        read("parquet", path, text="content")
    with pytest.raises(UserError, match="no column 'name' for the title"):
        read("parquet", path, title="name")
    with pytest.raises(UserError, match="column 'url' is int64, expected strings"):
        read("parquet", path, text="url")


def test_a_parquet_file_without_its_footer_is_damage(tmp_path):
    path = table(tmp_path / "a", {"text": ["a" * 100] * 10})
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        assert read_until_damage("parquet", path)[2].position == "its footer"


def test_a_damaged_row_group_costs_its_rows_alone(tmp_path):
    texts = [f"{number} " * 50 for number in range(30)]
    columns = {"text": texts}
    path = table(tmp_path / "a", columns, row_group_size=10, write_page_checksum=True, use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset + group.total_compressed_size - 20] ^= 0xFF  # in the text, behind the page's header
    kept, intake = read_bytes("parquet", path, bytes(data))
    assert [(record.ordinal, record.text) for record in kept] == [
        (number, texts[number]) for number in range(30) if not 10 <= number < 20
    ]
    assert intake.counters == {"read": 30, "damaged": 10}
    assert intake.damage[0][0] == "rows 10 to 19, row group 1"


def test_a_row_that_is_not_utf8_is_damage(tmp_path):
    column = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    kept, intake = read("parquet", table(tmp_path / "a", {"text": column}))
    assert [record.ordinal for record in kept] == [0, 2]
    assert intake.counters == {"read": 3, "damaged": 1}
    assert intake.damage[0][0] == "row 1"


# --- WikiExtractor


def doc(title: str, text: str, number: int = 1) -> bytes:
    return f'<doc id="{number}" url="https://a.org/?curid={number}" title="{title}">\n{text}\n</doc>\n'.encode()


def test_articles_lose_the_title_that_is_repeated_and_their_escapes(tmp_path):
    data = doc("A &amp; B", "A &amp; B\n\nFirst.\n\nSecond: 1 &lt; 2.\n") + doc('The "B" of C', "No title.\n<doc\n")
    kept, intake = read_bytes("wikiextractor", tmp_path / "a", data + doc("D", "D\n"))
    assert kept == [
        Record(0, "First.\n\nSecond: 1 < 2.", "https://a.org/?curid=1", "A & B"),
        Record(1, "No title.\n<doc", "https://a.org/?curid=1", 'The "B" of C'),
    ]
    assert intake.counters == {"read": 3, "empty": 1}


def test_revision_ids_and_json_output(tmp_path):
    data = doc("A", "Text.").replace(b" url=", b' revid="7" url=')
    assert read_bytes("wikiextractor", tmp_path / "a", data)[0][0].title == "A"
    line = {"id": "1", "revid": "7", "url": "u", "title": "A", "text": "Text."}
    assert read_bytes("wikiextractor", tmp_path / "a", json.dumps(line).encode())[0] == [Record(0, "Text.", "u", "A")]


def test_articles_that_are_cut_off_and_stray_lines_are_damage(tmp_path):
    cut = doc("C", "Text").removesuffix(b"</doc>\n")
    data = doc("A", "a") + cut + doc("B", "b") + b"stray\nlines\n" + doc("D", "d" * 300) + cut
    kept, intake = read_bytes("wikiextractor", tmp_path / "a", data, max_record_bytes=200)
    assert [record.text for record in kept] == ["a", "b"]
    assert [position for position, _ in intake.damage] == ["line 4", "line 9", "line 11", "line 14"]
    assert intake.counters == {"read": 6, "damaged": 4}


# --- pairs


def test_tab_separated_pairs_with_a_prefix(tmp_path):
    data = b"A house.\tEin Haus.\r\nno tab\na\tb\tc\n\tb\nna\xefve\tx\n"
    kept, intake = read_bytes("pairs", tmp_path / "a", data, prefix="translate English to German: ")
    assert kept == [
        Record(0, "translate English to German: A house.", target="Ein Haus."),
        Record(4, "translate English to German: na\ufffdve", target="x"),
    ]
    assert intake.counters == {"read": 5, "damaged": 2, "empty_input": 1, "undecodable": 1}
    assert intake.damage[0] == ("line 2", "expected input, tab, target, found 0 tabs")


def test_json_pairs_under_any_keys(tmp_path):
    lines = b'{"inputs": "a", "targets": "b"}\n{"inputs": "a"}\n{"inputs": "c", "targets": " "}\n'
    kept, intake = read_bytes("pairs", tmp_path / "a", lines)
    assert kept == [Record(0, "a", target="b")]
    assert intake.counters == {"read": 3, "damaged": 1, "empty_target": 1}
    assert intake.counters.examples["empty_target"] == ["c"]
    named = b'{"translation": {"en": "a", "de": "b"}}'
    kept, _ = read_bytes("pairs", tmp_path / "a", named, inputs="translation.en", targets="translation.de")
    assert kept == [Record(0, "a", target="b")]


def test_json_pairs_may_have_several_right_answers_and_choices(tmp_path):
    lines = [
        {"inputs": "a", "targets": ["b", "c"], "choices": ["b", "d"]},
        {"inputs": "a", "targets": []},
        {"inputs": "a", "targets": "b", "choices": "bd"},
        {"inputs": "a", "targets": [1]},
    ]
    kept, intake = read_bytes("pairs", tmp_path / "a", "\n".join(map(json.dumps, lines)).encode())
    assert kept == [Record(0, "a", target="b", targets=["b", "c"], choices=["b", "d"])]
    assert intake.counters == {"read": 4, "damaged": 2, "empty_target": 1}


def test_a_layout_may_be_named(tmp_path):
    assert read_bytes("pairs", tmp_path / "a", b"{\t}\n", layout="tsv")[0] == [Record(0, "{", target="}")]
