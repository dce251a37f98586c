"""`launch init` writes files that load, fit each other and are never overwritten."""

import argparse
import csv
import gzip
import io
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_pipeline
from data_pipeline.base.config_file import load
from data_pipeline.config import CorpusConfig, SourceConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.tokenizer.sentencepiece import SentencePieceConfig, largest_vocabulary
from data_pipeline.stages import tokenizer
from data_pipeline.stages.inputs import list_inputs
from launch.tools.scaffold import machine as first_machine
from launch.tools.scaffold.files import SERIES
from launch.tools.scaffold.machine import FirstRun, Machine, model_named, run_within
from launch.tools.scaffold.text import Sample, sample_of, source_of
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models import FAMILIES
from pretrain.run.world import World
from pretrain.training.prepare import prepare
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.tables import each

SAMPLES = Path(data_pipeline.__file__).with_name("samples")
CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = Path(__file__).parents[3] / "docs/results"
INF = float("inf")
MOLECULES = [f"{'C' * (number % 20)}c1ccc(Br)cc1[nH]{'N' * (number // 20)}" for number in range(400)]
MOLECULES_RECIPE = load(CONFIGS / "corpora/molecules.yaml", [], CorpusConfig)
SIZES = SERIES["t5gemma2"]
THIS_MACHINE = Machine.this
TWO_CORES = Machine(0, "2 cores, no GPU", 200e9, "measured in fp32", "fp32")
# of each family one, and those that differ in their positions
MODELS = ["t5-v1.1-xxl", "bart", "bert", "gpt2-small", "decoder-only-yan2024-15m"]
WORDS = ["one", "two", "tree", "house", "sea"]
TEXTS = [
    " ".join(f"{word}{number % 7}" for word in random.Random(number).choices(WORDS, k=300)) for number in range(60)
]
CSV_ROWS = [[str(1_000_001 + number), text.replace(" ", "\n", 3)] for number, text in enumerate(TEXTS)]
JSON_ROWS = [{"text": f"Größe: {text}"} for text in TEXTS]
JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in JSON_ROWS)
UMLAUTS = "\n\n".join(row["text"] for row in JSON_ROWS)


@pytest.fixture(autouse=True)
def _machine(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "this", lambda: TWO_CORES)


def first_files(*options: str, name: str = "first") -> tuple[CorpusConfig, RunConfig, str]:
    """The files that `launch init` writes, and what it prints."""
    printed = done_here("launch", "init", name, *options)
    return load(f"{name}.corpus.yaml", [], CorpusConfig), load(f"{name}.run.yaml", [], RunConfig), printed


def looked_at(text: str) -> tuple[SourceConfig, Sample]:
    source, files, _ = source_of(text, None, None)
    return source, sample_of(source, files)


@each("model", MODELS)
def test_the_files_of_every_family_load_and_fit_each_other(model):
    """The run writes samples, whose table MLflow's page of the run names, if its family writes text."""
    Path("a.txt").write_text("\n\n".join(TEXTS))
    corpus, run, _ = first_files("--model", model, "--text", "a.txt")
    assert run.data.train[0].corpus == run.data.validation[0].corpus == corpus.output == "corpora/first"
    assert corpus.rows.objective.name in FAMILIES[run.model.family].objectives
    assert run.model.longest_sequence is None or run.model.longest_sequence >= max(corpus.rows.objective.shape)
    assert corpus.rows.objective.problems(tokenizer.expected(corpus.tokenizer)) == []
    assert (run.model.vocab_size, run.model.pad_id, run.model.eos_id) == (None, 0, 1)  # a trained tokenizer's
    assert any(hook.hook == "samples" for hook in run.evaluation) == (run.model.family != "encoder_only")
    assert all(hook.every_steps <= run.run.max_steps / 4 for hook in run.evaluation)


def test_the_choices_and_the_next_two_commands_are_printed():
    lines = done_here("launch", "init").splitlines()
    machine, model, objective, optimizer, steps, *rest = [one for one in lines if one[:4] != "text"]
    assert machine.startswith("machine: 2 cores, no GPU, 200 GFLOP/s in wide matmuls")
    assert model.startswith("model: t5gemma2-1.2m; the run reads ")
    assert "--model t5gemma2, t5, bart, t5gemma, " in model
    assert objective == "objective: span_corruption, rows of 568 tokens"
    assert optimizer.startswith("optimizer: muon; half of each row is masked for two thirds of the steps, ")
    assert steps.startswith("steps: ")
    assert rest == [
        "wrote first.corpus.yaml and first.run.yaml. Next:",
        "  data-pipeline build first.corpus.yaml",
        "  launch local first.run.yaml",
    ]
    assert list_inputs(load("first.corpus.yaml", [], CorpusConfig).sources[0]).files  # the text that ships


