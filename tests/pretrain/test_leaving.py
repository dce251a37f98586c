"""A rank that fails where leaving the process group waits for the other ranks, as it does under NCCL."""

import multiprocessing as mp
import os
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.foundation.errors import FailedError, UserError
from pretrain.run import heartbeat
from tests.pretrain.rank_processes import PROCESSES, on_ranks
from tests.tables import each

ERRORS = {
    torch.OutOfMemoryError("CUDA out of memory"): 1,
    FailedError("a loader's worker died"): 1,
    UserError("data.train: wrong"): 2,
    SystemExit(3): 1,
}


def wait_for_ever() -> None:
    time.sleep(3600)


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
