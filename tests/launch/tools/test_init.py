"""`launch init` writes files that load, fit each other and are never overwritten."""

import csv
import gzip
import io
import json
import os
import random
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import data_pipeline
from data_pipeline.base.config_file import load
from data_pipeline.config import CorpusConfig, TokenizerConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.sources.formats import Look, look_of
from data_pipeline.stages import tokenizer
from data_pipeline.stages.tokenizer_training import largest_vocabulary
from launch.tools.scaffold import machine as first_machine
from launch.tools.scaffold.machine import Evaluations, FirstRun, Machine, model_named, models_of, run_within
from launch.tools.scaffold.text import SampleBy, cut, sample_of, sources_of
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models import FAMILIES
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.tables import each

SAMPLES = Path(data_pipeline.__file__).with_name("samples")
INF = float("inf")
SIZES = models_of("t5gemma2")
THIS_MACHINE = Machine.this
TWO_CORES = Machine(0, "2 cores, no GPU", 200e9, "measured in fp32", "fp32")
# of each family one, and those that differ in their positions
MODELS = ["t5-v1.1-xxl", "bart-base", "bert-base", "gpt2-small", "decoder-only-yan2024-15m"]


@pytest.fixture(autouse=True)
def _machine(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "this", lambda: TWO_CORES)


@each("model", MODELS)
def test_the_files_of_every_family_load_and_fit_each_other(model):
    done_here("launch", "init", "my-1", "--model", model, "--text", "data/*.jsonl.gz")
    corpus, run = load("my-1.corpus.yaml", [], CorpusConfig), load("my-1.run.yaml", [], RunConfig)
    assert run.data.train[0].corpus == run.data.validation[0].corpus == corpus.output == "corpora/my-1"
    assert [(source.format, source.path) for source in corpus.sources] == [("jsonl", "data/*.jsonl.gz")]
    assert corpus.rows.objective.name in FAMILIES[run.model.family].objectives
    assert run.model.longest_sequence is None or run.model.longest_sequence >= max(corpus.rows.objective.shape)
    assert corpus.rows.objective.problems(tokenizer.expected(corpus.tokenizer)) == []
    assert (run.model.vocab_size, run.model.pad_id, run.model.eos_id) == (None, 0, 1)  # a trained tokenizer's


@each("series, objective", [("t5", "denoising"), ("t5", "prefix_lm"), ("bart", "ul2"), ("gpt2", "causal_infilling")])
def test_an_objective_gets_the_rows_and_the_tokens_that_it_needs(series, objective):
    done_here("launch", "init", "--family", series, "--objective", objective, "--text", "data/*.jsonl.gz")
    corpus, run = load("first.corpus.yaml", [], CorpusConfig), load("first.run.yaml", [], RunConfig)
    assert corpus.rows.objective.name == objective
    assert objective in FAMILIES[run.model.family].objectives
    assert corpus.rows.objective.problems(tokenizer.expected(corpus.tokenizer)) == []


def test_the_next_two_commands_are_printed():
    done = run_here("launch", "init")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    machine, model, objective, optimizer, curriculum, steps, *rest = done.stdout.replace("\n    ", " ").splitlines()
    assert machine.startswith("machine: 2 cores, no GPU, 200 GFLOP/s in wide matmuls")
    assert model.startswith("model: t5gemma2-1.2m, the smallest t5gemma2; the run reads ")
    assert "Others: --family t5, bart, t5gemma, " in model
    assert objective.startswith("objective: span_corruption, rows of 568 tokens. Others: --objective iid_denoising, ")
    assert optimizer.startswith("optimizer: muon")
    assert curriculum.startswith("curriculum: half of each row is masked until step ")
    assert steps.startswith("steps: ")
    assert rest == [
        "wrote first.corpus.yaml and first.run.yaml. Next:",
        "  data-pipeline build first.corpus.yaml",
        "  launch local first.run.yaml",
    ]
    patterns = [Path(source.path) for source in load("first.corpus.yaml", [], CorpusConfig).sources]
    assert len([path for one in patterns for path in one.parent.glob(one.name)]) == 3  # the text that ships


