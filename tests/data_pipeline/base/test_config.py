"""Corpus files: all problems are reported at once, each with its key. Paths in config files and commands: `~` is the
home directory, and a URL is no local path."""

import inspect
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.core import TyperGroup

import data_pipeline.cli
import launch.cli
import pretrain.cli
from data_pipeline.base import stores
from data_pipeline.base.config_file import Section, load, load_with
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.corpus import how_to_build
from data_pipeline.stages import tokenizer
from data_pipeline.stages.pipeline import build
from pretrain.config import RunConfig
from tests.conftest import TOP
from tests.support.in_process import refused_here, run_here
from tests.support.tables import each

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
                "sources.0.options: format text: max_record_bytes: expected integer > 0, ≤ 8,589,934,592, got 'x' "
                "(maximum size of a record, in bytes)",
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


@each(
    "change, nearest",
    [
        ("lr=1", "optimizer.learning_rate"),
        ("optimizer.lr=1", "optimizer.learning_rate"),
        ("max_steps=9", "run.max_steps"),
        ("schedule.max_steps=9", "run.max_steps"),
        ("batch_size=9", "batch.global_batch_size"),
        ("batch.batch_size=9", "batch.global_batch_size"),
        ("optimizer.warmup_steps=9", "schedule.warmup_steps"),
        ("output_dir=run", "run.directory"),
        ("seed=1", "run.seed"),
        ("run.sed=1", "run.seed"),  # a near one in the section itself
    ],
)
def test_a_key_of_another_section_or_of_other_programs_is_named_where_it_belongs(change, nearest):
    with pytest.raises(UserError) as error:
        load(TOP / "configs/runs/quickstart.yaml", [change], RunConfig)
    assert str(error.value).endswith(f"{change.partition('=')[0]}: unknown key; nearest valid key: {nearest}")


def test_the_keys_that_other_programs_names_stand_for_are_keys():
    page = (TOP / "docs/reference/settings.md").read_text()
    assert [key for key in RunConfig.elsewhere.values() if f"| `{key}` " not in page] == []


def test_null_empties_a_list_that_another_file_fills():
    stage = {"until_step": 9, "objective": {"name": "span_corruption"}}
    filled = {
        "extends": "configs:runs/quickstart.yaml",
        "data": {"curriculum": [stage]},
        "callbacks": [{"name": "a:B"}],
    }
    assert load(filled, [], RunConfig).data.curriculum
    nothing = [f"{key}=null" for key in ("data.curriculum", "data.validation", "callbacks", "evaluation")]
    config = load(filled, nothing, RunConfig)
    assert (config.data.curriculum, config.data.validation, config.callbacks, config.evaluation) == ([], [], [], [])
    with pytest.raises(UserError, match=r"data\.train: expected non-empty list"):
        load(filled, ["data.train=null"], RunConfig)


def test_values_in_python_are_numbers_and_paths_or_refused():
    changes = {"run": {"max_steps": np.int64(7), "directory": Path("a/b")}}
    config = load_with("configs:runs/quickstart.yaml", changes, RunConfig)
    assert (config.run.max_steps, config.run.directory) == (7, "a/b")
    with pytest.raises(UserError, match="run: expected values as in a YAML file, got <object"):
        load_with("configs:runs/quickstart.yaml", {"run": {"seed": object()}}, RunConfig)


def test_a_file_that_extends_another_has_the_last_word_and_another_kind_of_a_section_starts_afresh(corpus_file):
    """UL2 has no inputs_length, so the base file's settings of span corruption must not apply to it."""
    rows = "{end_of_document: true, objective: {name: span_corruption, inputs_length: 64}}"
    corpus_file.write_text(f"{VALID}rows: {rows}")
    child = corpus_file.with_name("child.yaml")
    child.write_text("extends: [corpus.yaml]\nname: b\nrows: {objective: {name: causal_lm, length: 7}}\n")
    config = load(child, [], CorpusConfig)
    rows = config.rows
    assert (config.name, config.output) == ("b", "corpora/a")
    assert (rows.objective.name, rows.objective.length, rows.end_of_document) == ("causal_lm", 7, True)
    assert load(corpus_file, ["rows.objective.name=full_lm"], CorpusConfig).rows.objective.length == 512
    same = load(corpus_file, ["rows.objective={name: span_corruption, noise_density: 0.2}"], CorpusConfig)
    assert same.rows.objective.inputs_length == 64
    corpus_file.write_text(VALID + "extends: [corpus.yaml]\n")
    with pytest.raises(UserError, match="extends itself"):
        load(corpus_file, [], CorpusConfig)


