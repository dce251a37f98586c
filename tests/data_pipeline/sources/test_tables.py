"""CSV, Parquet and Arrow files, as pandas and datasets write them. Files in another format than the
declared one and damaged files are never read silently: messages name them."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checks.fuzz import check, seeds
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import SourceConfig
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished
from data_pipeline.sources import formats
from data_pipeline.sources.formats import look_of
from data_pipeline.sources.record import Record
from data_pipeline.sources.tables import names as names_of_columns
from data_pipeline.stages.documents import DocumentsResult, plan, write_documents
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.pipeline import build, report_damage
from tests.conftest import DATA
from tests.support.builds import OFF, plain, traced
from tests.support.reading import flat, read, read_bytes, read_until_damage
from tests.support.tables import each

AWKWARD = ['"Quoted", with a comma', "two\nlines, one\r\nwith CR", 'ø \\" [] {} \\', "] }, {[", "x" * 300_000, "last"]


# --- CSV


def as_csv(rows: list[list[str]], **how) -> bytes:
    text = io.StringIO()
    csv.writer(text, **how).writerows(rows)
    return text.getvalue().encode()


ESCAPED = {"escapechar": "\\", "doublequote": False}  # as MySQL and Spark write


@each(
    "how, options",
    [
        *((how, {}) for how in ({}, {"lineterminator": "\n"}, {"quoting": csv.QUOTE_ALL})),
        *((how, how) for how in ({"delimiter": ";"}, ESCAPED, {**ESCAPED, "delimiter": "\t"})),
        (
            {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None},
            {"delimiter": "\t", "quoting": "QUOTE_NONE"},
        ),
    ],
)
def test_what_pythons_writer_wrote_is_read_back(tmp_path, how, options):
    texts = (
        AWKWARD if "quotechar" not in how else [one for one in AWKWARD if "\n" not in one] + ['"Begins" so', '"', '"']
    )
    rows = [["id", "text", "url"], *([str(n), one, f"u{n}"] for n, one in enumerate(texts))]
    data = b"\xef\xbb\xbf" + as_csv(rows, **how)
    kept, stats = read_bytes("csv", tmp_path / "a.csv.gz", gzip.compress(data), **options)
    assert kept == [Record(n, one, f"u{n}") for n, one in enumerate(texts)]
    assert flat(stats.counters) == {"read": len(texts)}


def test_csv_counts_rows_of_another_width_or_encoding_with_their_line_and_reads_on(tmp_path):
    rows = [b"text,url", b'"a', b'b",u', b"c", b"", b"f\0,u", b" ,u", b"h\xe9,u", b"i,u,v", b"j,u"]
    kept, stats = read_bytes("csv", tmp_path / "a", b"\n".join(rows))
    assert [(record.ordinal, record.text) for record in kept] == [(0, "a\nb"), (6, "j")]
    assert flat(stats.counters) == {"read": 7, "damaged": 4, "empty": 1}
    assert [position for position, _ in stats.damage] == [f"line {number}" for number in (4, 6, 8, 9)]
    assert stats.damage[0].reason == "1 fields, but the header has 2"


@each("columns", [1, 2, 3])
@each(
    "old, new, lines, reason",
    [
        # unescaped, and escaped by a backslash: it shows in the third line
        ('""4""', '"4"', (1, 3), "written twice"),
        ('""4""', '\\"4\\"', (1, 3), 'set options: {escapechar: "\\\\"}'),
        ("which has 4", 'which has "4', (1, 2), "written twice"),
        ("has 4 lines", "has 4 lines" + "x" * 200, (1, 1), "longer than max_record_bytes, 200"),
        # no end: it shows where the next row begins
        ('Its end."', "Its end.", (1, 5), "written twice"),
    ],
)
def test_csv_ends_at_the_line_of_a_damaged_row_and_no_line_of_its_text_becomes_a_document(
    tmp_path, columns, old, new, lines, reason
):
    """Each text has lines that look like rows, and quotation marks; the damaged text is the fifth of nine."""
    texts = [f'Text {n},\nwhich has {n} lines, and\nsays "{n}".\nIts end.' for n in range(9)]
    data = as_csv(
        [["text", "url", "title"][:columns], *([one, "u", "t"][:columns] for one in texts)], lineterminator="\n"
    ).decode()
    before, damaged, behind = data.partition(as_csv([[texts[4]]], lineterminator="\n").decode()[:-1])
    assert damaged.count(old) == 1
    (tmp_path / "a").write_text(before + damaged.replace(old, new) + behind)
    kept, stats, damage = read_until_damage("csv", tmp_path / "a", max_record_bytes=200)
    assert [record.text for record in kept] == texts[:4]
    first, last = (1 + 4 * 4 + line for line in lines)  # the header and four rows of four lines come before
    assert damage.position == (f"line {first}" if first == last else f"lines {first} to {last}")
    assert reason in damage.reason
    assert flat(stats.counters) == {"read": 4}


def test_csv_refuses_a_quotation_that_never_ends_without_holding_the_rest_in_memory(tmp_path):
    for head, line in ((b'text\na\n"b\n', 3), (b'text,"url\n', 1)):
        (tmp_path / "a").write_bytes(head + b"c\n" * 1000)
        _, _, damage = read_until_damage("csv", tmp_path / "a", max_record_bytes=100)
        assert (damage.position, damage.reason) == (f"line {line}", "longer than max_record_bytes, 100")
        _, _, damage = read_until_damage("csv", tmp_path / "a")
        assert damage.position == f"lines {line} to {1000 + head.count(bytes([10]))}"
        assert damage.reason.startswith("the field that a quotation mark opens has no end")


def test_csv_refuses_to_merge_rows_of_a_file_that_quotes_nothing(tmp_path):
    rows = [b"text\turl", b"first\tt", b'"Hello,\tu', b'she said"\tv', b'"So" he\tw', b"last\tz"]
    (tmp_path / "a").write_bytes(b"\n".join(rows))
    kept, _, damage = read_until_damage("csv", tmp_path / "a", delimiter="\t")
    assert [record.text for record in kept] == ["first"]
    assert damage.position == "lines 3 to 4"
    assert damage.reason.endswith("holds whole rows; if the file quotes nothing, set options: {quoting: QUOTE_NONE}")
    kept, stats = read_bytes("csv", tmp_path / "a", b"\n".join(rows), delimiter="\t", quoting="QUOTE_NONE")
    assert [record.text for record in kept] == [row.decode().split("\t")[0] for row in rows[1:]]
    assert stats.damage == []


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
    assert flat(stats.counters) == {"read": 4, "empty": 2}


STRINGS = pa.array(["a", "b", "a"])


@each("kind", KINDS)
@each("column", [STRINGS.cast(pa.large_string()), STRINGS.cast(pa.string_view()), STRINGS.dictionary_encode()])
def test_strings_of_any_kind_under_any_name_also_as_two_fields(tmp_path, kind, column):
    path = write_table(tmp_path / "a", kind, pa.table({"content": column}))
    kept, _ = read(kind.split()[0], path, text="content", title="content")
    assert [(record.text, record.title) for record in kept] == [("a", "a"), ("b", "b"), ("a", "a")]


@each("kind", KINDS)
def test_a_field_of_a_struct_is_named_as_a_nested_key_of_json_lines(tmp_path, kind):
    """A null struct has no text. A column whose own name has the dot is meant first, as a key of JSON Lines is."""
    pairs = [{"en": "one", "de": "eins"}, None, {"en": None, "de": "drei"}, {"en": "four", "de": "vier"}]
    deep = [{"b": {"c": text}} for text in ("w", "x", "y", "z")]
    columns = {"translation": pairs, "a": deep, "a.b.c": ["own"] * 4, "id": [1, 2, 3, 4]}
    path = write_table(tmp_path / "a", kind, pa.table(columns), rows=3)
    kept, stats = read(kind.split()[0], path, text="translation.en", title="translation.de")
    assert kept == [Record(0, "one", title="eins"), Record(3, "four", title="vier")]
    assert flat(stats.counters) == {"read": 4, "empty": 2}
    own, _ = read(kind.split()[0], path, text="a.b.c")
    assert [record.text for record in own] == ["own"] * 4
    path = write_table(tmp_path / "b", kind, pa.table({"a": deep}))
    kept, _ = read(kind.split()[0], path, text="a.b.c")
    assert [record.text for record in kept] == ["w", "x", "y", "z"]
    assert names_of_columns(str(path)) == ["a", "a.b", "a.b.c"]
    for text, message in (
        ("a.b.d", "no column 'a.b.d' for the text; there are a, a.b, a.b.c; name one of them in options"),
        ("a.b", r"'a.b' is struct<c: string>, expected strings; name a field of it in options: {text: NAME}, of a.b.c"),
    ):
        with pytest.raises(UserError, match=message):
            read(kind.split()[0], path, text=text)


@each("kind", KINDS)
def test_a_row_that_is_not_utf8_is_damage(tmp_path, kind):
    column = pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string())
    kept, stats = read(kind.split()[0], write_table(tmp_path / "a", kind, pa.table({"text": column})))
    assert [record.ordinal for record in kept] == [0, 2]
    assert flat(stats.counters) == {"read": 3, "damaged": 1}
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
    assert flat(stats.counters) == {"read": 30, "damaged": 10}
    position, reason = stats.damage[0]
    assert position == "rows 10 to 19, row group 1"
    corpus = Path(build(plain(tmp_path, path, "parquet", dedup=OFF), until="documents"))
    for row in (10, 15, 19):  # each is told why it was lost
        lost = traced(corpus, f"parquet/a/{row:09d}")
        assert (lost.step, lost.rule, lost.text) == ("reading", "damaged", f"{position}: {reason}"[:200])


def test_a_negative_number_of_rows_in_a_damaged_footer_moves_no_other_row(tmp_path):
    """Thrift writes 500 as 1000 in zigzag; with its lowest bit flipped, that is −501."""
    path = write_table(tmp_path / "a", "parquet", pa.table({"text": [f"{n} " for n in range(1500)]}), 500)
    whole, count = path.read_bytes(), b"\xe8\x07"
    at = whole.rindex(b"PAR1", 0, -4) if whole.count(b"PAR1") > 2 else 0
    for place in [n for n in range(at, len(whole)) if whole[n : n + 2] == count]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with contextlib.suppress(pa.ArrowException, OSError):
            if pq.ParquetFile(path).metadata.row_group(1).num_rows < 0:
                break
    else:
        raise AssertionError("no such byte")
    kept, stats = read("parquet", path)
    numbers = [record.ordinal for record in kept]
    assert len(numbers) == len(set(numbers)) == 1000
    assert min(numbers) == 0
    assert stats.counters.dropped_documents["damaged"] == 0


def test_a_stream_without_rows_is_whole(tmp_path):
    schema = pa.schema({"text": pa.string()})
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.ipc.new_stream(file, schema):
        pass
    assert read("arrow", tmp_path / "a")[0] == []


def test_a_length_beyond_the_end_of_a_damaged_arrow_stream_reserves_no_memory(tmp_path):
    path = write_table(tmp_path / "a", "arrow", pa.table({"text": ["a" * 1000, "b" * 1000, "c", "d"]}))
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.MessageReader.open_stream(file)
        length = [reader.read_next_message() for _ in range(2)][1].body.size.to_bytes(8, "little")  # the first batch's
    data = path.read_bytes()
    assert data.count(length) == 1
    path.write_bytes(data.replace(length, (1 << 50).to_bytes(8, "little")))
    kept, _, damage = read_until_damage("arrow", path)
    assert (kept, damage.position) == ([], "row 0")


def write_feather(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 1000)


@each("kind", ["parquet", "arrow", "feather"])
@each("rows", [0, 20_000])
def test_the_head_of_a_table_is_a_table_of_about_that_size(tmp_path, kind, rows):
    table = pa.table({"text": pa.array([f"{number:09d}" * 10 for number in range(rows)], pa.string())})
    path, declared = tmp_path / "a", "arrow" if kind == "feather" else kind
    if kind == "feather":
        write_feather(path, table)
    else:
        write_table(path, kind, table)
    with path.open("rb") as file:
        head = formats.FORMATS[declared].head(file, 200_000)
    kept, _ = read_bytes(declared, tmp_path / "head", head)
    assert [record.text for record in kept] == table["text"].to_pylist()[: len(kept)]
    assert len(kept) > 500 or not rows
    assert len(head) < 600_000
    path.write_bytes(path.read_bytes()[:-9])
    with path.open("rb") as file:  # the calibration reports the damage
        assert formats.FORMATS[declared].head(file, 10**9)[:6] == path.read_bytes()[:6]


def test_a_text_on_the_gene_par1_is_no_table(tmp_path):
    text = "PAR1 is a receptor for thrombin."
    (tmp_path / "a").write_text(f"{text}\n")
    assert [one.text for one in read("text", tmp_path / "a", sample_by="line")[0]] == [text]


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
def test_a_value_beside_the_text_that_cannot_be_read_costs_only_itself(tmp_path, kind):
    times = pa.array([0, 2**40, 86_400], pa.timestamp("s"))  # 1970, the year 36812, 1970
    zone = pa.array([0], pa.timestamp("s", "Nowhere/Town"))
    url = pa.array([b"u", b"\xff", b"v"], pa.binary()).view(pa.string())
    dates = ["1970-01-01T00:00:00", "", "1970-01-02T00:00:00"]
    for name, table, left in [
        ("a", {"text": ["a", "b", "c"], "timestamp": times}, [("", date) for date in dates]),
        ("b", {"text": ["a"], "timestamp": times[1:2].cast(pa.date64(), safe=False)}, [("", "")]),
        ("c", {"text": ["a"], "timestamp": zone}, [("", "")]),
        ("d", {"text": ["a", "b", "c"], "url": url}, [("u", ""), ("", ""), ("v", "")]),
    ]:
        kept, stats = read(kind, write_table(tmp_path / name, kind, pa.table(table)))
        assert [record.text for record in kept] == table["text"]
        assert [(record.url, record.timestamp) for record in kept] == left
        assert flat(stats.counters) == {"read": len(left)}
        (damage,) = stats.damage
        assert (damage.position, damage.reason[:17]) == (f"row {len(left) // 2}", "read without its ")


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


# --- pairs in tables

QUESTIONS = [
    {"of": {"text": ["a house", "the house"]}, "question": "What?", "passage": "It has a roof.", "labels": ["a", "b"]},
    {"of": {"text": []}, "question": "Who?", "passage": "I.", "labels": []},
    {"of": {"text": ["{passage}"]}, "question": "{passage}", "passage": "No template.", "labels": ["c"]},
]
EMPTY = ("empty_input", "empty_target")
LABELS = {
    "idx": {"dtype": "int32", "_type": "Value"},
    "label": {"names": ["entailment", "not_entailment"], "_type": "ClassLabel"},
    "tokens": [{"dtype": "string", "_type": "Value"}],
}
HOUSES = [{"inputs": "a house", "targets": "ein Haus"}, {"inputs": " ", "targets": "x"}, {"inputs": "y", "targets": ""}]


@each("kind", KINDS)
@each(
    "rows, options, first, counters",
    [
        (HOUSES, {"prefix": "en: "}, Record(0, "en: a house", target="ein Haus"), dict.fromkeys(EMPTY, 1)),
        *(
            (
                *(QUESTIONS, {"inputs": inputs, "targets": "of.text", "choices": "labels"}),
                Record(0, text, target="a house", targets=["a house", "the house"], choices=["a", "b"]),
                {"empty_target": 1},
            )
            for inputs, text in (("question", "What?"), ("{passage}\n\n{question}", "It has a roof.\n\nWhat?"))
        ),
    ],
)
def test_pairs_in_a_table_are_those_of_json_lines(tmp_path, kind, rows, options, first, counters):
    path = write_table(tmp_path / "a", kind, pa.Table.from_pylist(rows))
    kept, stats = read("pairs", path, **options)
    assert kept[0] == first
    assert flat(stats.counters) == {"read": 3, **counters}
    lines = "\n".join(map(json.dumps, rows)).encode()
    of_lines, stats_of_lines = read_bytes("pairs", tmp_path / "b", lines, **options)
    assert (kept, stats) == (of_lines, stats_of_lines)


@each("kind", KINDS)
@each("make", [pa.list_, pa.large_list])
@each("strings", [pa.string(), pa.large_string()])
def test_lists_of_strings_of_any_kind_are_right_answers(tmp_path, kind, make, strings):
    table = pa.table({"inputs": ["x", "y"], "targets": pa.array([["a", "b"], None], make(strings))})
    kept, stats = read("pairs", write_table(tmp_path / "a", kind, table))
    assert kept == [Record(0, "x", target="a", targets=["a", "b"])]
    assert flat(stats.counters) == {"read": 2, "empty_target": 1}


@each("kind", KINDS)
@each("strings", [pa.string(), pa.large_string()])
def test_lists_of_a_fixed_size_are_right_answers(tmp_path, kind, strings):
    """None is null: pyarrow can't read a null of this type from Parquet."""
    table = pa.table({"inputs": ["x"], "targets": pa.array([["a", "b"]], pa.list_(strings, 2))})
    assert read("pairs", write_table(tmp_path / "a", kind, table))[0] == [
        Record(0, "x", target="a", targets=["a", "b"])
    ]


