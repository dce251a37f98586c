"""Runs that are signalled, killed, stopped or hang: real processes, real signals."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch import keep
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.choose import newest
from pretrain.metrics.log import read_metrics
from tests.conftest import run
from tests.pretrain.runs import losses, run_file

FAILING_RANK = """
import os, sys, threading, time

def fail(*_):
    raise ValueError("on purpose")

def once_there():
    while not hasattr(sys.modules.get("pretrain.zero.engine"), "Engine"):
        time.sleep(0.1)
    sys.modules["pretrain.zero.engine"].Engine.step = fail

if os.environ.get("RANK") == "1":
    threading.Thread(target=once_there, daemon=True).start()
"""


class Started:
    """A command of this project in the background, whose output the test reads."""

    def __init__(self, folder: Path, *command: str | Path, terminal: int | None = None):
        name, *arguments = map(str, command)
        in_terminal = ["setsid", "--ctty"] if terminal is not None else []
        self._errors = folder / "stderr"
        self._folder = folder
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*in_terminal, str(Path(sys.executable).with_name(name)), *arguments],
                stdin=terminal,
                stdout=subprocess.PIPE if terminal is None else terminal,
                stderr=errors if terminal is None else terminal,
                text=True,
                start_new_session=terminal is None,
            )
        if terminal is not None:
            os.close(terminal)

    def until(self, start: str) -> None:
        """Reads output up to a line that begins with `start`."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(start):
                return
        raise AssertionError(self.stderr)

    def end(self, at_once: bool = True) -> int:
        """The exit code, once the command has ended and left no process behind.

        `at_once`: a supervisor that ends has seen all other processes end. Without a supervisor, or if it was killed,
        the kernel takes a moment to kill them.
        """
        self.rest = self.process.communicate()[0]
        if not at_once:
            psutil.wait_procs(self.others())
        assert self.others() == []
        return self.process.returncode

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def others(self) -> list[psutil.Process]:
        """Every process of the run except the one that was started, recognised by a name that all of them contain."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("RUN_UNDER_TEST") == str(self._folder)
                if marked and process.status() != psutil.STATUS_ZOMBIE and process.pid != self.process.pid:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def named(self, name: str) -> psutil.Process:
        """DeepSpeed's "launcher", or "rank N"."""
        for process in self.others():
            command = process.cmdline()
            rank = process.environ().get("RANK")
            if name == "launcher" and "launch.node_launcher" in command:
                return process
            if name == f"rank {rank}" and "pretrain" in command and keep.__file__ not in command:
                return process
        raise AssertionError(f"no {name}")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RUN_UNDER_TEST", str(tmp_path))
    return tmp_path


@pytest.fixture
def started(folder) -> Iterator[list[Started]]:
    """The processes that a test has started, which are killed at its end."""
    all_started: list[Started] = []
    yield all_started
    for one in all_started:
        for process in [*one.others(), one.process]:
            process.kill()
        one.process.wait()


ENDLESS = {"name": "test", "max_steps": 1_000_000, "cpu_threads": 1}


def endless(folder: Path, corpus: Path, **changes: object) -> Path:
    settings = {**ENDLESS, "directory": str(folder / "run")}
    return run_file(folder, corpus, **{"run": settings, "evaluation": [], **changes})


def launched(started: list[Started], path: Path, *overrides: str) -> Started:
    """Starts a run of two ranks and waits until it has done two steps."""
    one = Started(path.parent, "launch", "local", path, "--ranks", "2", *overrides)
    started.append(one)
    one.until("step ")
    one.until("step ")
    return one


def log(folder: Path, attempt: int, rank: int) -> str:
    return (folder / f"run/logs/attempt-{attempt:04d}/rank-{rank:05d}.log").read_text()


def is_whole(folder: Path) -> None:
    """Asserts that the latest checkpoint matches its index and is that of the last logged step."""
    checkpoint = newest(folder / "run")
    assert checkpoint
    assert checkpoint_index.read(checkpoint).step == max(losses(folder / "run.yaml"))


def test_sigterm_to_the_supervisor_saves_and_stops_with_75(small_corpus, folder, started):
    """Every step ends in a save here, so most signals arrive during one."""
    path = endless(folder, small_corpus, checkpoint={"every_steps": 1, "keep_last": 2})
    one = launched(started, path)
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 75, one.stderr
    assert "stopped on request" in one.rest
    assert not (folder / "run/stop").exists()
    is_whole(folder)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_schedulers_warning_to_all_processes_stops_the_run(small_corpus, folder, started, number):
    """The signal would otherwise end DeepSpeed's launcher, or make it kill the ranks, and end the loader's workers."""
    one = launched(started, endless(folder, small_corpus), "data.workers=1")
    for process in [one.process, *one.others()]:
        process.send_signal(number)
    assert one.end() == 75, one.stderr
    is_whole(folder)