@each("files, lines, part", [(2, 400, 256), (5, 7273, 400), (20, 100, 8 << 20)])
def test_a_text_file_is_a_document_and_few_are_cut_so_that_their_ends_can_be_held_out(files, lines, part):
    """5 files of 7,273 lines of 11 bytes are 1,000 parts of 400 bytes; no part has fewer than 256."""
    Path("books").mkdir()
    for number in range(files):
        Path(f"books/{number}.txt").write_text("One line.\n\n" * lines)
    done_here("launch", "init", "--text", "books", "--format", "text")
    corpus = load("first.corpus.yaml", [], CorpusConfig)
    assert corpus.sources[0].options["sample_by"] == "document"
    assert corpus.sources[0].options.get("max_document_bytes", 8 << 20) == part
    assert corpus.split.by == ("files" if files == 20 else "position")
    assert corpus.dedup.steps == (["documents"] if files == 20 else [])  # files of text have no URL


@each("files", [3, 40])
def test_no_held_out_text_stands_between_training_text_of_its_file(files):
    """Of many files some are held out whole, of few the end of the last."""
    Path("books").mkdir()
    for number in range(files):
        Path(f"books/{number}.txt").write_text("\n\n".join(TEXTS[number : number + 20]))
    assert run_here("launch", "init", "--text", "books").returncode == 0
    done_here("data-pipeline", "documents", "first.corpus.yaml")
    splits: dict[str, list[str]] = {}
    parts = sorted(Path("corpora/first/documents").glob("*.parquet"))
    for row in (row for part in parts for row in pq.read_table(part).to_pylist()):
        splits.setdefault(row["id"].rpartition("/")[0], []).append(row["split"])
    assert len(splits) == files
    if files == 3:
        first, second, last = (splits[name] for name in sorted(splits))
        assert {*first, *second} == {"train"}
        assert last == sorted(last)
        assert {*last} == {"train", "validation"}
    else:
        assert {len(own) for own in splits.values()} == {1}
        assert {own[0] for own in splits.values()} == {"train", "validation"}


def test_of_a_finished_corpus_the_run_has_the_true_sizes_and_no_corpus_file(small_corpus):
    """Its rows, of which a run reads each 40 times at most, and its vocabulary, not what a text might have."""
    Path("a corpus").symlink_to(small_corpus)
    done = run_here("launch", "init", "b", "--corpus", "a corpus/", "--hours", "1000")
    assert done.stdout.splitlines()[-2:] == ["  data-pipeline show 'a corpus'", "  launch local b.run.yaml"]
    run, corpus = load("b.run.yaml", [], RunConfig), open_corpus(small_corpus)
    assert run.data.train[0].corpus == "a corpus"
    assert run.data.curriculum == []
    rows, batch = corpus.rows("train"), run.batch.global_batch_size
    assert 40 * rows - batch < run.run.max_steps * batch <= 40 * rows
    config = run.model.model_copy(update={"vocab_size": corpus.tokenizer.size})
    a_row = TWO_CORES.seconds_of_row(config, corpus.objective.shape)
    assert 3600 * run.run.expected_hours == pytest.approx(run.run.max_steps * batch * a_row, rel=0.01)
    assert [path.name for path in Path().iterdir() if path.suffix] == ["b.run.yaml"]


@each("existing", ["first.run.yaml", "first.corpus.yaml"])
def test_an_existing_file_stays_and_nothing_is_written(existing):
    Path(existing).write_text("mine")
    done = run_here("launch", "init")
    assert (done.returncode, done.stderr) == (2, f"error: {existing}: exists already; choose another NAME\n")
    assert {path.name: path.read_text() for path in Path().iterdir()} == {existing: "mine"}