@each("kind", KINDS)
@each(
    "described, first, counters",
    [
        (json.dumps({"info": {"features": LABELS}}), "not_entailment", {"empty_target": 1}),
        (json.dumps({"info": {"features": [LABELS]}}), "1", {}),
        ("{", "1", {}),
        (None, "1", {}),
    ],
)
def test_a_label_is_its_name_if_datasets_describes_it_and_other_integers_are_decimal(
    tmp_path, kind, described, first, counters
):
    """-1 is the unknown label of datasets."""
    table = pa.table({"idx": [10, 11, None, 13], "label": pa.array([1, 0, 0, -1], pa.int64())})
    metadata = described and {"huggingface": described}
    path = write_table(tmp_path / "a", kind, table.replace_schema_metadata(metadata))
    kept, stats = read("pairs", path, inputs="{idx}: {idx}", targets="label")
    assert kept[0] == Record(0, "10: 10", target=first)
    assert kept[2].text == ": "
    assert flat(stats.counters) == {"read": 4, **counters}


@each("kind", KINDS)
def test_a_pair_with_a_string_that_is_not_utf8_is_damage(tmp_path, kind):
    strings = pa.array([b"a", b"\xff", b"b", b"c"], pa.binary()).view(pa.string())
    table = pa.table({"inputs": ["x", "y", "z"], "targets": pa.ListArray.from_arrays([0, 1, 3, 4], strings)})
    kept, stats = read("pairs", write_table(tmp_path / "a", kind, table))
    assert [(record.ordinal, record.target) for record in kept] == [(0, "a"), (2, "c")]
    assert flat(stats.counters) == {"read": 3, "damaged": 1}
    assert stats.damage[0].position == "row 1"