def test_signals_to_one_rank_stop_all_and_a_second_run_is_refused_meanwhile(small_corpus, folder, started):
    path = endless(folder, small_corpus, checkpoint={"every_steps": 1, "keep_last": 2})
    one = launched(started, path)
    holder = f"process {one.named('rank 0').pid} on {socket.gethostname()} is already training here"
    for refused in (run("launch", "local", path, "--ranks", "2"), run("pretrain", "train", path)):
        assert refused.returncode == 2
        assert [line for line in refused.stderr.splitlines() if "error" in line] == [
            f"error: run.directory: {folder}/run: {holder}"
        ]
    assert not (folder / "run/logs/attempt-0002").exists()
    rank = one.named("rank 1")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        rank.send_signal(number)
        time.sleep(0.03)
    assert one.end() == 75, one.stderr
    is_whole(folder)
    assert "stopped on request" in log(folder, 1, 0)
    assert log(folder, 1, 1).count("saving and stopping after this step") == 1  # whichever Python saw first
    assert "step 2/" not in log(folder, 1, 1)


@pytest.mark.parametrize("command", [["pretrain", "train"], ["launch", "local"]])
def test_a_run_whose_terminal_is_closed_saves_and_stops(small_corpus, folder, started, command):
    terminal, inside = pty.openpty()
    one = Started(folder, *command, endless(folder, small_corpus), "data.workers=1", terminal=inside)
    started.append(one)
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        shown = b""
        while b"step 2/" not in shown:
            shown += screen.read(1000)
    time.sleep(0.5)
    with contextlib.suppress(ProcessLookupError):
        os.kill(one.process.pid, signal.SIGHUP)  # as its shell does
    assert one.end(at_once=command[0] == "launch") == 75
    assert json.loads((folder / "run/status.json").read_text())["state"] == "stopped"
    is_whole(folder)


def test_a_second_signal_to_the_supervisor_ends_at_once(small_corpus, folder, started):
    """It also ends ranks that can't obey the first signal."""
    one = launched(started, endless(folder, small_corpus))
    one.named("rank 0").suspend()
    one.process.send_signal(signal.SIGUSR1)
    while "SIGUSR1: saving and stopping" not in one.stderr:
        time.sleep(0.05)
    assert one.process.poll() is None
    one.process.send_signal(signal.SIGUSR1)
    assert one.end() == 1


def test_no_process_outlives_a_killed_supervisor_and_the_run_can_go_on(small_corpus, folder, started):
    """This includes a stopped rank and the loader's workers; the lock is released with them."""
    path = endless(folder, small_corpus, checkpoint={"every_steps": 2, "keep_last": 2})
    one = launched(started, path, "data.workers=1")
    assert len(one.others()) >= 5  # DeepSpeed's launcher, two ranks, two workers
    one.named("rank 1").suspend()
    one.process.kill()
    one.end(at_once=False)
    (folder / "run/checkpoints/.step-00000099.tmp/tokenizer").mkdir(parents=True)  # it may have died during a save

    one = launched(started, path)
    one.named("launcher").kill()
    assert one.end() == 1
    assert "the launcher ended before its ranks" in one.stderr
    assert json.loads((folder / "run/status.json").read_text())["attempt"] == 2


def test_a_killed_rank_ends_the_run_though_the_others_hang(small_corpus, folder, started):
    """It ends after faults.dead_rank_seconds: all other limits are longer than a test may take."""
    one = launched(started, endless(folder, small_corpus), "faults.dead_rank_seconds=3")
    one.named("rank 0").suspend()
    killed = time.monotonic()
    one.named("rank 1").kill()
    assert one.end() == 1
    assert time.monotonic() - killed >= 3
    assert f"rank 1 was killed by SIGKILL; its log: {folder}/run/logs/attempt-0001/rank-00001.log" in one.stderr


def test_a_crash_in_native_code_is_told_with_its_stacks(small_corpus, folder, started):
    one = launched(started, endless(folder, small_corpus), "faults.dead_rank_seconds=10")
    one.named("rank 1").send_signal(signal.SIGSEGV)
    assert one.end() == 1
    assert "rank 1 was killed by SIGSEGV" in one.stderr
    assert "Fatal Python error: Segmentation fault" in log(folder, 1, 1)
    assert "pretrain/train.py" in one.stderr  # from the last lines of its log
    assert "Fatal Python error" not in one.rest


