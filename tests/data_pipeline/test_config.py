"""Corpus files: all problems are reported at once, each with its key."""

import re
from pathlib import Path

import pytest

from data_pipeline.config import CorpusConfig, SplitConfig
from data_pipeline.corpus.manifest import how_to_build
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.pipeline import build
from data_pipeline.stages import tokenizer
from tests.in_process import run_here
from tests.tables import each

VALID = """
name: a
output: corpora/a
sources:
  - {format: c4, path: a.json.gz}
"""


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.yaml"
    path.write_text(VALID)
    return path


@each(
    "overrides, lines",
    [
        (
            ["tokenizer.vocab_sise=8000", "shards.rows_per_block=many", "sources.0.formt=c4"],
            [
                "shards.rows_per_block: expected integer > 0, got 'many'",
                "sources.0.formt: unknown key; nearest valid key: sources.0.format",
                "tokenizer.vocab_sise: unknown key; nearest valid key: tokenizer.vocab_size",
            ],
        ),
        (  # the nearest key is one of the kind that is meant
            ["rows.objective={name: causal_lm, lenght: 8}", "rows.objective.noise_density=0.1"],
            [
                "rows.objective.lenght: unknown key; nearest valid key: rows.objective.length",
                "rows.objective.noise_density: unknown key",
            ],
        ),
        (
            ["sources.0={format: text, path: a, options: {sampel_by: line, max_record_bytes: x}}"],
            [
                "sources.0.options: format text: max_record_bytes: expected integer, got 'x' "
                "(longer records, in bytes, are noted as damage and skipped)",
                "sources.0.options: format text: sampel_by: unknown key; nearest valid key: sample_by",
            ],
        ),
        (["sources.0.path=[1]"], ["sources.0.path: expected text or list of text, got [1] (the files: a path, a glob"]),
    ],
)
def test_all_problems_are_told_at_once_with_the_nearest_valid_key(corpus_file, overrides, lines):
    with pytest.raises(UserError) as error:
        load(corpus_file, overrides, CorpusConfig)
    for found, expected in zip(sorted(str(error.value).splitlines()), lines, strict=True):
        assert found.startswith(f"{corpus_file}: {expected}")


def test_a_file_that_extends_another_has_the_last_word_and_another_kind_of_a_section_starts_afresh(corpus_file):
    """UL2 has no inputs_length, so the base file's settings of span corruption must not apply to it."""
    corpus_file.write_text(
        VALID + "rows: {end_of_document: true, objective: {name: span_corruption, inputs_length: 64}}"
    )
    child = corpus_file.with_name("child.yaml")
    child.write_text("extends: [corpus.yaml]\nname: b\nrows: {objective: {name: causal_lm, length: 7}}\n")
    config = load(child, [], CorpusConfig)
    rows = config.rows
    assert (config.name, config.output) == ("b", "corpora/a")
    assert (rows.objective.name, rows.objective.length, rows.end_of_document) == ("causal_lm", 7, True)
    assert load(corpus_file, ["rows.objective.name=full_lm"], CorpusConfig).rows.objective.length == 512
    same = load(corpus_file, ["rows.objective={name: span_corruption, noise_density: 0.2}"], CorpusConfig)
    assert same.rows.objective.inputs_length == 64


def test_a_file_that_extends_itself_is_refused(corpus_file):
    corpus_file.write_text(VALID + "extends: [corpus.yaml]\n")
    with pytest.raises(UserError, match="extends itself"):
        load(corpus_file, [], CorpusConfig)