@each("kind", KINDS)
@each(
    "options, message",
    [
        ({"inputs": "{passage} {query}"}, "no column 'query' for the inputs; there are of, of.text, question, passage"),
        ({"targets": "answer"}, "no column 'answer' for the targets; "),
        ({"choices": "options"}, "no column 'options' for the choices; "),
        ({"inputs": "labels"}, r"column 'labels' is list<.*>, expected strings or integers$"),
        ({"targets": "of"}, r"integers or lists of strings; name a field of it .* {targets: NAME}, of of\.text"),
        ({"choices": "question"}, "column 'question' is string, expected lists of strings"),
    ],
)
def test_columns_without_pairs_are_refused_in_one_line(tmp_path, kind, options, message):
    path = write_table(tmp_path / "a", kind, pa.Table.from_pylist(QUESTIONS))
    with pytest.raises(UserError, match=message) as refused:
        read("pairs", path, **{"inputs": "question", "targets": "of.text", **options})
    assert "\n" not in str(refused.value)


@each("kind", KINDS)
def test_the_head_of_a_table_of_pairs_is_a_table_of_pairs(tmp_path, kind):
    rows = [{"inputs": f"{number:09d}" * 10, "targets": "x"} for number in range(2000)]
    with write_table(tmp_path / "a", kind, pa.Table.from_pylist(rows), 100).open("rb") as file:
        head = formats.FORMATS["pairs"].head(file, 50_000)
    kept, stats = read_bytes("pairs", tmp_path / "b", head)
    assert [record.text for record in kept] == [row["inputs"] for row in rows[: len(kept)]]
    assert len(kept) > 50
    assert stats.damage == []


