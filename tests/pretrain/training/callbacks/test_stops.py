"""Requests to stop: during a save, and while the process starts."""

import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import save
from pretrain.engine.checkpoint.index import newest
from pretrain.engine.ranks import joined_world
from pretrain.run import status
from pretrain.training.callbacks import stops
from tests.support.rank_processes import each as each_here
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file


def a_run(folder: Path, corpus: Path) -> Path:
    saves = {"every_steps": 1, "keep_last": 2}
    return run_file(folder, corpus, run={"max_steps": 1_000_000}, evaluation=[], checkpoint=saves)


def trained(path: Path, asks: Callable[[], object]) -> tuple[int, status.Status, str]:
    """The exit code of a run that is asked to stop while it writes its first checkpoint, its status, and its newest
    valid checkpoint."""
    from pretrain.training.run import train_in_group

    asked = threading.Event()
    written = save.write_run_index

    def write_run_index(*given: object, **options: object) -> object:
        if not asked.is_set():
            asked.set()
            asks()
        return written(*given, **options)

    config = load(path, [], RunConfig)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_run_index", write_run_index)
        code = train_in_group(joined_world(), config)
        stops.pass_on()  # to nobody: forgets them
    directory = Path(config.run.directory)
    newest_there = newest(directory)
    assert newest_there
    return code, status.read(directory), newest_there.name


def test_a_request_in_a_save_stops_the_run_once_the_save_is_complete(small_corpus, tmp_path):
    """The save is completed, and so is that of the step after which the run stops."""
    cases: list[tuple[Path, Callable[[], object]]] = []
    for name, number in {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1}.items():
        cases.append((a_run(tmp_path / name, small_corpus), partial(signal.raise_signal, number)))
    path = a_run(tmp_path / "file", small_corpus)
    cases.append((path, (tmp_path / "file/run/stop").touch))
    for code, now, checkpoint in on_ranks(1, each_here, trained, cases)[0]:
        assert (code, now.state, checkpoint) == (75, "stopped", f"step-{now.step:08d}")
        assert 1 < (now.step or 0) < 1_000_000


def started(path: Path, launcher_has_cleared: bool) -> tuple[int, int | None]:
    """The exit code and the last step of a process without a supervisor. A request is there before the process starts;
    another one is made while the process checks its run file."""
    from pretrain.training import run

    config = load(path, [], RunConfig)
    (stop := Path(config.run.directory) / "stop").parent.mkdir()
    stop.touch()
    validated = run.prepare

    def validate(*given: object) -> object:
        assert stop.exists() == launcher_has_cleared
        stop.touch()
        return validated(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "prepare", validate)
        if launcher_has_cleared:
            patch.setenv(status.CLEARED, "1")
        return run.train(config), status.read(stop.parent).step


def test_a_request_while_a_process_without_a_supervisor_starts_stops_the_run(small_corpus, tmp_path):
    """Only what an earlier start has left is removed; a launcher that has removed it says so."""
    for name, cleared in {"alone": False, "launched": True}.items():
        path = run_file(tmp_path / name, small_corpus, evaluation=[])
        assert on_ranks(1, started, path, cleared, joined=False) == [(75, 1)]