def test_overrides_of_a_kind_and_of_its_keys_have_any_order(tmp_path):
    (tmp_path / "run.yaml").write_text(f"{RUN}schedule: {{name: linear, warmup_steps: 7, final_learning_rate: 0.0}}\n")
    overrides = ["schedule.warmup_steps=100", "schedule.name=inverse_square_root", "optimizer.learning_rate=0.5"]
    overrides.append("optimizer.name=adafactor")
    first, second = (load(tmp_path / "run.yaml", order, RunConfig) for order in (overrides, overrides[::-1]))
    assert first == second
    assert (first.schedule.name, first.schedule.warmup_steps) == ("inverse_square_root", 100)
    assert (first.optimizer.name, first.optimizer.learning_rate) == ("adafactor", 0.5)


def test_a_section_without_a_kind_is_of_the_default_kind_in_a_file_that_extends_it(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN.replace("name: adamw, ", "betas: [0.9, 0.95], ") + SCHEDULE)
    for name in ("cosine", "inverse_square_root"):
        child = {"extends": str(tmp_path / "run.yaml"), "schedule": {"name": name}}
        kept = load(child, [], RunConfig).schedule.warmup_steps
        assert kept == (9 if name == "cosine" else 0)
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: missing") as missing:
        load(tmp_path / "run.yaml", ["optimizer.name=adafactor"], RunConfig)
    assert "betas" not in str(missing.value)


@each(
    "given, said",
    [
        ("", None),
        ("null", None),
        ("[]", None),
        ("[null]", "expected a path or a list of paths, got None"),
        ("7", "expected a path or a list of paths, got 7"),
        ("{a: b}", "expected a path or a list of paths, got {'a': 'b'}"),
        ("'${oc.env:NOT_SET_ANYWHERE}'", "Environment variable 'NOT_SET_ANYWHERE' not found"),
        ("['${oc.env:NOT_SET_ANYWHERE}']", "Environment variable 'NOT_SET_ANYWHERE' not found"),
    ],
)
def test_extends_is_a_path_or_a_list_of_paths(corpus_file, given, said):
    corpus_file.write_text(f"{VALID}extends: {given}\n")
    if said is None:
        assert load(corpus_file, [], CorpusConfig).name == "a"
        return
    with pytest.raises(UserError) as error:
        load(corpus_file, [], CorpusConfig)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{corpus_file}: extends: ")
    assert said in line