@each("files, lines, part", [(2, 400, 256), (5, 7273, 400), (20, 100, None)])
def test_a_text_file_is_a_document_and_few_are_cut_so_that_their_ends_can_be_held_out(files, lines, part):
    """5 files of 7,273 lines of 11 bytes are 1,000 parts of 400 bytes; no part has fewer than 256."""
    Path("books").mkdir()
    for number in range(files):
        Path(f"books/{number}.txt").write_text("One line.\n\n" * lines)
    corpus, _, printed = first_files("--text", "books")
    assert corpus.sources[0].options == {"sample_by": "document", **({"max_document_bytes": part} if part else {})}
    assert corpus.split.by == ("files" if files == 20 else "position")
    steps = [step.step for step in corpus.key_steps]  # files of text have no URL
    assert steps == (["documents"] if files == 20 else [])
    assert "format text, a file a document; --sample-by chooses" in printed


def test_lines_are_documents_if_the_user_says_so():
    Path("a.smi").write_text("CCO\n" + "".join(f"{'CN' * number}O\n" for number in range(1, 200)))
    corpus, _, printed = first_files("--text", "a.smi", "--sample-by", "line")
    assert (corpus.sources[0].options, corpus.split.by) == ({"sample_by": "line"}, "hash")
    assert "format text, a line a document;" in printed


@each("files", [3, 40])
def test_no_held_out_text_stands_between_training_text_of_its_file(files):
    """Of many files some are held out whole, of few the end of the last."""
    Path("books").mkdir()
    for number in range(files):
        Path(f"books/{number}.txt").write_text("\n\n".join(TEXTS[number : number + 20]))
    done_here("launch", "init", "--text", "books")
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
    line = refused_here(2, "launch", "init", "c", "--corpus", "a corpus", "--model", "gpt2")
    assert line.startswith("error: --model: gpt2-small doesn't learn span_corruption; expected one of t5gemma2, t5, ")


@each("existing", ["first.run.yaml", "first.corpus.yaml"])
def test_an_existing_file_stays_and_nothing_is_written(existing):
    Path(existing).write_text("mine")
    line = refused_here(2, "launch", "init")
    assert line == f"error: {existing}: exists already; choose another NAME"
    assert {path.name: path.read_text() for path in Path().iterdir()} == {existing: "mine"}


