"""Documents that are lists of integers: each is a token, and what is no such list is refused or counted."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer import Tokenizer, save
from data_pipeline.corpus.tokenizer import load as load_tokenizer
from data_pipeline.corpus.tokenizer.ids import Ids
from data_pipeline.stages.pipeline import build
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.tables import each

LISTS = [[(7 * number + place) % 100 for place in range(5 + number % 40)] for number in range(60)]


def test_ids_by_hand():
    """Ids 0 to 99, pad 100, eos 101, mask 102, then the sentinels."""
    tokenizer = Tokenizer(Ids(100), ["<mask>"], 2)
    vocabulary = tokenizer.vocabulary
    assert tokenizer.encode(["3 17 99", " 0\t5\n", "", " \r\n"]) == [[3, 17, 99], [0, 5], [], []]
    assert tokenizer.decode([3, 104, 17, 102, 99, 101, 100]) == "3 <extra_id_0> 17 <mask> 99"
    assert tokenizer.encode_with_sentinels("3 <extra_id_0> 17 <mask> 99") == [3, 104, 17, 102, 99, 101]
    assert tokenizer.encode_with_sentinels("3  <extra_id_0> <extra_id_1>\r") == [3, 104, 103, 101]
    assert (vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.mask, vocabulary.text) == (
        100,
        101,
        None,
        102,
        (0, 100),
    )
    assert (vocabulary.size, vocabulary.sentinel(0), vocabulary.sentinel(1)) == (105, 104, 103)


@each(
    "text, problem",
    [
        ("3 100 5", r"no id 100, at place 1: tokenizer.vocab_size is 100, so the largest is 99"),
        (str(2**64 + 1), "no id 18446744073709551617, at place 0"),
        ("9" * 5000, f"no id {'9' * 20}, at place 0"),
        ("3 -1", "found '-1' at place 1"),
        ("1.0", "found '1.0' at place 0"),
        ("3,4", "found '3,4' at place 0"),
        ("٣", "found '٣' at place 0"),
        ("3\u00a04", "found other white space"),
        ("The end", "found 'The' at place 0"),
    ],
)
def test_other_text_than_ids_is_refused_with_its_place(text, problem):
    with pytest.raises(UserError, match=problem):
        Ids(100).encode(["1 2", text])


def test_a_saved_tokenizer_is_loaded_as_it_was(tmp_path):
    tokenizer = Tokenizer(Ids(100), ["[R]"], 10)
    save(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).describe() == tokenizer.describe()
    assert (tmp_path / "tokenizer/ids.json").read_text() == '{"vocab_size": 100}\n'
    assert Ids(100).sha256 != Ids(101).sha256


def corpus_file(tmp_path: Path, source: dict, **changes: object) -> Path:
    settings = {
        "name": "items",
        "output": str(tmp_path / "corpus"),
        "sources": [{"options": {"ids": "codes"}, **source}],
        "split": {"validation_fraction": 0.2},
        "tokenizer": {"kind": "ids", "vocab_size": 100, "sentinels": 20},
        "rows": {"objective": {"name": "span_corruption", "inputs_length": 16}},
        **changes,
    }
    (tmp_path / "corpus.yaml").write_text(json.dumps(settings))
    return tmp_path / "corpus.yaml"


def write(kind: str, folder: Path) -> dict:
    """A file of LISTS in a format, and its source."""
    path, table = folder / f"items.{kind}", pa.table({"codes": LISTS})
    match kind:
        case "jsonl":
            path.write_text("".join(json.dumps({"user": {"codes": one}}) + "\n" for one in LISTS))
            return {"format": kind, "path": str(path), "options": {"ids": "user.codes"}}
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            feather.write_feather(table.cast(pa.schema([("codes", pa.large_list(pa.uint8()))])), path)
        case "text":
            path.write_text("".join(" ".join(map(str, one)) + "\n" for one in LISTS))
            return {"format": "text", "path": str(path), "options": {"sample_by": "line"}}
    return {"format": kind, "path": str(path)}


@each("kind", ["jsonl", "parquet", "arrow", "text"])
def test_every_format_of_lists_gives_the_same_documents_and_tokens(kind, tmp_path):
    rows = {"packing": "complete_documents", "objective": {"name": "prefix_lm", "length": 64}}
    file = corpus_file(tmp_path, write(kind, tmp_path), split={"validation_fraction": 0.0}, rows=rows)
    done_here("data-pipeline", "build", file)
    texts = [row["text"] for row in pq.read_table(tmp_path / "corpus/documents").to_pylist()]
    assert texts == [" ".join(map(str, one)) for one in LISTS]
    corpus = open_corpus(tmp_path / "corpus")
    assert corpus.manifest.splits["train"].tokens == sum(map(len, LISTS))
    assert corpus.tokenizer.describe().kind == "ids"


def test_shown_examples_are_ids_and_stats_count_them(tmp_path):
    """The end of each split, of fewer tokens than a row, stays out."""
    file = corpus_file(tmp_path, write("jsonl", tmp_path))
    done_here("data-pipeline", "build", file)
    shown = done_here("data-pipeline", "show", tmp_path / "corpus", "-n", "1")
    assert "<extra_id_0>" in shown
    assert set(shown.split("inputs")[1].split("\n")[0].replace("<extra_id_", "").replace(">", "")) <= set(
        ": 0123456789"
    )
    stats = json.loads(done_here("data-pipeline", "stats", tmp_path / "corpus", "--json"))
    assert 0 <= sum(map(len, LISTS)) - sum(split["tokens"] for split in stats["splits"].values()) < 2 * 20


def test_lists_that_are_no_ids_are_damage_with_their_rows_and_the_others_stay(tmp_path):
    rows = [[1, 2], [3, -4], [5, 6.0], [7, True], "8 9", None, [], [10, [11]], [12, None], [13]]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"codes": one}) + "\n" for one in rows))
    source = {"format": "jsonl", "path": str(path)}
    build(load(corpus_file(tmp_path, source, split={"validation_fraction": 0.0}), [], CorpusConfig), "documents")
    stats = json.loads(done_here("data-pipeline", "stats", tmp_path / "corpus", "--json"))
    assert stats["documents"]["read"] == len(rows)
    assert stats["documents"]["dropped"] == {"damaged": 7, "empty": 1}
    assert [row["text"] for row in pq.read_table(tmp_path / "corpus/documents").to_pylist()] == ["1 2", "13"]
    report = (tmp_path / "corpus/report.json").read_text()
    for said in (
        "line 2: expected integers from 0 on, found -4 at place 1",
        "line 3: expected integers from 0 on, found 6.0 at place 1",
        "line 4: expected integers from 0 on, found true at place 1",
        'line 5: expected a list of integers, found \\"8 9\\"',
        'line 6: no list of integers under the key \\"codes\\"',
        "line 8: expected integers from 0 on, found [11] at place 1",
        "line 9: expected integers from 0 on, found null at place 1",
    ):
        assert said.split(": ", 1)[1] in report, said


def test_a_table_with_wrong_values_is_refused_or_damage(tmp_path):
    path = tmp_path / "items.parquet"
    source = {"format": "parquet", "path": str(path)}
    for column, kind in ((pa.array([[1.0]]), "list<element: double>"), (pa.array(["1 2"]), "string")):
        pq.write_table(pa.table({"codes": column}), path)
        done = run_here("data-pipeline", "build", corpus_file(tmp_path, source))
        assert done.returncode != 0
        assert f"column 'codes' is {kind}, expected lists of integers" in done.stdout + done.stderr
    pq.write_table(pa.table({"codes": pa.array([[1, 2], [-1], [], None, [3, None]], pa.list_(pa.int32()))}), path)
    build(load(corpus_file(tmp_path, source), [], CorpusConfig), "documents")
    stats = json.loads(done_here("data-pipeline", "stats", tmp_path / "corpus", "--json"))
    assert stats["documents"]["dropped"] == {"damaged": 2, "empty": 2}


def test_an_id_above_the_vocabulary_is_refused_with_its_file_and_row(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text('{"codes": [1, 2]}\n{"codes": [3, 100]}\n')
    done = run_here("data-pipeline", "build", corpus_file(tmp_path, {"format": "jsonl", "path": str(path)}))
    said = "jsonl/items.jsonl/000000001: text: no id 100, at place 1: tokenizer.vocab_size is 100, so the largest is 99"
    assert (done.returncode, said in done.stderr) == (2, True)


@each(
    "changes, said",
    [
        ({"cleaning": {"min_words_per_line": 3}}, "cleaning.min_words_per_line: for text, and tokenizer.kind ids has"),
        ({"cleaning": {"profile": "c4"}}, "cleaning.bad_words, cleaning.language, cleaning.max_page_characters, "),
        ({"cleaning": {"language": {"detector": "fast"}}}, "cleaning.language: for text"),
        ({"dedup": {"lines": True}}, "dedup.lines: for text"),
        ({"dedup": {"spans": True}}, "dedup.spans: for text"),
        ({"tokenizer": {"kind": "bytes"}}, "sources.0.options.ids: needs tokenizer.kind ids, not bytes"),
        ({"tokenizer": {"kind": "ids"}}, "tokenizer.vocab_size: missing"),
        ({"tokenizer": {"kind": "ids", "vocab_size": 0}}, "tokenizer.vocab_size: expected integer > 0"),
    ],
)
def test_settings_that_need_text_are_refused_in_one_line(tmp_path, changes, said):
    source = {"format": "jsonl", "path": str(tmp_path / "items.jsonl")}
    line = refused_here(2, "data-pipeline", "plan", corpus_file(tmp_path, source, **changes))
    assert said in line
    with pytest.raises(UserError, match="text and ids: a document has one of them"):
        load(corpus_file(tmp_path, {**source, "options": {"ids": "a", "text": "b"}}), [], CorpusConfig)


def test_equal_and_nearly_equal_lists_are_dropped_once(tmp_path):
    long = [number * number % 97 for number in range(90)]
    near = [*long[:-1], 98]
    rows = [long, [1, 2, 3], long, near, [12, 3]]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"codes": one}) + "\n" for one in rows))
    file = corpus_file(tmp_path, {"format": "jsonl", "path": str(path)}, dedup={"minhash": True})
    build(load(file, [], CorpusConfig), "documents")
    left = [row["text"] for row in pq.read_table(tmp_path / "corpus/documents").to_pylist()]
    assert left == [" ".join(map(str, rows[number])) for number in (0, 1, 4)]
    stats = json.loads(done_here("data-pipeline", "stats", tmp_path / "corpus", "--json"))
    assert stats["documents"]["dropped"] == {"duplicate_document": 1, "near_duplicate": 1}
