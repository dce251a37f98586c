"""CSV, JSON arrays, Parquet and Arrow files, as pandas and datasets write them: what is kept, counted or damaged."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline.foundation.errors import UserError
from data_pipeline.sources.record import Record
from tests.data_pipeline.reading import read, read_bytes, read_until_damage
from tests.tables import each

AWKWARD = ['"Quoted", with a comma', "two\nlines, one\r\nwith CR", 'ø \\" [] {} \\', "] }, {[", "x" * 300_000, "last"]


# --- CSV


def as_csv(rows: list[list[str]], **how) -> bytes:
    text = io.StringIO()
    csv.writer(text, **how).writerows(rows)
    return text.getvalue().encode()


@each("how", [{}, {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL}, {"delimiter": ";"}])
def test_what_pythons_writer_wrote_is_read_back(tmp_path, how):
    rows = [["id", "text", "url"], *([str(n), one, f"u{n}"] for n, one in enumerate(AWKWARD))]
    data = b"\xef\xbb\xbf" + as_csv(rows, **how)
    path = tmp_path / "a.csv.gz"
    kept, stats = read_bytes("csv", path, gzip.compress(data), delimiter=how.get("delimiter", ","))
    assert kept == [Record(n, one, f"u{n}") for n, one in enumerate(AWKWARD)]
    assert stats.counters == {"read": len(AWKWARD)}


def test_bad_rows_are_counted_with_their_line_and_the_next_is_read(tmp_path):
    rows = [b"text,url", b'"a', b'b",u', b"c", b'"d"e,u', b"", b"f\0,u", b" ,u", b"g" * 99 + b",u"]
    rows += [b"h\xe9,u", b"i,u,v", b"j,u"]
    kept, stats = read_bytes("csv", tmp_path / "a", b"\n".join(rows), max_record_bytes=50)
    assert [(record.ordinal, record.text) for record in kept] == [(0, "a\nb"), (8, "j")]
    assert stats.counters == {"read": 9, "damaged": 6, "empty": 1}
    assert [position for position, _ in stats.damage] == [f"line {number}" for number in (4, 5, 7, 9, 10, 11)]
    assert stats.damage[0].reason == "1 fields, but the header has 2"


def test_a_quotation_that_never_ends_is_damage_not_memory(tmp_path):
    data = b'text\na\n"b\n' + b"c\n" * 1000
    kept, stats = read_bytes("csv", tmp_path / "a", data, max_record_bytes=100)
    assert (kept[0].text, stats.damage[0]) == ("a", ("line 3", "longer than max_record_bytes, 100"))
    kept, stats = read_bytes("csv", tmp_path / "a", data)
    assert ([record.text for record in kept], stats.counters["damaged"]) == (["a"], 1)
    (tmp_path / "a").write_bytes(b'text,"url\n' + b"c\n" * 1000)
    _, _, damage = read_until_damage("csv", tmp_path / "a", max_record_bytes=100)
    assert (damage.position, damage.reason) == ("the header", "longer than max_record_bytes, 100")


# --- JSON


@each("how", [{}, {"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}])
def test_an_array_is_read_as_json_reads_it_wherever_its_pieces_end(tmp_path, how, monkeypatch):
    objects = [{"meta": {"n": [n, {}]}, "text": one, "url": f"u{n}"} for n, one in enumerate(AWKWARD)]
    data = json.dumps(objects, **how).encode()
    for size in (1 << 18, 7, 1):
        monkeypatch.setattr("data_pipeline.sources.jsonl._CHUNK", size)
        if size == 1:
            data = json.dumps(objects[:4], **how).encode() + b" \n"
        kept, stats = read_bytes("json", tmp_path / "a", data)
        assert kept == [Record(n, one, f"u{n}") for n, one in enumerate(AWKWARD[: len(json.loads(data))])]
        assert stats.counters == {"read": len(kept)}


def test_bad_elements_are_counted_with_their_number_and_the_next_is_read(tmp_path):
    elements = [b'{"text": "a"}', b"3", b'{"text": 1}', b'{"text": "\xff"}', b'{"text" "b"}']
    elements.append(b'{"text": "%s"}' % (b"c" * 99))
    data = b"[" + b",".join([*elements, b'{"text": " "}', b'{"text": "d"}']) + b"]"
    kept, stats = read_bytes("json", tmp_path / "a", data, max_record_bytes=50)
    assert kept == [Record(0, "a"), Record(7, "d")]
    assert stats.counters == {"read": 8, "damaged": 5, "empty": 1}
    assert [position for position, _ in stats.damage] == [f"element {number}" for number in range(2, 7)]
    assert read_bytes("json", tmp_path / "a", b" [ ] ")[0] == []
    lines = b'{"text": "a"}\n\n{"text": "b"}\n'
    assert read_bytes("json", tmp_path / "a", lines) == read_bytes("jsonl", tmp_path / "a", lines)


@each(
    "end, reason",
    [(b"", "the file ends before"), (b', {"text": "c', "the file ends before"), (b"] []", "there is more")],
)
def test_an_array_that_does_not_end_well_yields_what_is_whole(tmp_path, end, reason):
    (tmp_path / "a").write_bytes(b'[{"text": "a"}, {"text": "b"}' + end)
    kept, _, damage = read_until_damage("json", tmp_path / "a")
    assert [record.text for record in kept[:1]] == ["a"]
    assert len(kept) == (1 if end == b"" else 2)
    assert damage.reason.startswith(reason)


# --- tables: Parquet, and Arrow's streams and files


def write_table(path: Path, kind: str, table: pa.Table, rows: int = 2, **options) -> Path:
    """`rows`: of each row group or batch."""
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
    else:
        make = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


KINDS = ("parquet", "arrow", "arrow file")


@each("kind", KINDS)
def test_rows_become_records(tmp_path, kind):
    times = pa.array([0, None, 0, 86_400], pa.timestamp("s"))
    columns = {"text": ["a", None, " ", "b"], "url": ["u", "v", "w", None], "timestamp": times, "other": [1, 2, 3, 4]}
    kept, stats = read(kind.split()[0], write_table(tmp_path / "a", kind, pa.table(columns)))
    first, last = "1970-01-01T00:00:00", "1970-01-02T00:00:00"
    assert kept == [Record(0, "a", "u", timestamp=first), Record(3, "b", timestamp=last)]
    assert stats.counters == {"read": 4, "empty": 2}


STRINGS = pa.array(["a", "b", "a"])


@each("kind", KINDS)
@each("column", [STRINGS.cast(pa.large_string()), STRINGS.cast(pa.string_view()), STRINGS.dictionary_encode()])
def test_strings_of_any_kind_under_any_name_also_as_two_fields(tmp_path, kind, column):
    path = write_table(tmp_path / "a", kind, pa.table({"content": column}))
    kept, _ = read(kind.split()[0], path, text="content", title="content")
    assert [(record.text, record.title) for record in kept] == [("a", "a"), ("b", "b"), ("a", "a")]


@each("kind", KINDS)
def test_a_row_that_is_not_utf8_is_damage(tmp_path, kind):
    column = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    kept, stats = read(kind.split()[0], write_table(tmp_path / "a", kind, pa.table({"text": column})))
    assert [record.ordinal for record in kept] == [0, 2]
    assert stats.counters == {"read": 3, "damaged": 1}
    assert stats.damage[0][0] == "row 1"


def test_columns_that_are_not_there_are_the_users_to_mend(tmp_path):
    path = write_table(tmp_path / "a", "parquet", pa.table({"text": ["a"], "url": [1]}))
    assert len(read("parquet", path)[0]) == 1
    for options, message in (
        ({"text": "content"}, "no column 'content' for the text; there are text, url"),
        ({"title": "name"}, "no column 'name' for the title"),
        ({"text": "url"}, "column 'url' is int64, expected strings"),
    ):
        with pytest.raises(UserError, match=message):
            read("parquet", path, **options)


@each("kind", ["arrow", "parquet"])
def test_a_table_that_is_cut_off_anywhere_is_damage(tmp_path, kind):
    table = pa.table({"text": [f"{number} " * 50 for number in range(6)]})
    path = write_table(tmp_path / "a", kind, table)
    data = path.read_bytes()
    for length in range(1, len(data), 5):
        path.write_bytes(data[:length])
        kept, _, damage = read_until_damage(kind, path)
        assert [record.text for record in kept] == table["text"].to_pylist()[: len(kept)]
        assert kind == "arrow" or damage.position == "its footer"


def test_a_damaged_row_group_costs_its_rows_alone(tmp_path):
    texts = [f"{number} " * 50 for number in range(30)]
    how = {"write_page_checksum": True, "use_dictionary": False}
    path = write_table(tmp_path / "a", "parquet", pa.table({"text": texts}), 10, **how)
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[group.data_page_offset + group.total_compressed_size - 20] ^= 0xFF  # in the text, behind the page's header
    kept, stats = read_bytes("parquet", path, bytes(data))
    whole = [*range(10), *range(20, 30)]
    assert [(record.ordinal, record.text) for record in kept] == [(number, texts[number]) for number in whole]
    assert stats.counters == {"read": 30, "damaged": 10}
    assert stats.damage[0][0] == "rows 10 to 19, row group 1"


def column(kind: pa.DataType, offsets: list[int], data: bytes) -> pa.Array:
    """An array with these offsets into `data`, which Arrow doesn't check."""
    numbers = pa.array(offsets, pa.int64() if kind == pa.large_string() else pa.int32())
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, numbers.buffers()[1], pa.py_buffer(data)])