@each(
    "arguments, said",
    [
        (["--model", "t5-v1.1-bass"], "--model: configs:models/t5-v1.1-bass.yaml: no such file ships with the package"),
        (["../x"], "NAME: '../x': expected letters, digits"),
        (["--family", "mt5"], "--family: 'mt5'; expected one of t5gemma2, t5, bart, "),
        (["--family", "t5", "--size", "huge"], "--size: t5 has no 'huge'; expected one of 1m, 5m, 15m, small, base, "),
        (["--family", "t5", "--model", "bart-base"], "--model: names a family and a size already"),
        (
            ["--family", "gpt2", "--objective", "ul2"],
            "--objective: decoder_only doesn't learn 'ul2'; expected one of c",
        ),
        (["--objective", "ul2", "--corpus", "b"], "--objective: a finished corpus has one; set `data.objective` in "),
        (["--text", "data"], "--text: data: no such file or folder; for text that comes later, give --format"),
        (["--text", "a.txt.xz"], "--text: a.txt.xz: an xz archive: decompress it with xz -d"),
        (["--text", "a.zip"], "--text: a.zip: no such file or folder; for text that comes later, give --format"),
        (
            ["--text", "a.xml"],
            "--text: a.xml: no reader is known for it; convert it to .txt or .jsonl, or give --format",
        ),
        (["--text", "a.*"], "--text: a.*: matches files of several formats; give a narrower glob, or a folder"),
        (["--text", "a", "--format", "txt"], "--format: 'txt'; expected one of wet, warc, c4, wikipedia, "),
        (["--format", "csv"], "--format: for --text"),
        (["--text", "a.txt", "--corpus", "b"], "--text and --corpus: a run has its text from one of them"),
        (["--corpus", "nowhere"], "--corpus: nowhere/manifest.json: no such file; data-pipeline build CORPUS.yaml mak"),
        (["--packing", "concatenate", "--corpus", "b"], "--packing: a finished corpus has one"),
        (["--sample-by", "line"], "--sample-by: for --text"),
        (["--text", "a.jsonl", "--sample-by", "line"], "--sample-by: for plain text, and the format is jsonl"),
        (["--objective", "ul2", "--packing", "complete_documents"], "--packing: ul2 needs concatenate, not complete_d"),
        (["--objective", "ul2", "--inputs-length", "100"], "--inputs-length: ul2 has lengths of its own"),
        (["--family", "bart", "--inputs-length", "2000"], "--inputs-length: 2000, but the model takes 1024 tokens"),
        (["--objective", "prefix_lm", "--inputs-length", "9999999"], "--inputs-length: 9999999: "),
    ],
)
def test_wrong_arguments_are_one_line_and_nothing_is_written(arguments, said):
    Path("a.xml").write_text("<rss><item>Text.</item></rss>")
    Path("a.txt.xz").write_bytes(b"\xfd7zXZ\0\0")
    Path("a.jsonl").write_text('{"text": "Text."}\n')
    before = sorted(Path().iterdir())
    done = run_here("launch", "init", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {said}"), done.stderr
    assert sorted(Path().iterdir()) == before


# --- what users have


WORDS = ["one", "two", "tree", "house", "sea"]
TEXTS = [
    " ".join(f"{word}{number % 7}" for word in random.Random(number).choices(WORDS, k=300)) for number in range(60)
]


CSV_ROWS = [[str(1_000_001 + number), text.replace(" ", "\n", 3)] for number, text in enumerate(TEXTS)]
JSON_ROWS = [{"text": f"Größe: {text}"} for text in TEXTS]
JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in JSON_ROWS)
UMLAUTS = "\n\n".join(row["text"] for row in JSON_ROWS)
ARRAY = r"one JSON array, not JSON Lines: make each of its objects one line by jq -c '\.\[\]'"
ONE_OBJECT = json.dumps({"version": "1.1", "data": JSON_ROWS})
BY_COLUMNS = json.dumps({"text": {str(number): row["text"] for number, row in enumerate(JSON_ROWS)}})