@each(
    "override, problem",
    [
        ("rows.objective={name: span_corruption, noise_density: 1.0}", "rows.objective.noise_density: expected"),
        ("rows.packing=examples", "rows: packing: span_corruption needs concatenate or complete_documents"),
        ("rows.objective={name: text_to_text}", "rows: packing: text_to_text needs complete_documents or examples"),
        (
            "rows={objective: {name: prefix_lm, length: 32, packed: true}, packing: complete_documents}",
            "rows: packing: prefix_lm needs concatenate, not complete_documents",
        ),
        (
            "rows={objective: {name: text_to_text}, packing: complete_documents, end_of_document: true}",
            "rows: end_of_document: text_to_text puts an EOS token after each target itself",
        ),
        ("rows.objective={name: masked_lm, next_sentence: true}", "rows.objective.next_sentence: gone; leave it out"),
        ("dedup.custom=[{step: mine}]", "dedup.custom: gone; list all steps under `steps`"),
        ("sources.0.format=pairs", "rows.objective: span_corruption would lose the targets of the pairs"),
        ("rows.objective.name=span", "rows.objective.name: expected one of span_corruption"),
        ("split.validation_fraction=1.5", "split.validation_fraction"),
        (
            "split.validation_fraction=1e-10",
            "split.validation_fraction: 1e-10 holds nothing out; expected 0, or at least",
        ),
        ("sources=[]", "sources"),
        ("tokenizer.kind=tokenizer_json", "tokenizer.path: missing"),
        ("tokenizer={kind: bytes, vocab_size: 300}", "tokenizer.vocab_size: unknown key"),
        ("tokenizer={kind: symbols, pattern: (}", "tokenizer.pattern: '(' is no regular expression"),
        ("tokenizer.kind=unigram", "tokenizer.kind"),
        ("tokenizer.special_tokens=[a,b,a]", "tokenizer.special_tokens: a is listed twice"),
        ("tokenizer.special_tokens=['']", "tokenizer.special_tokens: a name is empty or has white space: ''"),
        ("tokenizer.special_tokens=['a b']", "tokenizer.special_tokens: a name is empty or has white space: 'a b'"),
        ("tokenizer.special_tokens=[<extra_id_3>]", "tokenizer.special_tokens: <extra_id_3> is a sentinel's name"),
        ("tokenizer.sentinels=-1", "tokenizer.sentinels"),
        # numbers beyond use, which would take hours to count up to, or more than a machine has
        *(
            (f"rows.objective={{name: {name}, {key}: 100000000}}", f"rows.objective.{key}: expected integer ")
            for name, key in (
                *((name, "inputs_length") for name in ("span_corruption", "iid_denoising", "text_to_text")),
                *((name, "length") for name in ("causal_lm", "causal_infilling", "prefix_lm", "full_lm")),
                *((name, "length") for name in ("masked_lm", "denoising")),
                ("text_to_text", "targets_length"),
            )
        ),
        (
            "rows.objective={name: span_corruption, noise_density: 0.99999, mean_span_length: 1000000.0}",
            "rows.objective: noise_density: a row would have more than 16,777,216 tokens",
        ),
        ("tokenizer.sentinels=1000000000", "tokenizer.sentinels: expected integer ≥ 0, ≤ 1,048,576, got 1000000000"),
        ("tokenizer.vocab_size=1000000000", "tokenizer.vocab_size: expected integer > 0, ≤ 4,194,304"),
        ("tokenizer.character_coverage=0.97", "tokenizer.character_coverage: expected number ≥ 0.98, ≤ 1"),
        ("dedup.minhash.rows=1000000", "dedup.minhash: bands × rows: 14,000,000 hash values of each document"),
        ("dedup.minhash.ngram=100000000", "dedup.minhash.ngram: expected integer > 0, ≤ 1,048,576"),
        ("decontamination.ngram=100000000", "decontamination.ngram: expected integer ≥ 2, ≤ 1,048,576"),
        ("cleaning.gopher.max_top_ngrams={101: 0.1}", "cleaning.gopher.max_top_ngrams.101: input should be less"),
        (
            "sources.0.options.max_record_bytes=0",
            "sources.0.options: format c4: max_record_bytes: expected integer > 0",
        ),
        ("ray.num_cpus=100000", "ray.num_cpus: expected integer > 0, ≤ 4,096"),
        *(
            (f"{key}={number}", f"{key}: expected an integer from -2**63 to 2**63 - 1, got {number}")
            for number in (2**63, 10**30)
            for key in ("seed", "shards.rows_per_block", "cleaning.min_words_per_line", "dedup.keys_per_bucket")
        ),
        ("output=/", "output: / is the root of all files"),
        *((f"output={url}", f"output: {url} is a whole bucket; name a folder in it") for url in ("s3://b", "gs://b/")),
        ("output=s3://b/a/../c", "output: s3://b/a/../c: a store takes '..' for a name"),
        # what YAML takes for a number or a flag
        ("seed=yes", "seed: expected a number, got true"),
        ("tokenizer.vocab_size=on", "tokenizer: vocab_size: expected a number, got true"),
        (
            "sources.0.language=no",
            "sources.0.language: expected text, got False (language of the documents, a BCP 47 tag, instead of the "
            "language that they state); YAML takes yes, no, on and off for true and false; write text in quotes",
        ),
        ("rows.packing=off", "rows.packing: expected concatenate, complete_documents or examples, got"),
        ("tokenizer.vocab_size=259", "tokenizer: vocab_size: 259 tokens are too few for byte_fallback, which takes"),
    ],
)
def test_impossible_settings_are_refused(corpus_file, override, problem):
    with pytest.raises(UserError) as error:
        load(corpus_file, [override], CorpusConfig)
    assert str(error.value).startswith(f"{corpus_file}: {problem}")


