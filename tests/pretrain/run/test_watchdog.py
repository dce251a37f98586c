"""How the watchdog treats ranks that hang, start and compile, and how ranks that fail end."""

import multiprocessing as mp
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from data_pipeline.base.errors import FailedError, UserError
from pretrain.config.run_config import ComputeSection
from pretrain.engine.construction import prepare_layers
from pretrain.models.layers import Layer
from pretrain.run import heartbeat, watchdog
from tests.support.ports import free_port
from tests.support.rank_processes import PROCESSES, on_ranks
from tests.support.tables import each

# `skip` has time pass, which the watchdog has seen when it returns.
SKIP = """
import time
from types import SimpleNamespace
from pretrain.run import watchdog

skipped = 0.0
watchdog.time = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped, sleep=time.sleep)
watchdog.SECONDS_BETWEEN_LOOKS = 0.01

def skip(seconds):
    global skipped
    skipped += seconds
    signs = watchdog._rank.signs
    for _ in range(3):  # the first look may have begun before; the third begins after the second has ended
        beat = signs.beat
        while signs.beat == beat:
            time.sleep(0.01)
"""
HANGS = "skip(1e4); print('continues'); raise SystemExit"
HANG = f"""
with watchdog.watching(7, hang_seconds=5000, start_seconds=1e6):
    skip(1e4); print('started', flush=True)
    watchdog.step_done(); {HANGS}
"""
# 20 steps are at least 5000 s here. The first step is part of the start, and a save is part of no step.
USUAL = f"""
watchdog.LEAST_SECONDS = 5000.0
with watchdog.watching(0, None, start_seconds=1e6):
    for _ in range(20): watchdog.step_done()
    skip(1e4); print('too few steps are known', flush=True)
    with watchdog.slow_phase():
        for _ in range(20): watchdog.step_done()
        skip(1e4); print('saved', flush=True)
    {HANGS}
"""
START = f"""
with watchdog.watching(0, hang_seconds=1e6, start_seconds=5000):
    {HANGS}
"""
WAITING = "with watchdog.watching(0, 3600, 1): time.sleep(3600)"  # nothing tells it to look at the clock
# Native code that hangs with the interpreter's lock stops the watchdog too; faulthandler ends the rank after 2 s.
NATIVE = """
import ctypes; watchdog.GRACE = 2 - 3600
with watchdog.watching(0, 3600, 3600): ctypes.PyDLL(None).sleep(3600)
"""
UNWATCHED = f"""
with watchdog.watching(0, 5000, 5000):
    with watchdog.unwatched(): skip(1e4)
    print('waited', flush=True); {HANGS}
"""


@each(
    "code, said, error",
    [
        (HANG, "started\n", "rank 7: no progress for 5000 s (faults.hang_timeout_seconds); all stacks follow"),
        (
            USUAL,
            "too few steps are known\nsaved\n",
            "rank 0: no progress for 5000 s (20 steps and 5000 s; faults.hang_timeout_seconds sets another limit); "
            "all stacks follow",
        ),
        (START, "", "rank 0: no progress for 5000 s (faults.start_timeout_seconds); all stacks follow"),
        (WAITING, "", "rank 0: no progress for 1 s (faults.start_timeout_seconds); all stacks follow"),
        (NATIVE, "", "Timeout (0:00:0"),
        (UNWATCHED, "waited\n", "rank 0: no progress for 5000 s (faults.start_timeout_seconds); all stacks follow"),
    ],
)
def test_a_rank_that_hangs_is_ended_with_its_stacks(code, said, error):
    """A start takes longer than a hang, and what follows it doesn't; a wait with a limit of its own is no hang."""
    program = SKIP + code.rstrip()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, said)
    assert done.stderr.startswith(error)
    assert f'File "<string>", line {program.count(chr(10)) + 1} in <module>' in done.stderr


SIGNS = """
from pathlib import Path
from pretrain.run import heartbeat, watchdog
def seen():
    one = heartbeat.read(Path())[3]
    return one.step, one.marks, one.first_step is None, one.stopped
with watchdog.watching(3, None, 3600):
    watchdog.mark(7)
    watchdog.mark()
    print(seen())
    watchdog.step_done()
    print(seen())
watchdog.mark()
print(seen())
"""


def test_the_supervisor_sees_a_ranks_step_its_marks_and_that_its_first_step_is_done(tmp_path):
    environment = {**os.environ, heartbeat.DIRECTORY: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SIGNS], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["(7, 2, True, False)", "(7, 2, False, False)", "(7, 2, False, False)"]


def test_heartbeats_that_something_removes_are_not_read(tmp_path):
    """A link that leads nowhere is a file that is gone once it has been listed."""
    (tmp_path / "rank-3").symlink_to(tmp_path / "gone")
    assert heartbeat.read(tmp_path) == {}


def test_an_error_in_any_letters_is_told(tmp_path, monkeypatch):
    """A name of a file that isn't UTF-8 has surrogates, which no locale can write."""
    monkeypatch.setenv(heartbeat.DIRECTORY, str(tmp_path))
    heartbeat.tell_failed(1, UserError("größe\udcff.txt: no such file"))
    (message,) = heartbeat.messages(tmp_path, set())
    assert (message.kind, message.text) == ("failed", "größe\\udcff.txt: no such file")