def test_a_rank_that_raises_is_told_with_its_last_lines(small_corpus, folder, started, monkeypatch):
    """The other ranks fail later, when their collectives miss it."""
    (folder / "sitecustomize.py").write_text(FAILING_RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    one = Started(folder, "launch", "local", endless(folder, small_corpus), "--ranks", "2")
    started.append(one)
    assert one.end() == 1
    assert "rank 1 ended with exit code 1" in one.stderr
    assert "ValueError: on purpose" in one.stderr
    assert "ValueError: on purpose" not in one.rest


def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_those_that_wait(small_corpus, folder, started):
    one = launched(started, endless(folder, small_corpus), "faults.hang_seconds=20", "faults.dead_rank_seconds=3")
    one.named("rank 1").suspend()
    assert one.end() == 1
    assert "rank 0: no progress for 20 s (faults.hang_seconds); all stacks follow" in one.rest
    stacks = one.rest.partition("all stacks follow")[2]
    assert "pretrain/train.py" in stacks
    assert re.search(r"torch/distributed/|deepspeed/", stacks)  # in whichever collective it waits
    assert "rank 0 ended with exit code 1" in one.stderr


def test_a_loader_that_hangs_is_seen_in_the_stacks(small_corpus, folder, started):
    """Its shard is replaced by a FIFO: opening it waits for a writer, as opening a file on a dead network mount
    does."""
    shutil.copytree(small_corpus, folder / "corpus")
    evaluation = [{"hook": "validation_loss", "every_steps": 20}]
    one = Started(
        folder,
        "pretrain",
        "train",
        endless(folder, folder / "corpus", evaluation=evaluation),
        "faults.hang_seconds=20",
    )
    started.append(one)
    one.until("step 2/")
    for shard in (folder / "corpus/shards/validation").iterdir():
        shard.unlink()
        os.mkfifo(shard)
    assert one.end() == 1
    assert "rank 0: no progress for 20 s (faults.hang_seconds); all stacks follow" in one.stderr
    assert "data_pipeline/loading/store.py" in one.stderr.partition("all stacks follow")[2]


def test_ctrl_c_stops_one_process_with_its_loader_workers(small_corpus, folder, started):
    """A terminal sends the signal to all processes, and here more than once."""
    path = endless(folder, small_corpus)
    one = Started(folder, "pretrain", "train", path, "data.workers=2")
    started.append(one)
    one.until("step 2/")
    for _ in range(3):
        os.killpg(one.process.pid, signal.SIGINT)
        time.sleep(0.05)
    assert one.end(at_once=False) == 75, one.stderr
    assert "SIGINT: saving and stopping after this step" in one.stderr
    is_whole(folder)


def test_a_run_stops_after_its_hours(small_corpus, folder):
    done = run("pretrain", "train", endless(folder, small_corpus), "run.max_hours=0.0002")
    assert done.returncode == 75, done.stderr
    is_whole(folder)


FULL_FOR_A_WHILE = """
set -e
mount -t tmpfs -o size=24m tmpfs "$disk"
"$launch" local "$file" --ranks 2 > "$folder/out" 2> "$folder/err" & run=$!
until grep -q "^step 2/" "$folder/out"; do kill -0 $run; sleep 0.1; done
while cat /dev/zero >> "$disk/filler" 2> "$folder/full" || true; do sleep 0.01; done & filling=$!
until grep -q "warning: " "$folder/err"; do kill -0 $run; sleep 0.1; done
kill $filling
wait $filling || true
rm "$disk/filler"
touch "$disk/run/stop"
wait $run && code=0 || code=$?
cp "$disk/run/metrics.jsonl" "$folder"
exit $code
"""


def test_a_disk_that_is_full_for_a_while_stops_nothing(small_corpus, folder):
    """Neither checkpoints nor metrics nor logs fit. The terminal says so, and no step is lost."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a file system of one's own takes root")
    disk = folder / "disk"
    disk.mkdir()
    path = endless(folder, small_corpus, run={**ENDLESS, "directory": str(disk / "run")})
    names = {"disk": disk, "folder": folder, "file": path, "launch": Path(sys.executable).with_name("launch")}
    environment = {**os.environ, **{name: str(path) for name, path in names.items()}}
    done = subprocess.run(["unshare", "--mount", "bash", "-c", FULL_FOR_A_WHILE], env=environment)
    out, err = ((folder / name).read_text() for name in ("out", "err"))
    assert done.returncode == 75, err
    full = "No space left on device; the run goes on, but its logs are incomplete"
    assert err.splitlines() == [f"warning: {disk}/run/logs/attempt-0001: {full}"]
    (stopped,) = re.findall(r"stopped on request after step (\d+)", out)
    logged = [row.step for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row.metrics]
    assert logged == list(range(1, int(stopped) + 1))