@each(
    "overrides, problem",
    [
        ("rows.objective={name: span_corruption, noise_density: 1.0}", "rows.objective.noise_density: expected"),
        ("rows.packing=examples", "rows: packing: span_corruption needs concatenate or complete_documents"),
        ("rows.objective={name: text_to_text}", "rows: packing: text_to_text needs complete_documents or examples"),
        ("rows.objective={name: masked_lm, next_sentence: true}", "rows: packing: masked_lm needs sentence_pairs"),
        ("sources.0.format=pairs", "rows.objective: span_corruption would lose the targets of the pairs"),
        ("rows.objective.name=span", "rows.objective.name: expected one of span_corruption"),
        ("split.validation_fraction=1.5", "split.validation_fraction"),
        ("sources=[]", "sources"),
        *(
            (f"tokenizer.kind={kind}", f"tokenizer.path: kind {kind} needs the directory of an existing")
            for kind in ("byte_level_bpe", "wordpiece", "tokenizer_json")
        ),
        ("tokenizer.kind=unigram", "tokenizer.kind"),
        ("tokenizer.dictionary=dict.txt", "tokenizer.dictionary: only kind byte_level_bpe takes a dictionary"),
        ("tokenizer.special_tokens=[a,b,a]", "tokenizer.special_tokens: a is listed twice"),
        ("tokenizer.special_tokens=['']", "tokenizer.special_tokens: a name is empty or has white space: ''"),
        ("tokenizer.special_tokens=['a b']", "tokenizer.special_tokens: a name is empty or has white space: 'a b'"),
        ("tokenizer.special_tokens=[<extra_id_3>]", "tokenizer.special_tokens: <extra_id_3> is a sentinel's name"),
        ("tokenizer.sentinels=-1", "tokenizer.sentinels"),
        (
            "tokenizer.byte_fallback=true; tokenizer.vocab_size=259",
            "tokenizer: vocab_size: 259 tokens are too few for byte_fallback, which takes 256",
        ),
    ],
)
def test_impossible_settings_are_refused(corpus_file, overrides, problem):
    with pytest.raises(UserError) as error:
        load(corpus_file, overrides.split("; "), CorpusConfig)
    assert str(error.value).startswith(f"{corpus_file}: {problem}")


def test_every_shipped_corpus_file_is_valid_and_has_what_its_objective_needs():
    files = sorted(Path("configs/corpora").glob("*.yaml"))
    assert files
    for path in files:
        config = load(path, [], CorpusConfig)
        if config.tokenizer.path is None:  # others are not shipped
            assert config.rows.objective.problems(tokenizer.expected(config.tokenizer)) == [], path


@each(
    "overrides, said",
    [
        (["tokenizer.sentinels=5"], "rows.objective: span_corruption: makes up to 28 spans, one sentinel each"),
        (["rows.objective={name: ul2}"], "the vocabulary has no special token [R]"),
        (["rows.objective={name: denoising}"], "mask"),
        (["rows.objective={name: masked_lm}"], "mask"),
    ],
)
def test_a_vocabulary_that_lacks_what_the_objective_needs_is_refused_before_anything_is_read(
    corpus_file, tmp_path, monkeypatch, overrides, said
):
    monkeypatch.chdir(tmp_path)
    Path("a.json.gz").write_bytes(b"")
    with pytest.raises(UserError, match=re.escape(said)):
        build(load(corpus_file, overrides, CorpusConfig))
    assert not Path("corpora").exists()


def test_a_missing_config_exits_with_2(corpus_file):
    done = run_here("data-pipeline", "build", corpus_file.with_name("none.yaml"))
    assert (done.returncode, "none.yaml: no such file" in done.stderr) == (2, True)


@each("folder, said", [("beside", "{}/mine.corpus.yaml"), ("nowhere", "CORPUS.yaml"), ("", "mine.corpus.yaml")])
def test_a_missing_corpus_names_the_file_that_builds_it(tmp_path, monkeypatch, folder, said):
    """The file of the folder given, of the current folder, or that ships."""
    monkeypatch.chdir(tmp_path)
    Path("beside").mkdir()
    Path(folder if folder != "nowhere" else "beside", "mine.corpus.yaml").write_text('output: "corpora/mine"\n')
    folders = [Path(folder)] if folder == "beside" else []
    assert how_to_build("corpora/mine", folders) == f"data-pipeline build {said.format(folder)}"
    assert how_to_build("corpora/c4-en") == "data-pipeline build configs:corpora/c4-published.yaml"


def test_a_thousandth_is_held_out_by_tfds_rule():
    assert SplitConfig(validation_fraction=0.001).ratio == (1, 1000)
    assert SplitConfig(validation_fraction=0.03).ratio == (3, 100)
