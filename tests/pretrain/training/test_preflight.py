"""A run trains in a new or empty folder, or in the folder of a run, and leaves every other folder as it is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import launch
import pretrain
from data_pipeline.base.atomic import new_directory
from data_pipeline.base.errors import UserError
from launch import attempts
from launch.attempts import Run
from launch.nodes import Access, Node
from pretrain.run import status
from pretrain.training.preflight import check_directory
from tests.support.in_process import refused_here
from tests.support.runs import run_file
from tests.support.tables import each


def content(folder: Path) -> list[tuple[str, bytes]]:
    """The path and the content of each file and folder below `folder`."""
    found = sorted(folder.rglob("*"))
    return [(str(path.relative_to(folder)), path.read_bytes() if path.is_file() else b"") for path in found]


def corpus(folder: Path) -> None:
    (folder / "train").mkdir()
    for name in ("manifest.json", "blocks.parquet", "train/00000.tar", "tokenizer.json"):
        (folder / name).write_text(name)


def runs(folder: Path) -> None:
    (folder / "first").mkdir()
    for name in ("first/status.json", "first/lock", "mlflow.db"):
        (folder / name).write_text(name)


def machine(folder: Path) -> None:
    """As /var and /run, which have a folder `lock`."""
    for name in ("lock", "log", "logs"):
        (folder / name).mkdir()


def project(folder: Path) -> None:
    for name in ("checkpoints", "slurm", "stop", ".git"):
        (folder / name).mkdir()


NOT_RUNS = {
    corpus: "blocks.parquet, manifest.json, tokenizer.json, …",
    runs: "first, mlflow.db",
    machine: "lock, log, logs",
    project: ".git, checkpoints, slurm",
}


def ways_to_start(path: Path, fresh: bool) -> dict[str, Callable[[], str]]:
    """Each way to start a run, which returns its one line."""
    again = ["--fresh"] if fresh else []
    commands = {
        "pretrain": ("train", path, *again),
        "launch": ("local", path, "--ranks", "2", *again),
    }
    calls = {
        "pretrain.train": lambda: pretrain.train(path, fresh=fresh),
        "launch.local": lambda: launch.local(path, ranks=2, fresh=fresh),
        "launch hosts": lambda: attempts.launch(
            Run(path, [], fresh=fresh), [Node("a", 1)], Access(lambda host: ["false"])
        ),
    }
    ways = {
        **{name: partial(refused_here, 2, name, *arguments) for name, arguments in commands.items()},
        **{name: partial(refused, call) for name, call in calls.items()},
        "--dry-run": partial(refused_here, 2, "launch", "local", path, "--dry-run", *again),
    }
    if not fresh:
        ways["launch slurm"] = partial(refused_here, 2, "launch", "slurm", path)
        ways["launch slurm --dry-run"] = partial(refused_here, 2, "launch", "slurm", path, "--dry-run")
    return ways


def refused(start: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        start()
    return str(error.value)


@each("make", NOT_RUNS)
def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path, make):
    """By every way to start a run, in one line, before anything is written, whether or not the corpora are there."""
    path = run_file(tmp_path, tmp_path / "no-corpus")
    (folder := tmp_path / "run").mkdir()
    make(folder)
    before, beside = content(folder), {one.name for one in tmp_path.iterdir()}
    said = f"run.directory: {folder} isn't empty and isn't a run: it has {NOT_RUNS[make]}; name a new folder, such as "
    for fresh in (False, True):
        for way, start in ways_to_start(path, fresh).items():
            assert start().removeprefix("error: ") == f"{said}{folder}/run-1", (way, fresh)
            assert (content(folder), {one.name for one in tmp_path.iterdir()}) == (before, beside), (way, fresh)


def test_the_root_and_a_file_are_no_run_directories(tmp_path):
    (tmp_path / "file").touch()
    assert "run.directory: / isn't empty and isn't a run: it has " in refused(lambda: check_directory(Path("/")))
    said = f"run.directory: {tmp_path}/file is no folder; name a new one"
    assert refused(lambda: check_directory(tmp_path / "file")) == said


@each(
    "names",
    [
        (),
        ("stop",),  # a request that came before the ranks
        ("lock",),  # killed at once
        ("logs/attempt-0001/rank-00000.log",),
        ("slurm/job.sbatch", "slurm/17.out"),
        ("checkpoints/step-00000010/index.json",),  # a part of a run was copied
        ("metrics.jsonl", "config.yaml"),
    ],
)
def test_what_a_start_of_a_run_may_leave_is_a_run(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    check_directory(tmp_path)
    check_directory(tmp_path / "new")


def test_fresh_never_renames_the_current_folder(tmp_path, monkeypatch):
    """Where relative paths would then lead into the old run."""
    (run := tmp_path / "run").mkdir()
    (run / "status.json").write_text("{}")
    monkeypatch.chdir(run)
    for directory in (Path(), Path(".."), tmp_path):
        said = f"run.directory: {directory}: --fresh can't rename the current folder; start from another one"
        assert refused(lambda directory=directory: status.move_aside(directory)) == said
    assert run.is_dir()


def test_fresh_never_renames_the_folder_of_the_weights_to_start_from(small_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/first")
    (run / "checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / run / "checkpoints")
    for init_from in (run, run / "checkpoints/step-00000010", tmp_path / "link/step-00000010"):
        settings = {"directory": str(run)}
        path = run_file(tmp_path, small_corpus, run=settings, checkpoint={"init_from": str(init_from)})
        where = f"checkpoint.init_from: {init_from} is in run.directory, {run}"
        said = f"{where}, which --fresh renames; set another run.directory"
        for way, start in ways_to_start(path, fresh=True).items():
            assert start().removeprefix("error: ") == said, way
        assert [one.name for one in run.parent.iterdir()] == ["first"]


def test_nothing_is_exported_over_other_files(tmp_path, monkeypatch):
    """`export`, `import`, `average` and `adapt` all write with `new_directory`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    monkeypatch.chdir(tmp_path / "mine")
    for out in (Path(), Path("/"), tmp_path / "mine", tmp_path / "mine/file"):
        with pytest.raises(UserError, match="exists already; choose another directory"), new_directory(out):
            raise AssertionError
    assert content(tmp_path) == [("mine", b""), ("mine/file", b"mine")]
