"""Joining the ranks of a run: a single process, or all processes that a launcher started."""

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
from pretrain.zero.memory import keep_freed_memory

T = TypeVar("T")


@contextlib.contextmanager
def joined(cpu_threads: int | None, seconds: float) -> Iterator[tuple[int, int]]:
    """Joins the process group for the duration of the block; yields (rank, number of ranks).

    `seconds`: how long the watchdog lets a rank make no progress. Collectives time out later than that.

    Every rank raises a UserError, but only rank 0 reports it, or each rank in its own log. The process group is
    destroyed at the end: otherwise gloo ranks may abort at exit.
    """
    _environment_of_one_process()
    if not torch.cuda.is_available():
        keep_freed_memory()
        torch.set_num_threads(cpu_threads or threads_per_rank(int(os.environ.get("LOCAL_SIZE", "1"))))
    from pretrain.zero import internals
    from pretrain.zero.config import quiet_deepspeed

    internals.check_version()
    quiet_deepspeed()
    # longer than the watchdog's limit, since the watchdog reports more
    timeout = timedelta(seconds=seconds + 2 * watchdog.GRACE)
    internals.load_no_extensions()
    internals.deepspeed.init_distributed(timeout=timeout)
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
        traceback.print_exc()  # now: leaving a group whose other ranks are dead may take long
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


def of_rank_0(value: T) -> T:
    """Rank 0's `value`, on all ranks, which call this together. For what is read from files, which may change."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def by_rank_0(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 only and returns its result on all ranks. A UserError is raised on all ranks."""
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
    """The device that tensors must be on to be exchanged between ranks."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _environment_of_one_process() -> None:
    # matrix products then sum in the same order whatever the alignment of their operands
    os.environ.setdefault("MKL_CBWR", "AUTO")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    if "RANK" in os.environ:
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**alone, "MASTER_PORT": str(free_port())}
