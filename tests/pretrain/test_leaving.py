"""A rank that fails where leaving the process group waits for the other ranks, as it does under NCCL."""

import json
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.foundation.errors import FailedError, UserError
from launch.rank_processes import wrapped
from pretrain.run import heartbeat
from tests.launch.shell_ranks import supervise
from tests.ports import free_port
from tests.pretrain.rank_processes import PROCESSES, on_ranks
from tests.tables import each

LAUNCHER = """
import json, os, subprocess, sys
started = [subprocess.Popen(json.loads(sys.argv[1]), env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
started[1].wait()
started[0].wait()
"""
RANK = """
import os, time
import torch.distributed as dist
from pretrain.zero import ranks
from pretrain.zero.ranks import process_group
from tests.pretrain.test_leaving import wait_for_ever

os.environ["LOCAL_RANK"] = os.environ["RANK"]
ranks._exit_may_block = lambda: True
dist.destroy_process_group = wait_for_ever
with process_group(1, 600.0) as (rank, _):
    dist.barrier()
    if rank == 0:
        wait_for_ever()  # in a collective of NCCL, which doesn't notice that a rank is gone
    raise ValueError("on purpose")
"""
ERRORS = {
    torch.OutOfMemoryError("CUDA out of memory"): 1,
    FailedError("a loader's worker died"): 1,
    UserError("data.train: wrong"): 2,
    SystemExit(3): 1,
}


def wait_for_ever() -> None:
    time.sleep(3600)


@pytest.mark.slow
def test_the_run_ends_though_the_failed_rank_would_wait_for_a_rank_that_waits_for_it(tmp_path, capfd, monkeypatch):
    command = json.dumps(wrapped([sys.executable, "-c", RANK]))
    own = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    launcher = [sys.executable, "-S", "-c", LAUNCHER, command]
    assert supervise(launcher, tmp_path, ranks=2, dead_rank_seconds=1) == 1
    lines = capfd.readouterr().err.splitlines()
    logs = tmp_path / "logs/attempt-0001"
    assert f"rank 1 ended with exit code 1: ValueError: on purpose; its log: {logs}/rank-00001.log" in lines
    assert lines[-1] == "  ValueError: on purpose"
    assert (logs / "rank-00001.exit").read_text() == "1\n"


@each("error, code", ERRORS.items())
def test_the_exit_code_is_that_of_the_error_and_no_process_is_left(tmp_path, error, code):
    output, child = tmp_path / "output", tmp_path / "child"
    process = PROCESSES.Process(target=fail, args=(error, output, child))
    process.start()
    process.join()
    assert process.exitcode == code
    shown = output.read_text()
    if isinstance(error, UserError):
        assert (tmp_path / "rank-0.failed").read_text() == str(error)
        assert f"error: {error}" in shown
    elif not isinstance(error, SystemExit):
        assert str(error) in shown
    while psutil.pid_exists(int(child.read_text())):  # the kernel takes a moment
        time.sleep(0.02)


def fail(error: BaseException, output: Path, child: Path) -> None:
    from pretrain.zero import ranks

    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.environ[heartbeat.DIRECTORY] = str(output.parent)
    ranks._exit_may_block = lambda: True
    dist.destroy_process_group = wait_for_ever
    worker = mp.get_context("fork").Process(target=wait_for_ever, daemon=True)  # like a loader's, without a server
    worker.start()
    child.write_text(str(worker.pid))
    with ranks.process_group(1, 600.0):
        raise error


def test_a_rank_that_succeeds_leaves_its_group():
    process = PROCESSES.Process(target=succeed)
    process.start()
    process.join()
    assert process.exitcode == 0


def succeed() -> None:
    from pretrain.zero import ranks

    ranks._exit_may_block = lambda: True
    with ranks.process_group(1, 600.0):
        ones: Tensor = torch.ones(2)
        dist.all_reduce(ones)
    assert not dist.is_initialized()


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
