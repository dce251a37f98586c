"""What all commands of the three packages have in common."""

import contextlib
import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

import data_pipeline.cli
import launch.cli
import pretrain.cli
from data_pipeline.base.command import json_for, run_command
from data_pipeline.base.config_file import load
from data_pipeline.base.open_store import open_store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.documents import all_documents
from data_pipeline.loading.reader import Reader
from data_pipeline.tools.ids_of_rows import ids_of_rows
from tests.conftest import TOP, made_once, write_c4, write_corpus_file
from tests.support.builds import trained
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.tables import each

APPS = {"data-pipeline": data_pipeline.cli.app, "pretrain": pretrain.cli.app, "launch": launch.cli.app}


def commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The words that call `command` and each command below it that --help lists."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands(below, (*words, name))


ALL = [words for name, app in APPS.items() for words in commands(typer.main.get_command(app), (name,))]


def example_of(words: tuple[str, ...]) -> list[str]:
    shown = CliRunner().invoke(APPS[words[0]], [*words[1:], "--help"], env={"COLUMNS": "1000"}).output
    assert len(re.findall(r"^ *Example: ", shown, re.MULTILINE)) == 1
    return shlex.split(shown.strip().splitlines()[-1].strip().removeprefix("Example: "))


def test_every_package_has_its_commands():
    assert {("data-pipeline", "build"), ("pretrain", "train"), ("launch", "slurm")} <= {*ALL}


@each("words", ALL)
def test_help_ends_with_an_example_that_the_command_accepts(words):
    example = example_of(words)
    assert tuple(example[: len(words)]) == words
    assert [name for name in example if name.startswith("configs/") and not Path(name).exists()] == []
    command, given = typer.main.get_command(APPS[words[0]]), example[1:]
    while isinstance(command, TyperGroup):
        command, given = command.commands[given[0]], given[1:]
    command.make_context("", given)  # refuses options and arguments that don't exist


# What reads, plans or writes files of its own is run whole.
WHOLE = [
    *(("data-pipeline", name) for name in ("verify", "stats", "show", "plan", "trace")),
    ("pretrain", "plan"),
    *(("launch", name) for name in ("init", "slurm")),
]


@pytest.fixture
def fresh_copy(small_corpus, tmp_path, monkeypatch) -> Path:
    """A folder with the shipped configs, the quickstart's corpus and a text, as the current one. The corpus has the
    tokens of a vocabulary that is there already."""

    def make(folder: Path) -> None:
        tokenizer = (f"tokenizer.{key}={value}" for key, value in trained(small_corpus).items())
        done_here("data-pipeline", "build", "configs:corpora/quickstart.yaml", f"output={folder}/corpus", *tokenizer)

    (tmp_path / "configs").symlink_to(TOP / "configs")
    (tmp_path / "corpora").mkdir()
    for name in ("quickstart", "another"):
        (tmp_path / "corpora" / name).symlink_to(made_once("quickstart", make) / "corpus")
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt").write_text((TOP / "LICENSE").read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_that_read_or_plan_succeed_in_a_fresh_copy(fresh_copy, subtests):
    for words in WHOLE:
        with subtests.test(" ".join(words)):
            done_here(*example_of(words))


def test_files_and_overrides_of_the_other_examples_are_valid_in_a_fresh_copy(fresh_copy, subtests):
    """What they train or build takes minutes: the run files are checked by a dry run, the corpus files are read."""
    checked = 0
    for words in ALL:
        example = example_of(words)
        files = [word for word in example if word.startswith(("configs/runs/", "configs/corpora/"))]
        if words in WHOLE or not files:
            continue
        overrides = [word for word in example if re.match(r"[\w.]+=", word)]
        with subtests.test(" ".join(example)):
            checked += 1
            if files[0].startswith("configs/corpora/"):
                load(files[0], overrides, CorpusConfig)
            else:
                done_here("launch", "local", "--dry-run", files[0], *overrides)
    assert checked >= 9