@each(
    "written, value, numbers",
    [
        ("010", 8, "10 or 8"),
        ("-0_10", -8, "-10 or -8"),
        ("1:30", 90, "90"),
        ("190:20:30", 685_230, "685230"),
        ("1:30.5", 90.5, "90.5"),
    ],
)
def test_a_number_that_yaml_reads_in_another_base_is_refused_with_its_key(corpus_file, written, value, numbers):
    """YAML 1.1 has octal numbers and those of base 60; YAML 1.2 takes 010 for 10, and 1:30 for text."""
    base = "60" if ":" in written else "8"
    reason = f'YAML takes {written} for {value}, a number in base {base}; write {numbers}, or "{written}" in quotes for'
    for line, key in (
        (f"seed: {written}", "seed"),
        (f"rows: {{objective: {{name: [1, {written}]}}}}", "rows.objective.name.1"),
        (f"{written}: a", ""),
    ):
        corpus_file.write_text(f"{VALID}{line}\n")
        with pytest.raises(UserError) as refused:
            load(corpus_file, [], CorpusConfig)
        assert str(refused.value).startswith(": ".join(filter(None, [str(corpus_file), key, reason])))
    corpus_file.write_text(VALID)
    with pytest.raises(UserError, match=f"^'seed={written}': YAML takes {written} for"):
        load(corpus_file, [f"seed={written}"], CorpusConfig)
    assert load(corpus_file, [f'name="{written}"'], CorpusConfig).name == written


def test_numbers_that_every_yaml_reads_alike_stay_what_they_are(corpus_file):
    for written, value in (("007", 7), ("0", 0), ("1_000", 1000), ("0x1F", 31), ("-5", -5)):
        corpus_file.write_text(f"{VALID}seed: {written}\n")
        assert (
            load(corpus_file, [], CorpusConfig).seed
            == load(corpus_file, [f"seed={written}"], CorpusConfig).seed
            == value
        )
    assert load(corpus_file, ["split.validation_fraction=0.05"], CorpusConfig).split.validation_fraction == 0.05
    assert load(corpus_file, ["dedup.minhash=off"], CorpusConfig).dedup.minhash is None


def test_a_key_of_earlier_versions_is_ignored_if_it_changed_nothing_and_else_refused_with_the_reason():
    class Below(Section):
        gone: typing.ClassVar = {"checks": (["auto", None], "is gone; use a callback")}
        number: int = 1

    class File(Section):
        below: Below = Below()

    for value in ("auto", None):
        assert load({"below": {"number": 2, "checks": value}}, [], File) == File(below=Below(number=2))
    with pytest.raises(UserError, match=r"^config: below\.checks: is gone; use a callback$"):
        load({"below": {"checks": 3}}, [], File)


def test_every_shipped_corpus_file_is_valid_and_has_what_its_objective_needs():
    files = sorted(Path("configs/corpora").glob("*.yaml"))
    assert files
    for path in files:
        config = load(path, [], CorpusConfig)
        if getattr(config.tokenizer, "path", None) is None:  # others are not shipped; some kinds have none
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


@each("folder, said", [("beside", "{}/mine.corpus.yaml"), ("nowhere", "CORPUS.yaml"), ("", "mine.corpus.yaml")])
def test_a_missing_corpus_names_the_file_that_builds_it(tmp_path, monkeypatch, folder, said):
    """The file of the folder given, of the current folder, or that ships."""
    monkeypatch.chdir(tmp_path)
    Path("beside").mkdir()
    Path(folder if folder != "nowhere" else "beside", "mine.corpus.yaml").write_text('output: "corpora/mine"\n')
    folders = [Path(folder)] if folder == "beside" else []
    assert how_to_build("corpora/mine", folders) == f"data-pipeline build {said.format(folder)}"
    assert how_to_build("corpora/c4-en") == "data-pipeline build configs:corpora/c4-published.yaml"


