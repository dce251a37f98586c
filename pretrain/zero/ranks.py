"""Joining the ranks of a run: one process alone, or all that a launcher started."""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from data_pipeline.foundation.errors import UserError
from pretrain.run import rank_logs, watchdog
from pretrain.run.hardware import free_port, threads_per_rank

T = TypeVar("T")


@contextlib.contextmanager
def joined(cpu_threads: int | None, seconds: float) -> Iterator[tuple[int, int]]:
    """(rank, ranks) of this process, for as long as the block lasts.

    `seconds`: the longest that the watchdog lets a rank do nothing. A collective is given longer.

    An error that is the user's to mend is met by every rank; rank 0 alone tells it, or each in
    its own log. Without destroying the process group, gloo ranks may abort at exit.
    """
    _environment_of_one_process()
    if not torch.cuda.is_available():
        torch.set_num_threads(cpu_threads or threads_per_rank(int(os.environ.get("LOCAL_SIZE", "1"))))
    import deepspeed

    from pretrain.zero import internals
    from pretrain.zero.config import quiet_deepspeed

    internals.check_version()
    quiet_deepspeed()
    # longer than the watchdog takes, which knows more to say
    timeout = timedelta(seconds=seconds + 2 * watchdog.GRACE)
    internals.leave_shared_memory()
    deepspeed.init_distributed(timeout=timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # where NCCL communicates
    rank = dist.get_rank()
    try:
        yield rank, dist.get_world_size()
    except UserError as error:
        rank_logs.note_failure(rank)
        if rank == 0 or rank_logs.supervised():
            raise
        raise SystemExit(error.exit_code) from None
    except Exception:
        rank_logs.note_failure(rank)
        traceback.print_exc()  # now: to leave a group whose other ranks are dead may take long
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


def of_rank_0(value: T) -> T:
    """`value` as rank 0 has it, for all ranks; they call it together. For what files say: others may look later."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


def by_rank_0(work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, where alone it is done. What the user has to mend there is raised on all ranks."""
    done: T | None = None
    refused: UserError | None = None
    if dist.get_rank() == 0:
        try:
            done = work()
        except UserError as error:
            refused = error
    done, refused = of_rank_0((done, refused))
    if refused is not None:
        raise refused
    return cast(T, done)


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