# --- files in another format than the declared one, and damaged files


FORMATS = get_args(SourceConfig.model_fields["format"].annotation)
ARRAY = "one JSON array, not JSON Lines: make each of its objects one line by jq -c '.[]'"
JSON_FORMATS = ("jsonl", "c4", "wikiextractor")

pq.write_table(pa.table({"text": ["a", "b"]}), parquet := io.BytesIO())
# For each kind of file: its content, the formats that read it, and its name in messages.
FILES: dict[str, tuple[bytes, tuple[str, ...], str]] = {
    "wet": ((DATA / "commoncrawl/whirlwind.warc.wet.gz").read_bytes(), ("wet",), "a WARC archive"),
    "warc": ((DATA / "commoncrawl/whirlwind.warc.gz").read_bytes(), ("warc",), "a WARC archive"),
    "c4": ((DATA / "c4/olmo-c4-sample.01.json.gz").read_bytes(), JSON_FORMATS, "JSON Lines with the keys "),
    "wikipedia": ((DATA / "wikipedia/nlwiki-20140927.xml").read_bytes(), ("wikipedia",), "a MediaWiki export"),
    "wikiextractor": (b'<doc id="1" url="u" title="A">\nA\n\nB.\n</doc>\n', ("wikiextractor",), "WikiExtractor output"),
    "jsonl": (b'{"text": "A", "id": 3}\n' * 2, JSON_FORMATS, "JSON Lines with the keys text, id"),
    "text": (b"One line of text.\nAnother, \xc3\xa9.\n", ("text",), "plain text (format: text)"),
    "parquet": (parquet.getvalue(), ("parquet",), "a Parquet file"),
    "pairs": (b"a house\tein Haus\n", ("pairs", "text"), "tab-separated pairs (format: pairs)"),
    "pairs in JSON": (b'{"inputs": "a", "targets": "b"}\n' * 2, ("pairs",), "JSON Lines with the keys inputs, targets"),
    "pairs in UTF-16": ("a house\tein Haus\n".encode("utf-16"), (), "binary data or UTF-16"),
    "other keys": (b'{"content": "A"}\n' * 2, (), "JSON Lines with the keys content"),
    "JSON array": (
        b'[\n{"text": "a"},\n{"text": "b"}\n]\n',
        ("text",),
        "one JSON array, not JSON Lines: make each of its objects one line by jq -c '.[]'",
    ),
    "CSV": (b'text,url\na,b\n"c\nd",e\n', ("csv", "text"), "CSV with the columns text, url (format: csv or text)"),
    "indented JSON": (
        json.dumps({"text": "A"}, indent=2).encode(),
        ("text",),
        "JSON over several lines, not JSON Lines",
    ),
    "xz": (b"\xfd7zXZ\0\0\4\xe6", (), "an xz archive: decompress it with xz -d"),
    "zip": (b"PK\x03\x04\x14" + bytes(99), (), "an archive of files: unpack it"),
    "PDF": (b"%PDF-1.7\n" + bytes(99), (), "a PDF: convert it to text"),
    "tar": (b"a.txt".ljust(257, b"\0") + b"ustar\x0000", (), "a tar archive: unpack it with tar -xf"),
    "FASTA": (b">P1 A protein\nMKTAYIAK\nQRQ*\n>P2\nMKT\n", ("fasta", "text"), "FASTA"),
    "HTML": (b"<!DOCTYPE html>\n<p>404</p>\n\t<p>.</p>\n", ("text",), "an HTML page"),
}