def test_show_names_the_documents_of_the_rows_that_it_shows(small_corpus):
    """In the order of the text: rows are the tokens of documents, one after the other."""
    corpus = open_corpus(small_corpus)
    ids = ids_of_rows(corpus, "train", 3)
    texts = {one.id: one.text for one in all_documents(open_store(small_corpus), "id", "text")}
    of_texts = corpus.tokenizer.encode([texts[one] for one in ids])
    tokens = [token for ids_of_text in of_texts for token in ids_of_text]
    rows = Reader(corpus, "train").tokens(np.arange(3))
    shown = [token for row, length in zip(rows.values, rows.lengths, strict=True) for token in row[:length].tolist()]
    assert tokens[: len(shown)] == shown
    assert len(tokens) - len(of_texts[-1]) < len(shown)  # the last begins in them
    printed = done_here("data-pipeline", "show", small_corpus, "-n", "3").splitlines()[-1]
    listed = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    assert printed == f"documents: {listed}. Next: data-pipeline trace {small_corpus} {ids[0]}"


def test_show_of_a_split_without_rows_is_one_line(tmp_path):
    write_c4(tmp_path / "c4.json.gz", records=20)
    nothing_held_out = {"tokenizer": {"kind": "bytes"}, "split": {"validation_fraction": 0}}
    done_here("data-pipeline", "build", write_corpus_file(tmp_path / "corpus.yaml", **nothing_held_out))
    shown = done_here("data-pipeline", "show", tmp_path / "corpus", "--split", "validation")
    assert shown == f"{tmp_path}/corpus has no row of validation\n"


def test_the_document_that_show_names_can_be_traced(fresh_copy):
    last = run_here("data-pipeline", "show", "corpora/quickstart").stdout.splitlines()[-1]
    assert "kept" in done_here(*shlex.split(last.partition("Next: ")[2]))