@each("kind", [pa.string(), pa.large_string()])
@each("offsets", [[0, 2**30, 3], [0, -(2**30), 3], [0, 3, 2]])
def test_offsets_out_of_the_data_are_damage_and_are_not_followed(tmp_path, kind, offsets):
    batch = pa.record_batch({"text": column(kind, offsets, b"abc")})
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
        writer.write_batch(pa.record_batch({"text": column(kind, [0, 1, 3], b"abc")}))
        writer.write_batch(batch)
    kept, _, damage = read_until_damage("arrow", tmp_path / "a")
    assert ([record.text for record in kept], damage.position) == (["a", "bc"], "row 2")


def test_indices_out_of_a_dictionary_are_damage(tmp_path):
    words = pa.DictionaryArray.from_arrays(pa.array([0, 9], pa.int32()), pa.array(["a"]), safe=False)
    path = write_table(tmp_path / "a", "arrow", pa.table({"text": words}))
    assert read_until_damage("arrow", path)[2].position == "row 0"


@each("kind", ["arrow", "parquet"])
def test_times_that_python_does_not_have_cost_their_rows(tmp_path, kind):
    times = pa.array([0, 2**40, 86_400], pa.timestamp("s"))  # 1970, the year 36812, 1970
    zone = pa.array([0], pa.timestamp("s", "Nowhere/Town"))
    for name, table, left in [
        ("a", pa.table({"text": ["a", "b", "c"], "timestamp": times}), ["1970-01-01T00:00:00", "1970-01-02T00:00:00"]),
        ("b", pa.table({"text": ["a"], "timestamp": times[1:2].cast(pa.date64(), safe=False)}), []),
        ("c", pa.table({"text": ["a"], "timestamp": zone}), []),
    ]:
        kept, stats = read(kind, write_table(tmp_path / name, kind, table))
        assert [record.timestamp for record in kept] == left
        assert (stats.counters["damaged"], stats.counters["read"]) == (1, len(table))