def read_as(declared: str, path: Path) -> Finished[DocumentsResult]:
    """The result of the documents stage for one file."""
    corpus = path.parent / "corpus"
    rows = {"packing": "complete_documents", "objective": {"name": "text_to_text"}} if declared == "pairs" else {}
    config = plain(path.parent, path, declared, rows=rows)
    (unit,) = plan(config, LocalStore(corpus), inputs_of(config).files)
    return Finished(unit.name, "", write_documents(Context(LocalStore(corpus)), unit.spec), {}, 0.0, 0.0)


@each("kind", FILES)
def test_a_file_is_read_as_what_it_is_and_refused_as_anything_else(tmp_path, kind):
    content, readable, name = FILES[kind]
    (tmp_path / "a").write_bytes(content)
    for declared in FORMATS:
        done = read_as(declared, tmp_path / "a")
        if declared in readable:
            assert done.result.inputs[0].status == "ok", declared
            assert sum(done.result.documents.values()) > 0
        else:
            assert done.result.inputs[0].status == "unreadable", declared
            assert not done.result.documents
            assert name in done.result.inputs[0].damage[0].reason
            with pytest.raises(FailedError) as failure:
                report_damage([done], strict=False)
            first, last = str(failure.value).splitlines()
            assert first.startswith(f"{declared}/a: unreadable at ")
            assert last == f"nothing could be read from source {declared}"