def test_a_hang_is_as_long_as_twenty_usual_steps_and_at_least_two_minutes():
    """One step of an hour among others, as when the disk of the data was away, changes nothing."""
    assert watchdog.hang_limit([0.5] * 19) is None
    assert watchdog.hang_limit([0.5] * 20) == 120
    assert watchdog.hang_limit([6.0] * 20) == 120
    assert watchdog.hang_limit([30.0] * 99 + [3600.0]) == 600


def test_compiling_a_layer_takes_longer_than_a_hang():
    assert on_ranks(1, survives_a_compilation, joined=False) == [1]


COMPILING = f"""
from datetime import timedelta; from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True)
watchdog.share(TCPStore("127.0.0.1", store.port))
with watchdog.watching(3, hang_seconds=5000, start_seconds=20_000):
    watchdog.step_done(); store.add("watchdog/compiling", 1)
    skip(1e4); print("waited", flush=True)
    store.add("watchdog/compiling", -1)
    {HANGS}
"""


def test_while_another_rank_compiles_waiting_for_it_is_no_hang():
    program = SKIP + COMPILING
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "waited\n")
    assert done.stderr.startswith("rank 3: no progress for 5000 s (faults.hang_timeout_seconds); all stacks follow")


class LinearLayer(Layer, torch.nn.Linear):
    run = torch.nn.Linear.forward


def survives_a_compilation() -> int:
    from pretrain.engine import construction as layerwise

    clock: dict = {}
    exec(SKIP, clock)
    compiled = []

    def backend(graph, inputs):  # a slow one for torch.compile; it returns the graph unchanged
        clock["skip"](1e4)
        compiled.append(graph)
        return graph.forward

    layerwise.BACKEND = backend  # in a process of this test's own
    model = torch.nn.Sequential(torch.nn.ModuleList([LinearLayer(2, 2)]))
    prepare_layers(model, ComputeSection(compile=True), stage=2)
    with watchdog.watching(0, hang_seconds=5000, start_seconds=1e6):
        watchdog.step_done()
        model[0][0](torch.ones(1, 2))
    return len(compiled)


# A rank that fails where leaving the process group waits for the other ranks, as it does under NCCL


ERRORS = {
    torch.OutOfMemoryError("CUDA out of memory"): 1,
    FailedError("a loader's worker died"): 1,
    UserError("data.train: wrong"): 2,
    SystemExit(3): 1,
    None: 0,
}


def wait_for_ever(**_: object) -> None:
    time.sleep(3600)


@each("error, code", ERRORS.items())
def test_the_exit_code_is_that_of_the_error_and_no_process_is_left(tmp_path, error, code):
    output, child = tmp_path / "output", tmp_path / "child"
    process = PROCESSES.Process(target=end_with, args=(error, output, child))
    process.start()
    process.join()
    assert process.exitcode == code
    shown = output.read_text()
    if isinstance(error, UserError):
        assert (tmp_path / "rank-0.failed").read_text() == str(error)
        assert f"error: {error}" in shown
    elif error and not isinstance(error, SystemExit):
        assert str(error) in shown
    while psutil.pid_exists(int(child.read_text())):  # the kernel takes a moment
        time.sleep(0.02)


def end_with(error: BaseException | None, output: Path, child: Path) -> None:
    """A rank without an error leaves its group."""
    from pretrain.engine import ranks

    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.environ[heartbeat.DIRECTORY] = str(output.parent)
    ranks._exit_may_block = lambda: True
    if error:
        dist.destroy_process_group = wait_for_ever
    worker = mp.get_context("fork").Process(target=wait_for_ever, daemon=True)  # like a loader's, without a server
    worker.start()
    child.write_text(str(worker.pid))
    with ranks.process_group(1, 600.0):
        dist.all_reduce(torch.ones(2))
        if error:
            raise error
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_rank_that_fails_while_its_thread_communicates_ends_with_its_exit_code():
    """At the exit of Python, gloo would abort it. The other rank, which waits for it, fails too."""
    where, port = f"{fail_beside_a_thread.__module__} import {fail_beside_a_thread.__name__}", free_port()
    commands = [f"from {where} as fail; fail({rank}, {port})" for rank in range(2)]
    ranks = [subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.DEVNULL) for command in commands]
    assert [rank.wait() for rank in ranks] == [1, 1]


def fail_beside_a_thread(rank: int, port: int) -> None:
    from pretrain.engine import ranks

    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2}
    os.environ |= {name: str(value) for name, value in {**own, "MASTER_PORT": port}.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with ranks.process_group(1, 600.0):
        group = ranks.group_of_threads()
        if rank == 0:
            threading.Thread(target=dist.barrier, args=(group,), daemon=True).start()
            time.sleep(0.5)  # it waits for the other rank's
            raise ValueError("on purpose")
        dist.all_reduce(torch.ones(1))


def test_ranks_of_one_machine_meet_where_no_other_machine_reaches_them():
    """PyTorch's store takes whatever comes without a token."""
    ports, none = on_ranks(2, listening)
    assert ports == ["127.0.0.1"]
    assert none == []


def listening() -> list[str]:
    """The addresses at which this process listens on the port where the ranks meet."""
    dist.barrier()
    sockets = psutil.Process().net_connections("inet")
    own = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
    dist.barrier()
    return [address.ip for address in own if address.port == int(os.environ["MASTER_PORT"])]
