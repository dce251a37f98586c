"""Runs that are signalled, killed, stopped or hang: real ranks.

Some tests go through `launch`, whose ranks take seconds to start; all others fork their ranks. What a
supervisor makes of ranks that crash or hang is in `test_supervise`.
"""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
from pretrain.engine.checkpoint import index as checkpoint_index
from pretrain.engine.checkpoint.index import newest
from pretrain.run import heartbeat, rank_logs, restarts
from pretrain.run.metrics_file import read_metrics
from tests.launch.conftest import a_run
from tests.support.forked import Forked, forked_ranks, run_forked
from tests.support.in_process import run_here
from tests.support.ports import free_port
from tests.support.processes import processes_with
from tests.support.rank_processes import on_ranks
from tests.support.runs import losses, steps_taken, train_ranks
from tests.support.started import Started
from tests.support.steps import Planned


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    forkserver.ensure_running()  # before the name is set: the server belongs to no run
    monkeypatch.setenv("RUN_UNDER_TEST", str(tmp_path))
    return tmp_path


def endless(folder: Path, corpus: Path, **changes: object) -> Path:
    return a_run(folder, corpus, steps=1_000_000_000, **changes)


@contextlib.contextmanager
def launched(path: Path, *overrides: str) -> Iterator[Started]:
    """A run of two ranks that has done two steps."""
    with Started(path.parent, "launch", "local", path, "--ranks", "2", *overrides) as one:
        one.until(lambda: one.stdout.count("\nstep ") >= 2)
        yield one