@each(
    "declared, line, lacks, way_out",
    [
        ("jsonl", '{"id": "7", "content": "A text."}', "text", "{text: content}"),
        ("jsonl", '{"meta": {"a key": "A text."}}', "text", '{text: "meta.a key"}'),
        ("jsonl", '{"id": "7", "doc": {"text": "A text."}}', "text", "{text: doc.text}"),
        ("jsonl", '{"id": "7", "text": {"body": "A text."}}', "text", "{text: text.body}"),
        ("pairs", '{"question": "Who?", "n": 1, "answer": "I."}', "inputs", "{inputs: question, targets: answer}"),
        ("pairs", '{"inputs": "Who?", "long answer": "I."}', "targets", '{inputs: inputs, targets: "long answer"}'),
    ],
)
def test_a_wrong_key_is_answered_with_the_options_to_set(tmp_path, declared, line, lacks, way_out):
    (tmp_path / "a").write_text(f"{line}\n" * 2)
    with pytest.raises(FailedError) as failure:
        report_damage([read_as(declared, tmp_path / "a")], strict=False)
    first, last = str(failure.value).splitlines()
    advice = f'no string under the key "{lacks}"; for other keys set options: {way_out}'
    assert first.startswith(f"{declared}/a: unreadable at line 1: {advice}; it looks like JSON Lines with the keys ")
    assert last == f"nothing could be read from source {declared}"