def as_csv(*rows: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


@each(
    "name, content, said",
    [
        ("a.csv", as_csv(*CSV_ROWS).encode(), "a.csv: expected names of columns in the first row, found '1000001', '"),
        *(
            (
                "a.jsonl",
                JSON_LINES.encode(name),
                f"a.jsonl: line 1: holds NUL bytes: .* {{encoding: {name}}} in a corpus",
            )
            for name in ("utf-16", "utf-32")
        ),
        ("a.txt", UMLAUTS.encode("utf-16"), "a.txt: bytes 0 to .*: holds NUL bytes: .* {encoding: utf-16} in a corpus"),
        (
            "a.txt",
            UMLAUTS.encode("latin-1"),
            "60 records can't be read, and .* a.txt: .* {encoding: cp1252} in a corpus",
        ),
        (
            "a.csv",
            as_csv(["n", "a"], ["1", UMLAUTS]).encode("latin-1"),
            "a.csv: line 2: .* {encoding: cp1252} in a corpus",
        ),
        (
            "a.json",
            "\n".join(json.dumps(row, indent=1) for row in JSON_ROWS).encode(),
            "a.json: JSON over several lines",
        ),
        ("a.json", json.dumps(JSON_ROWS, indent=1).encode(), f"a.json: {ARRAY}"),
        (
            "a.json",
            json.dumps(JSON_ROWS).encode(),
            f"a.json: line 1: expected .* found a JSON list; it looks like {ARRAY}",
        ),
        ("a.json", ONE_OBJECT.encode(), "a.json: one JSON object with its records under 'data': "),
        ("a.json", BY_COLUMNS.encode(), "a.json: one JSON object, a table of pandas: "),
        *((f"a.{kind}", b"", f"a.{kind}: byte 0: empty file") for kind in ("txt", "jsonl", "json", "csv")),
        ("a.jsonl", b"\n" * 99, "holds no text"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line_and_nothing_is_written(name, content, said):
    Path("data").mkdir()
    Path("data", name).write_bytes(content)
    for text in ("data", f"data/{name}"):
        line = refused_here(2, "launch", "init", "--text", text)
        assert re.match(f"error: --text: {said}", line), line
    assert [path.name for path in Path().iterdir()] == ["data"]


@each("text", ["data", "data/*", "data/**"])
def test_hidden_files_are_no_text_for_the_first_files_and_a_line_counts_them(text):
    for name in ("a.txt", ".git/config", ".git/b.txt", ".a.txt.swp", "sub/.ipynb_checkpoints/a.txt"):
        Path("data", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data", name).write_text("\n\n".join(TEXTS) if name == "a.txt" else "a-token\n")
    sources, lines = sources_of(text, None)
    (line,) = lines
    assert line.startswith("left out: 3 hidden files or folders (.a.txt.swp, .git, sub/.ipynb_checkpoints); to read")
    sample = sample_of(sources)
    assert sample
    assert [sample.documents, *(b"a-token" in one for one in sample.texts)] == [1, False]


def test_a_folder_that_cannot_be_listed_is_not_called_missing():
    Path("data").mkdir()
    Path("data/a.txt").write_text(UMLAUTS)
    for name, target, said in (
        ("loop", ".", r"data/loop: links to a directory above itself"),
        ("gone", "nowhere", r"data/gone: links to nowhere, which doesn't exist"),
        (os.fsdecode(b"caf\xe9"), "a.txt", r"data/caf\xe9: the name isn't UTF-8"),
    ):
        Path("data", name).symlink_to(target)
        line = refused_here(2, "launch", "init", "--text", "data")
        assert line.startswith("error: --text: ")
        assert said in line
        Path("data", name).unlink()


@each(
    "name, content, options",
    [
        ("a.jsonl", JSON_LINES, {}),
        ("a.csv", as_csv(["id", "body"], *CSV_ROWS), {"text": "body"}),
        ("a.csv", as_csv(["a; name", "body"], *CSV_ROWS).replace("\r\n", "\n"), {"text": "body"}),
        (
            *("a.tsv", "title\tbody\n" + "".join(f'"{text[:5]}\t{text}\n' for text in TEXTS)),
            {"delimiter": "\t", "quoting": "QUOTE_NONE", "text": "body"},
        ),
    ],
)
def test_the_first_texts_and_what_is_damaged_are_shown(name, content, options):
    Path(name).write_text(content + ("no JSON\n" if name == "a.jsonl" else ""))
    printed = done_here("launch", "init", "--text", name).splitlines()
    assert load("first.corpus.yaml", [], CorpusConfig).sources[0].options == options
    shown = [line.partition(": ")[2] for line in printed if line.startswith("text ")]
    before = "Größe: " if name == "a.jsonl" else ""
    whole = [row[1] if name == "a.csv" else before + text for row, text in zip(CSV_ROWS, TEXTS, strict=True)]
    assert shown == [one[:70].replace("\n", "\\n") + "…" for one in whole[:3]]
    damaged = [line for line in printed if line.startswith("damaged: ")]
    assert damaged == ["damaged: 1 record beside 60: a.jsonl: line 61: " + NO_JSON] * (name == "a.jsonl")


NO_JSON = "expected a JSON object: Expecting value: line 1 column 1 (char 0)"


def make(kind: str) -> None:
    """A folder `data`, written by Hugging Face's library as users do."""
    from datasets import Dataset, DatasetDict  # takes seconds

    rows = [{"id": number, "title": text[:9], "body": text} for number, text in enumerate(TEXTS)]
    nested = [{"doc": {"title": row["title"], "text": row["body"]}} for row in rows]
    whole = Dataset.from_list(rows)
    Path("data").mkdir()
    match kind:
        case "csv":
            whole.to_csv("data/a.csv", sep=";")
        case "nested":
            Dataset.from_list(nested).to_json("data/a.json")
        case "saved":
            whole.save_to_disk("data", num_shards=2)
        case "splits":
            of = {one: [{"body": f"{one} {text}"} for text in TEXTS] for one in ("train", "validation", "test")}
            DatasetDict({one: Dataset.from_list(own) for one, own in of.items()}).save_to_disk("data")
        case "parquet":
            Path("data/README.md").write_text("# A data set")
            whole.to_parquet("data/train-00000-of-00001.parquet")
        case "mixed":
            Path("data/a.json").write_text("".join(json.dumps(row) + "\n" for row in rows[:30]))
            Path("data/b.txt").write_text("\n\n".join(TEXTS[30:]))
            Path("data/c.txt.xz").write_bytes(b"\xfd7zXZ\0\0")


@each(
    "kind, formats, column",
    [
        ("csv", ["csv"], "body"),
        ("nested", ["jsonl"], "doc.text"),
        ("saved", ["arrow"], "body"),
        ("splits", ["arrow", "arrow"], "body"),
        ("parquet", ["parquet"], "body"),
        ("mixed", ["jsonl", "text"], "body"),
    ],
)
def test_what_init_writes_for_each_kind_of_folder_builds_and_trains(kind, formats, column):
    make(kind)
    printed = done_here("launch", "init", "--text", "data")
    corpus = load("first.corpus.yaml", [], CorpusConfig)
    assert [source.format for source in corpus.sources] == formats
    assert {source.options.get("text") for source in corpus.sources if source.format != "text"} <= {column}
    if kind == "splits":
        assert [source.split for source in corpus.sources] == ["train", "validation"]
        assert "left out: the split 'test'" in printed
    if kind == "mixed":
        assert "left out: 1 file: c.txt.xz: an xz archive: decompress it with xz -d" in printed
    done_here("data-pipeline", "build", "first.corpus.yaml")
    finished = open_corpus("corpora/first")
    assert sum(split.documents for split in finished.manifest.splits.values()) >= 60
    setup = prepare(load("first.run.yaml", [], RunConfig), World.on_this_node())
    assert setup.warnings == []
    assert setup.config.schedule.warmup_steps < setup.config.run.max_steps


@each(
    "name, content, format_",
    [
        ("a.xml.bz2", SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2", "wikipedia"),
        ("a.json.gz", SAMPLES / "c4-train.00000-of-01024-first1000.json.gz", "jsonl"),
        ("a.txt", b'{"text": "a"}\n{"text": "b"}\n', "jsonl"),  # first bytes say more than the name
        ("wiki_00", b'<doc id="1" url="u" title="A">\nA\n\nText.\n</doc>\n', "wikiextractor"),
        ("a.py", b"import os\n", "text"),
        ("a.tex", b"\\section{A}\n", "text"),
        ("a.html", b"<!doctype html>\n<p>Text.\n", "text"),
        ("a.htm", b"<p>Text.\n", "text"),
        ("a.C.gz", gzip.compress(b"int main;\n"), "text"),
    ],
)
def test_a_format_follows_from_the_name_and_the_first_bytes(name, content, format_):
    Path("data").mkdir()
    Path("data", name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    for text in ("data", f"data/{name}"):
        assert [source.format for source in sources_of(text, None)[0]] == [format_]


CHANCE = random.Random(1)
MOLECULES = ["".join(CHANCE.choices("CNOcn1=()", k=CHANCE.randint(15, 57))) for _ in range(1990)] + ["CCO"] * 10
PROSE = [line for text in TEXTS for line in textwrap.wrap(text, 60)]  # 60 texts of 300 words
SENTENCES = [f"{text[: CHANCE.randint(20, 150)]}." for text in TEXTS for _ in range(20)]
CODE = ["def f():", "    return 1", "", ""] * 400


@each(
    "lines, by",
    [
        (MOLECULES, "line"),
        (SENTENCES, "line"),
        (MOLECULES[:900], "document"),  # few
        (PROSE, "document"),  # wrapped
        (CODE, "document"),
        ([text for text in TEXTS for _ in range(20)], "document"),  # long: each may be a text of its own
    ],
)
def test_a_line_is_a_document_where_lines_are_short_and_many(lines, by):
    Path("a.txt").write_text("\n".join(lines) + "\n")
    assert sources_cut("a.txt") == by
    assert sources_cut("a.txt", "paragraph") == "paragraph"


def sources_cut(text: str, sample_by: SampleBy | None = None) -> str:
    """What becomes a document of the plain text at `text`."""
    (source,) = cut(sources_of(text, None)[0], sample_by)[0]
    return str(source.options["sample_by"])


def test_molecules_are_documents_without_duplicates_of_which_enough_are_held_out():
    """2,000 lines: each is a document, the ten equal ones are kept once, and chance holds out four of T5's rows."""
    Path("a.smi").write_text("\n".join(MOLECULES))
    printed = done_here("launch", "init", "--text", "a.smi")
    assert "format text, a line a document. Other: --sample-by document" in printed
    corpus = load("first.corpus.yaml", [], CorpusConfig)
    assert sample_of(corpus.sources).documents == 2000
    assert (corpus.dedup.steps, corpus.split.by) == (["documents"], "hash")
    size = Path("a.smi").stat().st_size
    assert corpus.split.validation_fraction * size >= 4 * 568 * 4 * 0.95  # 4 bytes a token


def test_what_the_tokenizer_would_lose_is_said_where_it_is_much():
    """Programs lose their lines and indentation. Prose loses line breaks and a rare ²: that is the usual case."""
    programs, prose, wide = Path("programs"), Path("prose"), Path("wide")
    for folder in (programs, prose, wide):
        folder.mkdir()
    for number in range(20):
        lines = [f"def f{number}(a{line}):\n    return [\n        a{line}\n    ]\n" for line in range(40)]
        (programs / f"{number}.py").write_text("\n".join(lines))
        (prose / f"{number}.txt").write_text("\n".join(PROSE[number::20]) + "\n\nIt has 9 m².  Ends.\n")
        (wide / f"{number}.txt").write_text("".join(f"文章{number}，终于。\n" for number in range(30)))
    lost = {}
    for folder in (programs, prose, wide):
        printed = done_here("launch", "init", folder.name, "--text", folder.name).replace("\n    ", " ")
        lost[folder.name] = [line for line in printed.splitlines() if line.startswith("tokenizer: ")]
    way_out = r".* a tokenizer that is trained with tokenizer.normalization: identity changes nothing"
    (of_programs,), (of_wide,) = lost["programs"], lost["wide"]
    assert re.fullmatch("tokenizer: line breaks and indentation are lost: normalization .*" + way_out, of_programs)
    assert re.fullmatch("tokenizer: normalization changes line breaks .* and other .*，" + way_out, of_wide)
    assert lost["prose"] == []


@each("number", [0, 1, 2])
def test_a_sampled_text_that_ends_in_a_character_is_shown(number):
    """Of 20 files, 15,000 bytes of each are read: a character of two bytes lies across that end, or doesn't."""
    Path("a").mkdir()
    for one in range(20):
        Path(f"a/{one}.txt").write_text("a" * number + "ж " * 9000 + str(one))
    sample = sample_of(sources_of("a", None)[0])
    assert sample is not None
    assert sample.shown()[0] == "text 1: " + ("a" * number + "ж " * 9000)[:70] + "…"


@each("name", ["a.fasta", "a.fa.gz", "a.txt"])
def test_of_fasta_each_sequence_is_a_document_without_its_header(name):
    content = "".join(f">sp|{number}\n{'MKTAYIAK' * 5}\n{'QRQISF' * 30}\n" for number in range(60)).encode()
    Path(name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert "format fasta" in done_here("launch", "init", "--text", name)
    corpus = load("first.corpus.yaml", [], CorpusConfig)
    found = sample_of(corpus.sources)
    assert (found.documents, found.texts) == (60, [("MKTAYIAK" * 5 + "QRQISF" * 30).encode()])
    assert (corpus.cleaning.profile, corpus.dedup.documents) == ("none", True)
    assert sources_of(name, "text")[0][0].format == "text"
    for other in (b"> quoted\nAnd an answer of words.\n\n> again\n", b">>> import os\n>>> os\n"):
        assert look_of_bytes(other).formats == ("text",)


def look_of_bytes(content: bytes) -> Look:
    Path("other.txt").write_bytes(content)
    found = look_of("other.txt")
    assert found is not None
    return found


@each("number", [1, 19, 20])
def test_of_few_documents_some_are_held_out_or_a_line_says_why_not(number):
    pages = gzip.decompress(next(SAMPLES.glob("c4-train*.json.gz")).read_bytes()).splitlines(keepends=True)
    Path("a.jsonl").write_bytes(b"".join(pages[100 : 100 + number]))
    done = run_here("launch", "init", "--text", "a.jsonl")
    if number < 20:
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: --text: holds {number} document")
        assert not Path("first.run.yaml").exists()
        return
    assert run_here("data-pipeline", "build", "first.corpus.yaml").returncode == 0
    prepare(load("first.run.yaml", [], RunConfig), World.on_this_node())  # refuses a corpus without validation rows


@pytest.mark.slow
def test_a_vocabulary_is_one_that_the_text_can_fill():
    """sentencepiece says what it can get out of the text; half of that beyond the characters is asked for."""
    Path("a.txt").write_text("\n\n".join(TEXTS))
    sample = sample_of(sources_of("a.txt", None)[0])
    most = largest_vocabulary(TokenizerConfig(), sample.texts)
    characters = len(set("".join(TEXTS)) - {" "})
    assert characters < sample.vocabulary(32_000) <= most  # five words, however often, give few
    prose = sample_of(sources_of(str(SAMPLES / "c4-train.*.json.gz"), None)[0])
    assert 3_000 < prose.vocabulary(32_000) < largest_vocabulary(TokenizerConfig(), prose.texts) * 4
    assert prose.vocabulary(1_000) == 1_000


# --- what fits the machine


def test_an_hour_is_an_hour_a_faster_machine_takes_a_larger_model_and_a_small_text_ends_sooner():
    """1 M parameters on two cores; on eight H100 a model of 200 M or more. Tokens are 20 a parameter or more."""
    lengths, found = (512, 114), []
    for machine in (
        TWO_CORES,
        Machine(1, "1 × NVIDIA H100", 989.4e12, "by its data sheet", "bf16"),
        Machine(8, "8 × NVIDIA H100", 8 * 989.4e12, "by its data sheet", "bf16"),
    ):
        first_run = run_within(1.0, SIZES, machine, 32_000, 100, lengths, INF)
        assert first_run.steps * first_run.seconds == pytest.approx(3600, rel=0.01)
        assert first_run.steps >= 2000
        parameters = models.meta_model(first_run.config).num_parameters()
        assert first_run.steps * first_run.batch * sum(lengths) > 20 * parameters
        found.append(SIZES.index(first_run.model))
    assert found[0] == 0
    assert found == sorted(found)
    assert found[2] >= SIZES.index("t5gemma2-214m")
    small = run_within(1.0, SIZES, TWO_CORES, 1000, 100, lengths, rows=100)  # read 40 times
    assert (small.steps * small.batch, small.model, small.batch <= 100) == (4000, "t5gemma2-1.2m", True)


@each(
    "options, hours", [(["--model", "t5-v1.1-small"], 1), (["--family", "t5", "--size", "small", "--hours", "50"], 50)]
)
def test_a_model_that_the_user_names_gets_the_steps_that_fit(options, hours):
    """T5 small, 106.3 GFLOP a row, at 0.6 · 512 / 662 of 200 GFLOP/s: 0.87 rows a second."""
    printed = done_here("launch", "init", *options, "--text", "data/*.jsonl.gz")
    rows = hours / 1.1 * 3600 * (0.6 * 512 / 662 * 200e9) / 106.3e9  # evaluations take a tenth of the training's time
    run = load("first.run.yaml", [], RunConfig)
    assert run.run.max_steps * run.batch.global_batch_size == pytest.approx(rows, rel=0.01)
    assert run.run.expected_hours == pytest.approx(hours / 1.1, rel=0.01)
    assert "model: t5-v1.1-small; the run reads " in printed
    assert run.precision == "fp32"


@each(
    "device, flops, known, precision",
    [
        (("NVIDIA H100 80GB HBM3", 9), 2 * 989.4e12, "by its data sheet", "bf16"),
        (("Tesla V100", 7), 2 * 20e12, "guessed: an unknown GPU", "fp32"),
    ],
)
def test_the_speed_of_gpus_is_that_of_their_data_sheet(monkeypatch, device, flops, known, precision):
    monkeypatch.setattr(first_machine, "device_type", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    of_device = SimpleNamespace(name=device[0], major=device[1])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: of_device)
    assert THIS_MACHINE() == Machine(2, f"2 × {device[0]}", flops, known, precision)


def test_the_first_metrics_come_within_a_minute_and_two_thirds_of_the_steps_have_long_spans():
    run_here("launch", "init")
    corpus, run = load("first.corpus.yaml", [], CorpusConfig), load("first.run.yaml", [], RunConfig)
    first_run = run_within(1.0 / 1.1, SIZES, TWO_CORES, 32_000, 100, (512, 114), INF)
    a_row = first_run.seconds / first_run.batch
    assert run.tracking.log_every_steps * run.batch.global_batch_size * a_row <= 12
    (stage,) = run.data.curriculum
    assert stage.until_step == pytest.approx(2 / 3 * run.run.max_steps, abs=1)
    assert stage.objective.noise_density > corpus.rows.objective.noise_density
    assert stage.objective.raw_length == corpus.rows.objective.raw_length


@each("steps, batch, passes", [(156, 8, 4), (156, 8, 1), (161, 32, 4), (2000, 8, 4), (100_000, 128, 4)])
def test_evaluations_take_a_tenth_of_the_time_of_training_at_most(steps, batch, passes):
    """A forward pass takes a third of the time of training on a row. 20 evaluations of 256 rows that are passed four
    times would take 6,827 rows' time: more than five times that of 156 steps of 8 rows."""
    run = FirstRun("m", model_named("t5gemma2-1.2m"), steps, batch, batch * 0.5, 626)
    found = Evaluations.of(run, passes)
    times = steps / found.every_steps
    assert 4.5 <= times <= 20
    assert 8 <= found.rows <= 256
    assert found.seconds == pytest.approx(times * found.rows * passes / 3 * 0.5)
    assert found.seconds <= 0.1 * steps * batch * 0.5
    if steps == 100_000:
        assert (found.rows, found.every_steps) == (256, 5000)


@each("family, writes", [("t5gemma2", True), ("gpt2", True), ("bert", False)])
def test_a_run_writes_samples_if_its_family_writes_text(family, writes):
    """MLflow's page of a run names their table."""
    printed = done_here("launch", "init", "--family", family).replace("\n    ", " ")
    run = load("first.run.yaml", [], RunConfig)
    hooks = {hook.hook: hook for hook in run.evaluation}
    assert ("samples" in hooks) == writes
    assert all(hook.every_steps <= run.run.max_steps / 4 for hook in hooks.values())
    assert re.search(r"steps: .* of which evaluations take \d", printed)


@each("length, packing", [(64, "complete_documents"), (2048, "concatenate")])
def test_the_users_length_and_packing_suit_the_curriculum_and_have_sentinels_enough(length, packing):
    done_here("launch", "init", "--inputs-length", str(length), "--packing", packing)
    corpus, run = load("first.corpus.yaml", [], CorpusConfig), load("first.run.yaml", [], RunConfig)
    assert (corpus.rows.objective.shape[0], corpus.rows.packing) == (length, packing)
    (stage,) = run.data.curriculum
    assert stage.objective.raw_length == corpus.rows.objective.raw_length
    assert corpus.tokenizer.sentinels >= max(corpus.rows.objective.sentinels, stage.objective.sentinels)