@each("command", ["verify", "show", "stats"])
def test_a_file_in_the_place_of_a_corpus_is_refused_in_a_line(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("output: corpora/mine\n")
    Path("a.txt").write_text("x")
    told = "error: {}: expected the directory of a corpus, found a file"
    for name, hint in (("mine.yaml", "; it is the corpus file of corpora/mine"), ("a.txt", "")):
        assert refused_here(2, "data-pipeline", command, name) == told.format(name) + hint


RUN = """
run: {name: a, directory: runs/a, max_steps: 10}
model: {family: t5, d_model: 8, d_kv: 4, num_heads: 2, d_ff: 16, num_encoder_layers: 1, num_decoder_layers: 1}
data: {train: [{corpus: corpora/a}], validation: [{corpus: corpora/a}]}
batch: {global_batch_size: 8}
optimizer: {name: adamw, learning_rate: 0.001}
"""
SCHEDULE = "schedule: {warmup_steps: 9, final_learning_rate: 0.00001}\n"
LOCAL = [
    (CorpusConfig, "tokenizer.path"),
    *((RunConfig, key) for key in ("run.directory", "data.cache.directory", "checkpoint.init_from")),
    (RunConfig, "deepspeed.zero_optimization.offload_param.nvme_path"),
]
REMOTE_TOO = [
    *((CorpusConfig, "output"), (CorpusConfig, "sources.0.path"), (RunConfig, "tracking.mlflow.uri")),
    *((RunConfig, f"data.{split}.0.corpus") for split in ("train", "validation")),
]


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")


def value_of(schema: type[Section], folder: Path, key: str, value: str):
    """The value that the config has under `key` when it is set to `value`."""
    path = folder / "config.yaml"
    path.write_text(VALID if schema is CorpusConfig else RUN)
    overrides = [f"{key}={value}"]
    if "nvme_path" in key:
        overrides += ["deepspeed.zero_optimization.stage=3", key.replace("nvme_path", "device=nvme")]
    found: typing.Any = load(path, overrides, schema)
    for part in key.split("."):
        found = found[int(part)] if part.isdigit() else found[part] if isinstance(found, dict) else getattr(found, part)
    return found


@each("schema, key", [*LOCAL, *REMOTE_TOO])
def test_a_tilde_is_the_home_directory_and_a_url_is_refused_where_only_a_local_path_will_do(tmp_path, schema, key):
    assert value_of(schema, tmp_path, key, "~/there") == "/home/ada/there"
    if (schema, key) in REMOTE_TOO:
        assert value_of(schema, tmp_path, key, "s3://bucket/there") == "s3://bucket/there"
        return
    with pytest.raises(UserError) as error:
        value_of(schema, tmp_path, key, "s3://bucket/there")
    (line,) = str(error.value).splitlines()
    assert "s3://bucket/there is a URL; expected a path on this machine" in line
    assert key.split(".")[-1] in line.split("s3:")[0]


def test_lists_of_paths_sqlite_files_and_extended_files_follow_the_same_rule(tmp_path):
    assert value_of(CorpusConfig, tmp_path, "sources.0.path", "[~/a, s3://b/c]") == ["/home/ada/a", "s3://b/c"]
    assert value_of(RunConfig, tmp_path, "tracking.mlflow.uri", "sqlite:///~/m.db") == "sqlite:////home/ada/m.db"
    child = tmp_path / "child.yaml"
    child.write_text("extends: [s3://bucket/base.yaml]\n")
    with pytest.raises(UserError, match=r"child.yaml: extends: s3://bucket/base.yaml is a URL"):
        load(child, [], CorpusConfig)
    child.write_text("extends: ~/base.yaml\n")
    with pytest.raises(UserError, match=r"/home/ada/base.yaml: no such file"):
        load(child, [], CorpusConfig)


@each("value, said", [("''", "expected a path, got ''"), ("~nobody-here/x", "no home directory")])
def test_an_empty_path_and_an_unknown_user_are_refused(tmp_path, value, said):
    with pytest.raises(UserError, match=f"output: .*{said}"):
        value_of(CorpusConfig, tmp_path, "output", value)


def test_every_path_argument_of_every_command_follows_the_rule():
    apps: list[typer.Typer] = [data_pipeline.cli.app, pretrain.cli.app, launch.cli.app]
    found = set()
    groups = [typing.cast(TyperGroup, typer.main.get_command(app)) for app in apps]
    for command in (inspect.unwrap(one.callback) for group in groups for one in group.commands.values()):
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            kind, *described = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
            if kind is Path or Path in typing.get_args(kind):
                found.add(command.__name__)
                assert described[0].parser("~/there") == Path("/home/ada/there"), (command, name)
                with pytest.raises(UserError, match="s3://bucket/there is a URL"):
                    described[0].parser("s3://bucket/there")
    assert found >= {"export", "local", "build_command"}


@each("url", ["no-such-protocol://bucket/a", "http://127.0.0.1:1/a.json.gz"])
def test_an_error_of_a_remote_file_system_is_one_line(corpus_file, tmp_path, url, monkeypatch):
    monkeypatch.setattr(stores, "LISTING_SECONDS", 0.1)
    with pytest.raises(UserError) as error:
        build(load(corpus_file, [f"sources.0.path={url}", f"output={tmp_path}/corpus"], CorpusConfig))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{url}: ")
    assert not (tmp_path / "corpus").exists()


def test_a_shipped_file_is_found_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("extends: [configs:models/t5-v1.1-base.yaml]\n" + RUN.replace("d_model: 8, ", ""))
    assert load("run.yaml", [], RunConfig).model.d_model == 768
    Path("corpus.yaml").write_text("extends: configs:corpora/c4-bart.yaml\nname: mine\n")  # extends one beside itself
    config = load("corpus.yaml", [], CorpusConfig)
    assert (config.name, config.rows.objective.name, config.sources[0].name) == ("mine", "denoising", "c4")


def test_an_unknown_shipped_file_under_extends_is_one_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("extends: configs:../../etc/models/gpt2-smal.yaml\n" + RUN)
    said = "extends: configs:../../etc/models/gpt2-smal.yaml: no such file ships with the package; the nearest are"
    with pytest.raises(UserError, match=re.escape(f"{path}: {said} configs:models/gpt2-small.yaml, ")):
        load(path, [], RunConfig)


@each(
    "command, name",
    [("data-pipeline build", "CORPUS.yaml"), ("pretrain train", "RUN.yaml"), ("launch local", "RUN.yaml")],
)
def test_every_command_that_takes_a_config_file_takes_a_shipped_one(command, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_here(*command.split(), "configs:models/t5-v1.1-base.yaml", "no.key=1")
    assert "/configs/models/t5-v1.1-base.yaml: no: unknown key" in done.stderr
    said = f"error: {name}: configs:models/t5-v1.2-base.yaml: no such file ships with the package; the nearest are "
    told = refused_here(2, *command.split(), "configs:models/t5-v1.2-base.yaml")
    assert told.startswith(said + "configs:models/t5-v1.")


@each(
    "command, name",
    [
        ("data-pipeline plan NAME", "CORPUS.yaml"),
        ("pretrain plan NAME --gpu h200 --gpus 8", "RUN.yaml"),
        ("pretrain experiment NAME", "DIR"),
        ("launch hosts NAME --hostfile hosts", "RUN.yaml"),
        ("launch slurm NAME", "FILE.yaml"),
        ("launch slurm run.yaml --cluster NAME", "--cluster"),
        ("launch doctor NAME", "RUN.yaml"),
    ],
)
def test_a_name_that_does_not_ship_is_refused_by_every_command_that_takes_one(command, name):
    told = refused_here(2, *command.replace("NAME", "configs:models/t5-v1.2-base.yaml").split())
    said = f"error: {name}: configs:models/t5-v1.2-base.yaml: no such file ships with the package; the nearest are "
    assert told.startswith(said)