NESTED = {"version": "1.1", "data": [{"text": "A text."}, {"text": "Another."}]}
BY_COLUMNS, BY_INDEX = {"text": {"0": "a", "1": "b"}, "n": {"0": 1, "1": 2}}, {"0": {"text": "a"}, "1": {"text": "b"}}
LIST = "one JSON object with its records under 'data': make each of them a line by jq -c '.data[]'"
PANDAS = "one JSON object, a table of pandas: write it by to_json(orient='records', lines=True)"


@each("turns", [1, 2_000])
def test_a_line_with_a_chat_is_told_how_to_become_a_text(tmp_path, turns):
    """Also where two lines are more than what is looked at of a file. The program that the message names makes texts
    that are read."""
    chat = {"id": "7", "messages": [{"role": "user", "content": f"Hello, {turn}." * 10} for turn in range(turns)]}
    (tmp_path / "a").write_text(f"{json.dumps(chat)}\n" * 3)
    (damage, *_) = read_as("jsonl", tmp_path / "a").result.inputs[0].damage
    assert (
        "its texts are in a list of objects under 'messages', as in a chat; to make one text of them: jq"
        in damage.reason
    )
    assert """jq -c '{text: ([.messages[].content] | join("\\n"))}'""" in damage.reason
    assert "one JSON object" not in damage.reason
    assert "options" not in damage.reason


