"""`launch init` writes files that load, fit each other and are never overwritten."""

from pathlib import Path

import pytest

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from data_pipeline.stages import tokenizer
from pretrain.config import RunConfig
from pretrain.models import FAMILIES
from tests.in_process import run_here

# of each family one, and those that differ in their positions
MODELS = (
    *("t5-v1.1-xxl", "bart-base", "bert-base", "gpt2-small", "transformer-base"),
    *("decoder-only-yan2024-15m", "autoregressive-yan2024"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", MODELS)
def test_the_files_of_every_family_load_and_fit_each_other(model):
    done = run_here("launch", "init", "my-1", "--model", model, "--text", "data/*.jsonl.gz")
    assert done.returncode == 0, done.stderr
    corpus, run = load("my-1.corpus.yaml", [], CorpusConfig), load("my-1.run.yaml", [], RunConfig)
    assert run.data.train[0].corpus == run.data.validation[0].corpus == corpus.output == "corpora/my-1"
    assert [(source.format, source.path) for source in corpus.sources] == [("jsonl", "data/*.jsonl.gz")]
    assert corpus.rows.objective.name in FAMILIES[run.model.family].objectives
    assert run.model.longest_sequence is None or run.model.longest_sequence >= max(corpus.rows.objective.shape)
    assert corpus.rows.objective.problems(tokenizer.expected(corpus.tokenizer)) == []
    assert (run.model.vocab_size, run.model.pad_id, run.model.eos_id) == (None, 0, 1)  # a trained tokenizer's


def test_the_next_two_commands_are_printed():
    done = run_here("launch", "init")
    assert done.stdout.splitlines() == [
        "wrote first.corpus.yaml and first.run.yaml. Next:",
        "  data-pipeline build first.corpus.yaml",
        "  launch local first.run.yaml",
    ]
    found = [path for source in load("first.corpus.yaml", [], CorpusConfig).sources for path in files(source.path)]
    assert len(found) == 3  # the text that ships


def files(pattern: str) -> list[Path]:
    return list(Path(pattern).parent.glob(Path(pattern).name))


@pytest.mark.parametrize(("files", "piece"), [(2, 256), (5, 400), (500, 8 << 20)])
def test_a_text_file_is_a_document_and_few_are_cut_so_that_some_can_be_held_out(files, piece):
    """Of 1,000 pieces, 1 % held out is none once in 23,000 times."""
    Path("books").mkdir()
    for number in range(files):
        Path(f"books/{number}.txt").write_text("One line.\n\n" * (7273 if files == 5 else 10))
    done = run_here("launch", "init", "--text", "books", "--format", "text")
    assert done.returncode == 0, done.stderr
    corpus = load("first.corpus.yaml", [], CorpusConfig)
    assert corpus.sources[0].options["sample_by"] == "document"
    assert corpus.sources[0].options.get("max_document_bytes", 8 << 20) == piece
    assert corpus.dedup.steps == (["urls", "documents"] if files == 500 else ["urls"])
    assert "# sample_by: `document` keeps a file in order" in Path("first.corpus.yaml").read_text()


def test_a_finished_corpus_needs_no_corpus_file():
    done = run_here("launch", "init", "b", "--corpus", "s3://bucket/a corpus")
    assert done.stdout.splitlines()[1:] == ["  data-pipeline show 's3://bucket/a corpus'", "  launch local b.run.yaml"]
    assert load("b.run.yaml", [], RunConfig).data.train[0].corpus == "s3://bucket/a corpus"
    assert [path.name for path in Path().iterdir()] == ["b.run.yaml"]


@pytest.mark.parametrize("existing", ["first.run.yaml", "first.corpus.yaml"])
def test_an_existing_file_stays_and_nothing_is_written(existing):
    Path(existing).write_text("mine")
    done = run_here("launch", "init")
    assert (done.returncode, done.stderr) == (2, f"error: {existing}: exists already; choose another NAME\n")
    assert {path.name: path.read_text() for path in Path().iterdir()} == {existing: "mine"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "t5-v1.1-bass"], "--model: configs:models/t5-v1.1-bass.yaml: no such file ships with the package"),
        (["../x"], "NAME: '../x': expected letters, digits"),
        (["--text", "data"], "--text: data: the name doesn't say what format it has; give --format"),
        (["--text", "a", "--format", "txt"], "--format: 'txt'; expected one of wet, warc, c4, wikipedia, "),
        (["--text", "a.txt", "--corpus", "b"], "--text and --corpus: a run has its text from one of them"),
    ],
)
def test_wrong_arguments_are_one_line_and_nothing_is_written(arguments, said):
    done = run_here("launch", "init", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith(f"error: {said}"), done.stderr
    assert list(Path().iterdir()) == []