@each(
    "command, name, said",
    [
        (("launch", "local"), "configs/corpora/c4.yaml", "this is a corpus file, not a run file; build it"),
        (("data-pipeline", "build"), "configs/runs/quickstart.yaml", "this is a run file, not a corpus file; train"),
        # as DeepSpeed's launcher calls it
        (("pretrain", "--local_rank=0", "train"), "configs/runs/nothing-like-it.yaml", "no such file"),
    ],
)
def test_a_file_of_another_kind_and_one_that_is_not_there_are_one_line(command, name, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(TOP / "configs")
    assert refused_here(2, *command, name).startswith(f"error: {name}: {said}")


@each("words", ["pretrain generate run", "pretrain train configs:runs/quickstart.yaml", "data-pipeline trace c"])
def test_an_argument_that_is_not_utf8_is_refused(words):
    line = refused_here(2, *words.split(), os.fsdecode(b"run.name=caf\xe9"))
    assert line == r"error: run.name=caf\udce9: an argument that isn't UTF-8; convert it, or rename the file"


def printed_in_latin_1(name: str, *arguments: str) -> str:
    """What a command prints that must not fail, to a stdout of that encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
    main = import_module(f"{name.replace('-', '_')}.cli").main
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    out.flush()
    return re.sub(r"\s+", " ", out.buffer.getvalue().decode("latin-1"))


def test_a_character_that_stdout_lacks_is_a_question_mark(fresh_copy, subtests):
    for words, line in {
        "pretrain average --help": "CHECKPOINT? OUT",  # …
        "data-pipeline stats corpora/quickstart": "?",
        "launch init --help": "t5gemma, gpt2, ?:",
    }.items():
        with subtests.test(words):
            assert line in printed_in_latin_1(*words.split())


def test_json_has_escapes_for_what_stdout_lacks():
    value = {"text": "é … 🙂"}
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    shown = json_for(narrow, value)
    assert shown.isascii()
    assert json.loads(shown) == value
    assert json_for(io.StringIO(), value) == '{"text": "é … 🙂"}'


def test_an_empty_variable_is_one_that_is_not_set_but_that_which_hides_gpus(monkeypatch):
    names = ("SLURM_NTASKS", "AWS_PROFILE", "HOME", "CUDA_VISIBLE_DEVICES")
    for name in names:
        monkeypatch.setenv(name, "")
    done_here("pretrain", "--version")
    assert [name for name in names if name in os.environ] == ["CUDA_VISIBLE_DEVICES"]


ROOM = "free some space there, or choose another folder, and run the same command again"
PERMISSIONS = "change its permissions, or choose another path"


@each(
    "number, name, said",
    [
        (errno.ENOSPC, "a/b.png", f"a/b.png: No space left on device; {ROOM}"),
        (errno.EDQUOT, "a", f"a: Disk quota exceeded; {ROOM}"),
        (errno.ENOSPC, None, f"No space left on device; {ROOM}"),
        (errno.EROFS, "a", f"a: Read-only file system; {PERMISSIONS}"),
        (errno.EACCES, "a", f"a: Permission denied; {PERMISSIONS}"),
        (errno.ENAMETOOLONG, "a" * 300, f"{'a' * 300}: File name too long; choose another path"),
        (errno.EACCES, None, None),  # not of a file: a fault, which shows where it is
        (errno.ENOENT, "a", None),
    ],
)
def test_a_file_that_the_system_refuses_is_one_line_in_every_command(number, name, said, monkeypatch, capsys):
    app = typer.Typer()

    @app.command()
    def write() -> None:
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(sys, "argv", ["write"])
    with pytest.raises(SystemExit if said else OSError) as ended:
        run_command(app)
    if said:
        assert (ended.value.code, capsys.readouterr().err) == (1, f"error: {said}\n")


@each("words", ["data-pipeline --version", "pretrain --version", "launch --help"])
def test_an_output_on_a_full_disk_is_one_line(words):
    name, *arguments = words.split()
    command = [sys.executable, "-m", name.replace("-", "_"), *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: No space left on device; {ROOM}\n")


@each("words", ALL)
def test_every_default_of_an_option_is_a_value_that_the_option_takes(words):
    command = typer.main.get_command(APPS[words[0]])
    for name in words[1:]:
        command = command.commands[name]
    context = command.context_class(command)
    for one in command.params:
        if (default := one.get_default(context)) is not None:
            one.process_value(context, default)


CORPUS = "launch slurm configs:corpora/quickstart.yaml"


@each(
    "arguments, said",
    [
        ("pretrain evaluate run --lm-eval a --hook samples", "--hook: for hooks, which --lm-eval replaces"),
        ("pretrain evaluate run --lm-eval a --corpus c --suite fast", "--corpus and --suite: for hooks, which "),
        ("pretrain evaluate run --few-shot 0", "--few-shot: for --lm-eval"),
        ("pretrain evaluate run --hook samples --suite full", "--suite: not with --hook, which names the hooks"),
        ("pretrain evaluate run --limit 3", "--limit: for --lm-eval"),
        ("pretrain export run out --public", "--public: for --push-to-hub"),
        ("pretrain generate run text -n 5", "-n: for --corpus"),
        ("launch doctor --ssh '-p 22'", "--ssh: for --hostfile"),
        (
            "launch slurm configs:runs/quickstart.yaml --launcher deepspeed --min-nodes 1",
            "--min-nodes: not with --launcher deepspeed, which doesn't restart a run",
        ),
        ("launch doctor --hostfile h --ranks 2", "--ranks: not with --hostfile, which names the hosts and their ranks"),
        ("launch doctor --cluster configs:clusters/h100.yaml", "--cluster: this is no SLURM allocation"),
        (f"{CORPUS} --stop-at-step 9 --doctor", "--stop-at-step and --doctor: for a run, and "),
        ("launch slurm configs:runs/quickstart.yaml --chain 2", "--chain: for --submit"),
    ],
)
def test_an_option_that_would_do_nothing_beside_the_others_is_refused(arguments, said, monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert refused_here(2, *shlex.split(arguments)).startswith(f"error: {said}")


@each(
    "command, bound",
    [
        *(("pretrain experiment none --seeds", 1000), ("pretrain experiment none --at-once", 1000)),
        *(("launch local none.yaml --ranks", 1024), ("launch doctor --ranks", 1024)),
        *(("launch slurm none.yaml --gpus-per-node", 1024), ("launch slurm none.yaml --chain", 1000)),
    ],
)
def test_so_many_processes_are_refused_before_they_are_listed(command, bound):
    done = run_here(*command.split(), "10000000000")
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    assert f"Invalid value for '{command.split()[-1]}': Input should be less than or equal to {bound}" in said