@each(
    "declared, content, said",
    [
        ("jsonl", json.dumps(NESTED), LIST),
        (
            "jsonl",
            json.dumps([{"text": "a"}] * 2),
            "it looks like one JSON array, not JSON Lines: make each of its objec",
        ),
        ("jsonl", json.dumps(NESTED, indent=1), LIST),
        *(("jsonl", json.dumps(table), PANDAS) for table in (BY_COLUMNS, BY_INDEX)),
        ("jsonl", '{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n', "make each object one line by jq -c ."),
        ("csv", "title,body\na,b\nc,d\n", "there are title, body; name one of them in options: {text: NAME}"),
        ("csv", "id;text\n1;a\n2;b\n", 'for another delimiter set options: {delimiter: ";"}'),
        ("jsonl", "title,body\na,b\nc,d\n", "it looks like CSV with the columns title, body"),
    ],
)
def test_a_file_of_another_shape_is_called_what_it_is(tmp_path, declared, content, said):
    (tmp_path / "a").write_text(content)
    (damage, *_) = read_as(declared, tmp_path / "a").result.inputs[0].damage
    assert damage.reason.count(said) == 1
    assert "plain text" not in damage.reason
    assert "{text: version}" not in damage.reason


CUT = bytearray(gzip.compress(b'{"text": "One text."}\n' * 9))
CUT[-6] ^= 1


@each(
    "declared, content, end",
    [
        # a key that is there, and no other string
        *(
            ("jsonl", line * 2, "ext, id")
            for line in (b'{"text": null, "id": "7"}\n', b'{"text": "\\ud800", "id": "7"}\n')
        ),
        ("jsonl", b'{"id": 7}\n' * 2, "keys id"),
        ("wet", b"\xff\xfe\xfa" * 9, "; are its path and format right?"),
        *(("wet", data, "not a WARC archive") for data in (b"\n\n", b"<head>\n<body>")),
        ("jsonl", CUT, "so all records from there on are left out"),
    ],
)
def test_no_options_are_advised_where_they_would_not_help(tmp_path, declared, content, end):
    (tmp_path / "a").write_bytes(content)
    (damage, *_) = read_as(declared, tmp_path / "a").result.inputs[0].damage
    assert "options" not in damage.reason
    assert end in damage.reason


@each("rest, formats", [("<mediawiki>", ("wikipedia",)), ("A text.\n", ("text",))])
def test_a_file_that_begins_with_many_comments_is_recognised(tmp_path, rest, formats):
    """Comments are passed over once: to try every division of 60 of them would never end."""
    (tmp_path / "a").write_text("<!-- a licence -->\n" * 60 + rest)
    look = look_of(str(tmp_path / "a"))
    assert look
    assert look.formats == formats


def test_an_archive_that_holds_nothing_yet_is_no_wrong_one(tmp_path):
    info = b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 1\r\n\r\nx\r\n\r\n"
    (tmp_path / "a").write_bytes(info)
    assert read_as("wet", tmp_path / "a").result.inputs[0].status == "ok"


def test_damaged_input_crashes_no_reader_and_is_never_lost_silently():
    for number in range(500):
        check(1, number)
    assert {seed.format for seed in seeds()} == {*FORMATS}
