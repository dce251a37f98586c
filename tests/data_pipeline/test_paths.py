"""Paths in config files and on the command line: `~` is the home directory, and a URL is no local path."""

import re
import typing
from pathlib import Path

import pytest
import typer

import data_pipeline.cli
import launch.cli
import pretrain.cli
from data_pipeline.config import CorpusConfig
from data_pipeline.foundation import stores
from data_pipeline.foundation.config_file import Section, load
from data_pipeline.foundation.errors import UserError
from data_pipeline.pipeline import build
from pretrain.config import RunConfig
from tests.in_process import run_here
from tests.tables import each

CORPUS = """
name: a
output: corpora/a
sources:
  - {format: c4, path: a.json.gz}
"""
RUN = """
run: {name: a, directory: runs/a, max_steps: 10}
model: {family: t5, d_model: 8, d_kv: 4, num_heads: 2, d_ff: 16, num_encoder_layers: 1, num_decoder_layers: 1}
data: {train: [{corpus: corpora/a}], validation: [{corpus: corpora/a}]}
batch: {global_batch_size: 8}
optimizer: {name: adamw, learning_rate: 0.001}
"""
LOCAL = [
    (CorpusConfig, "output"),
    (CorpusConfig, "tokenizer.path"),
    (RunConfig, "run.directory"),
    (RunConfig, "data.cache.directory"),
    (RunConfig, "checkpoint.init_from"),
    (RunConfig, "deepspeed.zero_optimization.offload_param.nvme_path"),
]
REMOTE_TOO = [
    (CorpusConfig, "sources.0.path"),
    (RunConfig, "data.train.0.corpus"),
    (RunConfig, "data.validation.0.corpus"),
    (RunConfig, "tracking.mlflow.uri"),
]


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")


def value_of(schema: type[Section], folder: Path, key: str, value: str):
    """The value that the config has under `key` when it is set to `value`."""
    path = folder / "config.yaml"
    path.write_text(CORPUS if schema is CorpusConfig else RUN)
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


def test_lists_of_paths_sqlite_files_dictionaries_and_extended_files_follow_the_same_rule(tmp_path):
    assert value_of(CorpusConfig, tmp_path, "sources.0.path", "[~/a, s3://b/c]") == ["/home/ada/a", "s3://b/c"]
    assert value_of(RunConfig, tmp_path, "tracking.mlflow.uri", "sqlite:///~/m.db") == "sqlite:////home/ada/m.db"
    bpe = value_of(CorpusConfig, tmp_path, "tokenizer", "{kind: byte_level_bpe, path: ~/b, dictionary: ~/d}")
    assert (bpe.path, bpe.dictionary) == ("/home/ada/b", "/home/ada/d")
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


def path_arguments() -> list[tuple[str, str, type, typing.Any]]:
    """(command, parameter, type, typer's description) of each path argument of the three commands."""
    apps: list[typer.Typer] = [data_pipeline.cli.app, data_pipeline.cli.fetch_app, pretrain.cli.app, launch.cli.app]
    found = []
    for command in (command for app in apps for command in app.registered_commands):
        assert command.callback is not None
        for name, hint in typing.get_type_hints(command.callback, include_extras=True).items():
            kind, *described = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
            if kind is Path or Path in typing.get_args(kind):
                found.append((command.callback.__name__, name, kind, described[0]))
    return found


def test_every_path_argument_of_every_command_follows_the_rule():
    found = path_arguments()
    assert {"export", "local", "wet", "publish_command"} <= {command for command, *_ in found}
    for command, name, _, described in found:
        assert described.parser("~/there") == Path("/home/ada/there"), (command, name)
        with pytest.raises(UserError, match="s3://bucket/there is a URL"):
            described.parser("s3://bucket/there")


@each("url", ["no-such-protocol://bucket/a", "http://127.0.0.1:1/a.json.gz"])
def test_what_a_remote_file_system_raises_is_one_line(tmp_path, url, monkeypatch):
    monkeypatch.setattr(stores, "LISTING_SECONDS", 0.1)
    path = tmp_path / "corpus.yaml"
    path.write_text(CORPUS)
    with pytest.raises(UserError) as error:
        build(load(path, [f"sources.0.path={url}", f"output={tmp_path}/corpus"], CorpusConfig))
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
    assert done.returncode == 2
    assert "/configs/models/t5-v1.1-base.yaml: no: unknown key" in done.stderr
    done = run_here(*command.split(), "configs:models/t5-v1.2-base.yaml")
    said = f"error: {name}: configs:models/t5-v1.2-base.yaml: no such file ships with the package; the nearest are "
    assert (done.returncode, done.stderr.startswith(said + "configs:models/t5-v1.")) == (2, True), done.stderr