@each(
    "arguments, said",
    [
        (["../x"], "NAME: '../x': expected letters, digits"),
        (["--model", "mt5"], "--model: 'mt5'; expected a file of configs/models, or t5gemma2, t5, bart, "),
        (["--text", "data"], "--text: data: no such file"),
        (["--text", "a.txt.xz"], "--text: a.txt.xz: an xz archive: decompress it with xz -d"),
        (["--text", "a.*"], "--text: a.*: matches files of several formats; give a narrower glob, or a folder"),
        (["--text", "saved"], "--text: saved: holds the splits of a DatasetDict; give one of its folders: saved/train"),
        (["--text", "a.jsonl", "--format", "txt"], "--format: 'txt'; expected one of wet, warc, c4, wikipedia, "),
        (["--format", "csv"], "--format: for --text"),
        (["--text", "a.jsonl", "--sample-by", "line"], "--sample-by: for plain text, and the format is jsonl"),
        (["--text", "a.jsonl", "--corpus", "b"], "--text: not with --corpus, which has a text"),
        (["--corpus", "nowhere"], "--corpus: nowhere/manifest.json: no such file; data-pipeline build CORPUS.yaml mak"),
    ],
)
def test_wrong_arguments_are_one_line_and_nothing_is_written(arguments, said):
    Path("saved").mkdir()
    Path("saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    Path("a.txt.xz").write_bytes(b"\xfd7zXZ\0\0")
    Path("a.jsonl").write_text('{"text": "Text."}\n')
    before = sorted(Path().iterdir())
    line = refused_here(2, "launch", "init", *arguments)
    assert line.startswith(f"error: {said}")
    assert sorted(Path().iterdir()) == before


# --- what users have


def as_csv(*rows: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


@each(
    "name, content, said",
    [
        (
            "a.jsonl",
            JSON_LINES.encode("utf-16"),
            r"a.jsonl: line 1: .* {encoding: utf-16}",
        ),
        ("a.txt", UMLAUTS.encode("utf-16"), "a.txt: binary data or UTF-16; convert it to text in UTF-8"),
        (
            "a.txt",
            UMLAUTS.encode("latin-1"),
            r"60 records .*: a.txt: .* {encoding: cp1252}",
        ),
        (
            "a.csv",
            as_csv(["n", "a"], ["1", UMLAUTS]).decode().encode("latin-1"),
            r"a.csv: line 2: .* {encoding: cp1252}",
        ),
        ("a.json", json.dumps(JSON_ROWS, indent=1).encode(), "a.json: one JSON array, not JSON Lines: make each of "),
        ("a.json", json.dumps(JSON_ROWS).encode(), "a.json: line 1: expected .* found a JSON list; it looks like one "),
        (
            "a.json",
            json.dumps({"version": "1", "data": JSON_ROWS}).encode(),
            ".*one JSON object with its records",
        ),
        ("a.txt", b"", "a.txt: byte 0: empty file"),
        ("a.txt", b"1 4194304\n" * 50, "holds lists of integers, .* is 4194304; ids go up to 4,194,303 "),
        ("a.txt", b"1 " + b"9" * 400 + b"\n", "holds lists of integers, .* is 9{20}; ids go up to 4,194,303 "),
        (
            "a.smi",
            "".join(f"{one}\tm{number}\n" for number, one in enumerate(MOLECULES)).encode(),
            r"a.smi: expected a molecule in each line, found 'c1ccc\(Br\)cc1\[nH]\\tm0'; .* awk '{print \$1}'$",
        ),
        (
            "a.smi",
            "\n".join(["SMILES Name", *(f"{one} m{number}" for number, one in enumerate(MOLECULES))]).encode(),
            r"a.smi: expected a molecule in each line, found 'SMILES Name'; .* awk 'NR > 1 {print \$1}'$",
        ),
        (
            "a.smi",
            "\n".join([MOLECULES[0], *(f"{one} m{number}" for number, one in enumerate(MOLECULES))]).encode(),
            r"a.smi: expected a molecule in each line, found '[^' ]+ m0'; .* awk '{print \$1}'$",
        ),
        ("a.jsonl", b"\n" * 99, "holds no text"),
        ("a.jsonl", JSON_LINES[: JSON_LINES.index("\n")].encode(), "holds 1 document, .* kB; expected 20 or more"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line_and_nothing_is_written(name, content, said):
    Path("data").mkdir()
    Path("data", name).write_bytes(content)
    for text in ("data", f"data/{name}"):
        line = refused_here(2, "launch", "init", "--text", text)
        assert re.match(f"error: --text: {said}", line), line
    assert [path.name for path in Path().iterdir()] == ["data"]


def test_a_folder_with_the_characters_of_globs_is_a_folder():
    folder = Path("data [v2]")
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(UMLAUTS)
    (folder / "c.csv").write_bytes(as_csv(["id", "text"], ["1", "Text."]))
    corpus, _, printed = first_files("--text", str(folder))
    assert "left out: 1 file that can't be read as text: c.csv\n" in printed
    assert [Path(file.path).name for file in list_inputs(corpus.sources[0]).files] == ["a.txt", "b.txt"]


def test_a_path_that_would_be_an_interpolation_is_refused():
    Path("${x}.txt").write_text(UMLAUTS)
    line = refused_here(2, "launch", "init", "--text", "${x}.txt")
    assert line.endswith("${x}.txt: `${` begins an interpolation in the corpus file; rename the file or folder")


def test_hidden_files_are_no_text_for_the_first_files_and_a_line_counts_them():
    for name in ("a.txt", ".git/config", ".git/b.txt", ".a.txt.swp", "sub/.ipynb_checkpoints/a.txt"):
        Path("data", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data", name).write_text("\n\n".join(TEXTS) if name == "a.txt" else "a-token\n")
    source, files, lines = source_of("data", None, None)
    assert lines[0].startswith(
        "left out: 3 hidden files or folders (.a.txt.swp, .git, sub/.ipynb_checkpoints); to read"
    )
    assert b"a-token" not in b"".join(sample_of(source, files).texts)


@each(
    "name, content, options",
    [
        ("a.jsonl", JSON_LINES.encode() + b"no JSON\n", {}),
        ("a.csv", as_csv(["id", "body"], *CSV_ROWS), {"text": "body"}),
        (
            *("a.tsv", b"title\tbody\n" + "".join(f'"{text[:5]}\t{text}\n' for text in TEXTS).encode()),
            {"delimiter": "\t", "quoting": "QUOTE_NONE", "text": "body"},
        ),
    ],
)
def test_the_first_texts_are_shown(name, content, options):
    Path(name).write_bytes(content)
    corpus, _, printed = first_files("--text", name)
    assert corpus.sources[0].options == options
    shown = re.findall("(?m)^text [1-3]: (.*)$", printed)
    before = "Größe: " if name == "a.jsonl" else ""
    whole = [row[1] if name == "a.csv" else before + text for row, text in zip(CSV_ROWS, TEXTS, strict=True)]
    assert shown == [one[:70].replace("\n", "\\n") + "…" for one in whole[:3]]


def test_a_sampled_text_may_end_within_a_character():
    """Of 200 files, 5,000 bytes of each are read: 4 of a, 999 times 5 of жя and a space, and half of ж."""
    Path("a").mkdir()
    text = "aaaa" + "жя " * 2000
    for number in range(200):
        Path(f"a/{number:03}.txt").write_text(text)
    _, sample = looked_at("a")
    assert [len(one) for one in sample.texts] == [5000]
    assert sample.shown() == [f"text 1: {text[:70]}…"]
    assert sample.vocabulary(32_000) > 0


def make(kind: str) -> None:
    """A folder `data`, written by Hugging Face's library as users do."""
    from datasets import Dataset  # takes seconds

    rows = [{"id": number, "title": text[:9], "body": text} for number, text in enumerate(TEXTS)]
    whole = Dataset.from_list(rows)
    Path("data").mkdir()
    match kind:
        case "csv":
            whole.to_csv("data/a.csv", sep=";")
        case "nested":
            nested = [{"doc": {"title": row["title"], "text": row["body"]}} for row in rows]
            Dataset.from_list(nested).to_json("data/a.json")
        case "saved":
            whole.save_to_disk("data", num_shards=2)
        case "parquet":
            Path("data/README.md").write_text("# A data set")
            whole.to_parquet("data/train-00000-of-00001.parquet")


@each(
    "kind, format_, column, left_out",
    [
        ("csv", "csv", "body", None),
        ("nested", "jsonl", "doc.text", None),
        ("saved", "arrow", "body", "2 files that can't be read as arrow: dataset_info.json, state.json"),
        ("parquet", "parquet", "body", "1 file that can't be read as parquet: README.md"),
    ],
)
def test_what_init_writes_for_each_kind_of_folder_builds_and_trains(kind, format_, column, left_out):
    make(kind)
    corpus, _, printed = first_files("--text", "data")
    (source,) = corpus.sources
    assert (source.format, source.options["text"]) == (format_, column)
    assert re.findall("(?m)^left out: (.*)$", printed) == ([left_out] if left_out else [])
    done_here("data-pipeline", "build", "first.corpus.yaml")
    finished = open_corpus("corpora/first")
    assert sum(split.documents for split in finished.manifest.splits.values()) == 60
    setup = prepare(load("first.run.yaml", [], RunConfig), World.on_this_node())
    assert setup.warnings == []
    assert setup.config.schedule.warmup_steps < setup.config.run.max_steps


FASTA = "".join(f">sp|{number}\n{'MKTAYIAK' * 5}\n{'QRQISF' * 30}\n" for number in range(60)).encode()


@each(
    "name, content, format_",
    [
        ("a.xml.bz2", SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2", "wikipedia"),
        ("a.json.gz", SAMPLES / "c4-train.00000-of-01024-first1000.json.gz", "jsonl"),
        ("a.txt", b'{"text": "a"}\n{"text": "b"}\n', "jsonl"),  # first bytes say more than the name
        ("wiki_00", b'<doc id="1" url="u" title="A">\nA\n\nText.\n</doc>\n', "wikiextractor"),
        ("a.py", b"import os, re\n", "text"),
        ("a.html", b"<!doctype html>\n<p>Text.\n", "text"),
        ("a.C.gz", gzip.compress(b"int main;\n"), "text"),
        ("a.fa.gz", gzip.compress(FASTA), "fasta"),
        ("a.txt", FASTA, "fasta"),
        ("a.md", b"> quoted\nAnd an answer of words.\n\n> again\n", "text"),
    ],
)
def test_a_format_follows_from_the_name_and_the_first_bytes(name, content, format_):
    Path("data").mkdir()
    Path("data", name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    for text in ("data", f"data/{name}"):
        source, sample = looked_at(text)
        assert (source.format, source.path) == (format_, text)
    if format_ == "fasta":  # a sequence is a document, without its header
        assert (sample.documents, sample.texts) == (60, [("MKTAYIAK" * 5 + "QRQISF" * 30).encode()])


def sequences(letters: str, length: int) -> list[str]:
    return ["".join(random.Random(number).choices(letters, k=20 + number % length)) for number in range(200)]


NUMBERS = [[(number * place) % 300 for place in range(number % 30 + 2)] for number in range(200)]


def write_found(what: str) -> str:
    """Writes documents that are no text, and returns their place."""
    as_fasta = "".join(f">{number}\n{one}\n" for number, one in enumerate(sequences("ACDEFGHIKLMNPQRSTVWY", 90)))
    match what:
        case "proteins":
            Path("a.fa").write_text(as_fasta)
            return "a.fa"
        case "nucleotides":
            Path("a.fna").write_text(
                "".join(f">{number}\n{one}\n" for number, one in enumerate(sequences("ACGTn", 90)))
            )
            return "a.fna"
        case "SMILES":
            Path("a.smi").write_text("\n".join([*MOLECULES, "a line of 400"]))
            return "a.smi"
        case "lists of integers":
            Path("a.txt").write_text("".join(" ".join(map(str, one)) + "\n" for one in [[*range(299)], *NUMBERS]))
            return "a.txt"
        case "column":
            rows = [{"user": f"u{number}", "items": one} for number, one in enumerate([[*range(299)], *NUMBERS])]
            pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
            return "a.parquet"
    Path("code").mkdir()
    for module in (argparse, csv, gzip, json, random, re):
        Path("code", f"{module.__name__}.py").write_text(Path(module.__file__).read_text())
    return "code"


@each(
    "what, kind, longest, row, recipe",
    [
        ("proteins", {"kind": "symbols", "pattern": "."}, 109, 112, "proteins"),
        ("nucleotides", {"kind": "symbols", "pattern": "."}, 109, 112, None),
        ("SMILES", {"kind": "bpe", "pattern": MOLECULES_RECIPE.tokenizer.pattern}, 13, 16, "molecules"),
        ("lists of integers", {"kind": "ids", "vocab_size": 512}, 299, 304, "items"),
        ("column", {"kind": "ids", "vocab_size": 512}, 299, 304, "items"),
        ("source code", {"kind": "bpe"}, None, None, "code"),
    ],
)
def test_what_is_no_prose_gets_its_tokens_and_rows_that_take_a_document(what, kind, longest, row, recipe):
    corpus, _, printed = first_files("--text", write_found(what))
    assert {key: getattr(corpus.tokenizer, key) for key in kind} == kind
    assert f"found: {'lists of integers' if what == 'column' else what}; tokens: " in printed
    assert re.findall("docs/results/.*", printed) == ([f"docs/results/{recipe}.md"] if recipe else [])
    assert recipe is None or (RECIPES / f"{recipe}.md").exists()
    assert (corpus.cleaning.profile, corpus.dedup.lines, corpus.rows.apply_at) == ("none", False, "load")
    assert corpus.rows.objective.problems(tokenizer.expected(corpus.tokenizer)) == []
    if row:
        assert f", the longest {longest}\n" in printed
        assert corpus.rows.packing == "complete_documents"
        assert row <= corpus.rows.objective.raw_length < row + 8  # span corruption has no rows of some lengths
    else:
        assert corpus.rows.packing == "concatenate"


def test_sequences_that_are_longer_than_a_row_are_counted():
    Path("a.fa").write_text("".join(f">{number}\n{'MKTAY' * (10 * number)}\n" for number in range(1, 41)))
    corpus, _, printed = first_files("--text", "a.fa")
    assert corpus.rows.objective.raw_length == 1024
    assert "longer than a row: 20 of 40, which become several rows" in printed
    done_here("launch", "init", "b", "--text", "a.fa", "--model", "bart")
    assert load("b.corpus.yaml", [], CorpusConfig).rows.objective.length == 1024  # the positions of bart-base
    line = refused_here(2, "launch", "init", "c", "--text", write_found("nucleotides"), "--model", "bart")
    assert "--model: denoising: needs tokens that begin a word" in line


def test_proteins_are_trained_as_in_their_recipe():
    """With rows that take the longest sequence, 109 residues; a hundredth of the steps is warm-up."""
    corpus, run, _ = first_files("--text", write_found("proteins"))
    of_corpus = load(CONFIGS / "corpora/proteins-prott5.yaml", [], CorpusConfig)
    of_run = load(CONFIGS / "runs/proteins-prott5.yaml", [], RunConfig)
    assert corpus.rows.objective.model_dump() == {**of_corpus.rows.objective.model_dump(), "length": 114}
    assert corpus.tokenizer.model_dump() == of_corpus.tokenizer.model_dump()
    others = {"max_positions", "mup"}
    assert run.model.model_dump(exclude=others) == of_run.model.model_dump(exclude=others)
    assert run.model.widening == 1
    assert run.optimizer.model_dump() == of_run.optimizer.model_dump()
    assert (run.schedule.name, run.schedule.warmup_steps) == ("linear", run.run.max_steps // 100)
    assert run.data.curriculum == []


def test_molecules_are_trained_as_in_their_recipe():
    """With rows that take the longest molecule, and with half of the tokens that a small file gives."""
    corpus, run, _ = first_files("--text", write_found("SMILES"))
    rows = corpus.rows.objective
    assert rows.model_dump() == MOLECULES_RECIPE.rows.objective.for_rows_of(rows.raw_length).model_dump()
    assert rows.raw_lengths.tolist() == [rows.raw_length] * 3
    others = {"vocab_size"}
    assert corpus.tokenizer.model_dump(exclude=others) == MOLECULES_RECIPE.tokenizer.model_dump(exclude=others)
    assert 258 < corpus.tokenizer.vocab_size < MOLECULES_RECIPE.tokenizer.vocab_size
    assert corpus.sources[0].options == {"sample_by": "line"}
    assert (run.model.family, run.data.curriculum) == ("t5gemma2", [])
    of_t5, _, _ = first_files("--text", "a.smi", "--model", "t5", name="b")
    assert of_t5.rows.model_dump() == corpus.rows.model_dump()


@each("column", ["SMILES", "canonical_smiles"])
def test_a_column_of_molecules_is_read_though_another_is_longer(column):
    rows = [[str(number), one, f"InChI=1S/{'C6H6' * 30}"] for number, one in enumerate(MOLECULES)]
    Path("a.csv").write_bytes(as_csv(["id", column, "inchi"], *rows))
    corpus, _, printed = first_files("--text", "a.csv")
    assert corpus.sources[0].options == {"text": column}
    assert "found: SMILES; tokens: " in printed


@each("letters", ["ACGTacgtn", "ACGTN", "acgtn"])
def test_sequences_are_read_in_upper_case(letters):
    Path("a.fa").write_text("".join(f">{number}\n{one}\n" for number, one in enumerate(sequences(letters, 90))))
    corpus, _, printed = first_files("--text", "a.fa")
    assert corpus.sources[0].options == {"upper": True}
    assert "format fasta, residues in upper case\n" in printed
    assert "found: nucleotides; tokens: 5 symbols" in printed


@each(
    "what, options, ids",
    [("column", ["--model", "bart"], (512, 513)), ("proteins", [], (0, 1)), ("SMILES", [], (0, 1))],
)
def test_what_init_writes_for_no_prose_builds_and_trains(what, options, ids):
    _, run, _ = first_files("--text", write_found(what), *options)
    assert (run.model.pad_id, run.model.eos_id) == ids
    done_here("data-pipeline", "build", "first.corpus.yaml")
    assert prepare(run, World.on_this_node()).warnings == []


def test_of_twenty_documents_some_are_held_out():
    pages = gzip.decompress(next(SAMPLES.glob("c4-train*.json.gz")).read_bytes()).splitlines(keepends=True)
    Path("a.jsonl").write_bytes(b"".join(pages[100:120]))
    done_here("launch", "init", "--text", "a.jsonl")
    done_here("data-pipeline", "build", "first.corpus.yaml")
    prepare(load("first.run.yaml", [], RunConfig), World.on_this_node())  # refuses a corpus without validation rows


@pytest.mark.slow
def test_a_vocabulary_is_one_that_the_text_can_fill():
    """sentencepiece says what it can get out of the text."""
    Path("a.txt").write_text("\n\n".join(TEXTS))
    _, sample = looked_at("a.txt")
    most = largest_vocabulary(SentencePieceConfig(), sample.texts)
    characters = len(set("".join(TEXTS)) - {" "})
    assert characters < sample.vocabulary(32_000) <= most  # five words, however often, give few
    _, prose = looked_at(str(SAMPLES / "c4-train.*.json.gz"))
    assert 3_000 < prose.vocabulary(32_000) < largest_vocabulary(SentencePieceConfig(), prose.texts)
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
        first_run = run_within(1.0, SIZES, machine, 32_100, lengths, INF)
        assert first_run.hours == pytest.approx(1.0, rel=0.01)
        assert first_run.steps >= 2000
        parameters = models.meta_model(first_run.config).num_parameters()
        assert first_run.steps * first_run.batch * sum(lengths) > 20 * parameters
        found.append(SIZES.index(first_run.model))
    assert found[0] == 0
    assert found == sorted(found)
    assert found[2] >= SIZES.index("t5gemma2-214m")
    small = run_within(1.0, SIZES, TWO_CORES, 1100, lengths, rows=100)  # read 40 times
    assert (small.steps * small.batch, small.model, small.batch <= 100) == (4000, "t5gemma2-1.2m", True)


@each("gpus, batch", [(1, 128), (3, 129), (5, 130), (6, 132), (7, 133), (8, 128)])
def test_each_gpu_has_as_many_rows_of_a_step(gpus, batch):
    """The largest batch is 128, rounded up."""
    machine = Machine(gpus, f"{gpus} × NVIDIA H100", gpus * 989.4e12, "by its data sheet", "bf16")
    run = run_within(1.0, SIZES, machine, 32_100, (512, 114), INF)
    assert run.batch == batch
    assert run.hours == pytest.approx(1.0, rel=0.01)


def test_a_model_that_the_user_names_gets_the_steps_that_fit_and_the_first_metrics_come_soon():
    """T5 small, 106.3 GFLOP a row with 32,100 tokens, at 0.6 · 512 / 662 of 200 GFLOP/s: 0.87 rows a second."""
    run = run_within(1.0, ["t5-v1.1-small"], TWO_CORES, 32_100, (512, 114), INF)
    assert run.steps * run.batch == pytest.approx(3600 / 1.1 * (0.6 * 512 / 662 * 200e9) / 106.3e9, rel=0.01)
    _, config, printed = first_files("--model", "t5-v1.1-small", "--hours", "2")
    assert "model: t5-v1.1-small; the run reads " in printed
    assert (config.precision, config.data.curriculum) == ("fp32", [])
    assert config.run.expected_hours == pytest.approx(2 / 1.1, rel=0.01)
    of_step = 3600 * config.run.expected_hours / config.run.max_steps
    assert config.tracking.log_every_steps * of_step <= 12


def test_two_thirds_of_the_steps_have_long_spans():
    corpus, run, _ = first_files()
    (stage,) = run.data.curriculum
    assert stage.until_step == pytest.approx(2 / 3 * run.run.max_steps, abs=1)
    assert stage.objective.noise_density > corpus.rows.objective.noise_density
    assert stage.objective.raw_length == corpus.rows.objective.raw_length
    assert corpus.tokenizer.sentinels >= stage.objective.sentinels


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


@each("steps, batch", [(156, 8), (161, 32), (2000, 8), (100_000, 128)])
def test_evaluations_take_a_tenth_of_the_time_of_training_at_most(steps, batch):
    """A forward pass takes a third of the time of training on a row; `input_use` takes four."""
    run = FirstRun("m", model_named("t5gemma2-1.2m"), steps, batch, batch * 0.5, 626)
    every, rows = run.evaluations
    assert 9 <= steps / every <= 10
    assert 8 <= rows <= 256
    assert steps / every * rows * 4 / 3 * 0.5 <= 0.1 * steps * batch * 0.5
    assert rows == 256 or steps < 100_000