def environment_of(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return process.environ()
    return {}


def is_whole(folder: Path) -> None:
    """Asserts that the latest checkpoint matches its index and is that of the last logged step."""
    checkpoint = newest(folder / "run")
    assert checkpoint
    index = checkpoint_index.read(checkpoint)
    checkpoint_index.verify(checkpoint, index)
    assert index.step == max(losses(folder / "run.yaml"))


# ---- through `launch`


def test_a_run_saves_and_stops_with_75(small_corpus, folder):
    """Every step ends in a save here, so most signals arrive during one. The first start replaces an existing run."""
    path = endless(folder, small_corpus, checkpoint={"every_steps": 1, "keep_last": 2})
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_text("of an earlier run")
    with launched(path, "--fresh") as one:
        assert f"{folder}/run: moved the existing run to {folder}/run.old-1" in one.stdout
        one.process.send_signal(signal.SIGTERM)
        assert one.end() == 75, one.stderr
    assert (folder / "run.old-1/metrics.jsonl").read_text() == "of an earlier run"
    assert "stopped on request" in one.stdout
    assert [file.read_text() for file in (folder / "run/logs/attempt-0001").glob("*.exit")] == ["75\n"] * 2
    assert one.stderr.splitlines()[-1] == "--fresh begins another run; to resume this one, leave it out"
    assert [(one.outcome, one.cause, one.error) for one in restarts.read(folder / "run")] == [("stopped", "", "")]
    assert not (folder / "run/stop").exists()
    is_whole(folder)


@pytest.mark.slow
def test_a_warning_to_all_processes_stops_a_run_that_goes_on(small_corpus, folder):
    """A scheduler's warning would otherwise end the loader's workers. While the run trains, no other may train in its
    directory."""
    path = endless(folder, small_corpus, checkpoint={"every_steps": 1, "keep_last": 2})
    assert train_ranks(path, 2, stop=3) == [75, 75]
    stopped = max(losses(path))
    with launched(path, "data.workers=1") as one:
        for done in (run_here("launch", "local", path, "--ranks", "2"), run_forked("train", path)):
            before, _, holder = done.stderr.partition("process ")
            assert (done.returncode, before) == (2, f"error: run.directory: {folder}/run: ")
            process, _, rest = holder.partition(" ")
            assert psutil.Process(int(process)).environ()["RANK"] == "0"
            assert rest == f"on {socket.gethostname()} is already training here\n"
        assert not (folder / "run/logs/attempt-0003").exists()
        for process in [one.process, *one.others()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        assert one.end() == 75, one.stderr
    is_whole(folder)
    attempts = {row.step: row.attempt for row in read_metrics(folder / "run") if "train/loss" in row.metrics}
    assert attempts == {step: 1 if step <= stopped else 2 for step in range(1, max(attempts) + 1)}


@pytest.mark.slow
def test_a_run_goes_on_by_itself_from_its_latest_checkpoint_with_the_same_losses(small_corpus, undisturbed, folder):
    """Rank 1 is killed and later stopped, then rank 0 is killed, each after the first step after a checkpoint."""
    path, stopped = a_run(folder, small_corpus), str(folder / "stopped")
    planned = (
        Planned(1, 12, "kill", saved=10),
        Planned(1, 22, "stop", stopped, attempt=2, saved=20),
        Planned(0, 22, "hang", stopped, attempt=2),
        Planned(0, 32, "kill", attempt=3, saved=30),
    )
    command = ("launch", "local", path, "--ranks", "2", "checkpoint.every_steps=10")
    with Started(folder, *command, planned=planned) as one:
        assert one.end() == 0, one.stderr
    assert losses(path) == undisturbed
    first, second, third, last = restarts.read(folder / "run")
    assert (first.rank, first.killed, first.cause) == (1, True, "rank 1 was killed by SIGKILL")
    hung = "rank 1 makes no progress, and its process is stopped (SIGSTOP); 1 rank waited for it"
    assert (second.rank, second.cause) == (1, hung)
    assert (third.rank, third.outcome, last.outcome) == (0, "failed", "finished")
    taken = steps_taken(folder / "run")
    assert {step for step in taken if taken.count(step) > 1} <= {11, 21, 31}
    assert "starting attempt 4 (faults.max_restarts)\n" in one.stderr


@pytest.mark.slow
def test_deepspeeds_launcher_by_hand_gives_ranks_the_same_places_and_losses(small_corpus, undisturbed, folder):
    """The places of ranks under `launch` are in `test_failures`."""
    path, port = a_run(folder, small_corpus), str(free_port())
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")

    def places() -> set[str]:
        ranks = processes_with(RUN_UNDER_TEST=str(folder), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        return {" ".join(found.get(name, "") for name in names) for found in map(environment_of, ranks)} - {" " * 5}

    command = ("deepspeed", "--num_gpus", "2", "--master_port", port, "--module", "pretrain", "train", path)
    with Started(folder, *command) as one:
        one.until(lambda: places() == {"0 2 0 2 0 1", "1 2 1 2 0 1"})
        assert one.end() == 0, one.stderr
    assert losses(path) == undisturbed


# ---- ranks and commands that are forked


def test_signals_to_one_rank_stop_all(small_corpus, folder):
    path = endless(folder, small_corpus, checkpoint={"every_steps": 1, "keep_last": 2})
    with forked_ranks(2, "train", path) as (first, second):
        first.until("step 2/")
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(second.pid, number)
            time.sleep(0.03)
        assert [one.wait() for one in (first, second)] == [75, 75]
        is_whole(folder)
        assert "stopped on request" in first.stdout
        assert second.stderr.count("saving and stopping after this step") == 1  # whichever Python saw first
        assert "step 2/" not in second.stdout


def test_of_ranks_that_raise_the_first_is_noted(small_corpus, folder):
    """The other ranks fail later, when their collectives miss it, but may end earlier."""
    path, logs = endless(folder, small_corpus), rank_logs.new_directory(folder / "run")
    assert on_ranks(2, fail_on_rank_1, path, logs, joined=False) == [1, 1]
    told = heartbeat.messages(logs, set())
    assert told[0][:3] == (1, "failed", "ValueError: on purpose")
    assert [one.rank for one in told] == [1, 0]


def fail_on_rank_1(path: Path, logs: Path) -> object:
    from pretrain.training import micro_batch  # in ranks alone: DeepSpeed chooses its accelerator at once
    from pretrain.training.run import train

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    os.environ[rank_logs.SUPERVISED] = os.environ[heartbeat.DIRECTORY] = str(logs)
    if os.environ["RANK"] == "1":
        micro_batch.choose = fail  # before there are threads that communicate, with which a rank exits at once
    try:
        return train(load(path, [], RunConfig))
    except SystemExit as end:
        return end.code


def typed_and_shown(path: Path, typed: list[bytes], *overrides: str) -> tuple[int, str, list[psutil.Process]]:
    """(exit code, output, processes left behind) of one process on a terminal, at which `typed` is typed after two
    steps, or else which is closed."""
    terminal, inside = pty.openpty()
    with Forked("train", path, *overrides, terminal=os.ttyname(inside)) as one:
        with os.fdopen(terminal, "r+b", buffering=0) as screen:
            shown = b""
            while b"step 2/" not in shown:
                shown += screen.read(1000)
            os.close(inside)  # from here on the command alone has the terminal
            for keys in typed:
                with contextlib.suppress(OSError):  # it has ended after the first
                    screen.write(keys)
                time.sleep(0.05)
            if typed:
                with contextlib.suppress(OSError):  # nobody has it any more
                    while content := screen.read(1000):
                        shown += content
            else:
                os.kill(one.pid, signal.SIGHUP)  # as its shell does; the kernel sends another
        code = one.wait()
        psutil.wait_procs(one.others())  # they die of its death, which takes the kernel a moment
        return code, shown.decode(), one.others()


def test_ctrl_c_stops_one_process_with_its_loader_workers(small_corpus, folder):
    """A terminal sends the signal to all processes, and here more than once."""
    code, shown, left = typed_and_shown(endless(folder, small_corpus), [b"\x03"] * 3, "data.workers=2")
    assert (code, left) == (75, []), shown
    assert "SIGINT: saving and stopping after this step" in shown
    is_whole(folder)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_stops(small_corpus, folder):
    code, shown, left = typed_and_shown(endless(folder, small_corpus), [], "data.workers=1")
    assert (code, left) == (75, []), shown
    assert json.loads((folder / "run/status.json").read_text())["state"] == "stopped"
    is_whole(folder)


def test_a_run_stops_after_its_hours(small_corpus, folder):
    done = run_forked("train", endless(folder, small_corpus), "run.max_hours=0.0002")
    assert done.returncode == 75, done.stderr
    is_whole(folder)


@pytest.mark.slow
def test_a_crash_in_native_code_leaves_its_stack(small_corpus, folder):
    with Forked("train", endless(folder, small_corpus)) as one:
        one.until("step 2/")
        os.kill(one.pid, signal.SIGSEGV)
        assert one.wait() == -signal.SIGSEGV
        stack = one.stderr.partition("Fatal Python error: Segmentation fault")[2]
        assert "pretrain/training/run.py" in stack


def test_a_rank_that_hangs_ends_those_that_wait_for_it_with_their_stacks(small_corpus, folder):
    with forked_ranks(2, "train", endless(folder, small_corpus), "faults.hang_timeout_seconds=20") as (one, other):
        one.until("step 2/")
        os.kill(other.pid, signal.SIGSTOP)
        assert one.wait() == 1
        report, _, stacks = one.stderr.partition("all stacks follow")
        assert "rank 0: no progress for 20 s (faults.hang_timeout_seconds); " in report
        assert "pretrain/training/run.py" in stacks
        assert re.search(r"torch/distributed/|deepspeed/", stacks)  # in whichever collective it waits