@each("kind", ["arrow", "parquet", "csv"])
def test_two_columns_with_the_name_of_the_text_are_refused_and_with_another_left_out(tmp_path, kind):
    for names in (["text", "text", "n"], ["text", "url", "url"]):
        table = pa.table([pa.array([value]) for value in "abc"], names)
        if kind == "csv":
            (tmp_path / "a").write_bytes(as_csv([names, list("abc")]))
        else:
            write_table(tmp_path / "a", kind, table)
        if names[1] == "text":
            with pytest.raises(UserError, match="2 columns 'text' for the text; there are text, text, n"):
                read(kind, tmp_path / "a")
        else:
            assert read(kind, tmp_path / "a")[0] == [Record(0, "a")]


def read_with_each_bit_of_its_footer_flipped(path: Path) -> None:
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place, bit in itertools.product(range(footer, len(data)), range(8)):
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        with contextlib.suppress(UserError):
            read_bytes("parquet", path, changed)


def test_statistics_that_are_damaged_do_not_end_the_process(tmp_path):
    """Asking pyarrow for a column's metadata does, where the sizes of its histograms are wrong."""
    pq.write_table(pa.table({"text": [f"Text {number}." for number in range(50)]}), tmp_path / "a")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(read_with_each_bit_of_its_footer_flipped, tmp_path / "a").result()


# --- checksums


LINES, SKIPPABLE = b'{"text": "One."}\n' * 9, b"\x50\x2a\x4d\x18\2\0\0\0ab"
ZSTD = {checked: zstandard.ZstdCompressor(write_checksum=checked).compress(LINES) for checked in (True, False)}


@each(
    "stored, unchecked",
    [
        *((ZSTD[True], False), (ZSTD[False], True), (SKIPPABLE + ZSTD[False], True)),
        *((LINES, False), (gzip.compress(LINES), False)),
    ],
)
def test_a_stream_without_the_checksums_of_its_kind_is_noted(tmp_path, stored, unchecked):
    kept, stats = read_bytes("jsonl", tmp_path / "a", stored)
    assert (len(kept), stats.unchecked) == (9, unchecked)


@each(
    "kind, options, unchecked",
    [
        *(("parquet", {"write_page_checksum": checked}, not checked) for checked in (True, False)),
        *(("arrow", {}, True), ("arrow file", {}, True)),
    ],
)
def test_a_table_without_the_checksums_of_its_kind_is_noted(tmp_path, kind, options, unchecked):
    table = pa.table({"text": ["One.", "Two."] * 99, "other": range(198)})
    kept, stats = read(kind.split()[0], write_table(tmp_path / "a", kind, table, 198, **options))
    assert (len(kept), stats.unchecked) == (198, unchecked)
