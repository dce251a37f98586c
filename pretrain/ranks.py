"""Joining the ranks of a run: one process alone, or all that a launcher started."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from data_pipeline.errors import UserError
from pretrain.hardware import free_port, threads_per_rank


@contextlib.contextmanager
def joined(cpu_threads: int | None = None) -> Iterator[tuple[int, int]]:
    """(rank, ranks) of this process, for as long as the block lasts.

    An error that is the user's to mend is met by every rank; rank 0 alone tells it. Without destroying the process
    group, gloo ranks may abort at exit.
    """
    _environment_of_one_process()
    if not torch.cuda.is_available():
        torch.set_num_threads(cpu_threads or threads_per_rank(int(os.environ.get("LOCAL_SIZE", "1"))))
    import deepspeed

    from pretrain.deepspeed_config import quiet_deepspeed

    quiet_deepspeed()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    try:
        yield rank, dist.get_world_size()
    except UserError as error:
        if rank == 0:
            raise
        raise SystemExit(error.exit_code) from None
    finally:
        dist.destroy_process_group()


def communication_device() -> torch.device:
    """Where tensors must lie that ranks exchange."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _environment_of_one_process() -> None:
    os.environ.setdefault("MKL_CBWR", "AUTO")  # sums of a matrix product in one order, wherever its operands lie
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**alone, "MASTER_PORT": str(free_port())}
