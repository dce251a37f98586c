"""The process group of a run: a single process, or all processes that a launcher started."""

import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from data_pipeline.foundation.command import print_error
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.lazy_imports import imported_at_first_use
from pretrain.hardware import (
    ACCELERATOR,
    bind_to,
    cores_beside,
    device_type,
    free_port,
    local_gpu,
    local_ranks,
    threads_per_rank,
)
from pretrain.run import heartbeat, rank_logs, watchdog
from pretrain.zero.memory import keep_freed_memory
from pretrain.zero.unused_imports import keep_compiler_away

with imported_at_first_use():
    from pretrain.zero import deepspeed_private  # DeepSpeed chooses its accelerator when it is imported

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"
_OF_LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_opened: list[dist.TCPStore] = []
_of_threads: list[dist.ProcessGroup] = []
_STORE_EXISTS = "TORCHELASTIC_USE_AGENT_STORE"  # PyTorch: whether something else than rank 0 has opened the store


@contextlib.contextmanager
def process_group(
    cpu_threads: int | None, seconds: float, any_version: bool = False, bind_cores: bool = True
) -> Iterator[tuple[int, int]]:
    """Joins the process group for the duration of the block; yields (rank, number of ranks). `bind_cores` as in a run
    file.

    `seconds`: how long the watchdog lets a rank make no progress. Collectives time out later than that. `any_version`:
    whether DeepSpeed may be another one than the tested one.

    Every rank raises a UserError, but only rank 0 reports it, or each rank in its own log. The process group is
    destroyed at the end: otherwise gloo ranks may abort at exit. After an error, a rank that would wait for the others
    there ends at once instead, with the code that it would have ended with.
    """
    _environment_of_one_process()
    kind = os.environ[ACCELERATOR] = device_type()  # DeepSpeed reads it
    on_gpu = kind == "cuda"
    if on_gpu:
        os.environ["LOCAL_RANK"] = str(local_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
    else:
        keep_freed_memory()
        # A CPU takes up to a hundred times as long for numbers below 1e-38, which the attention of a trained model has.
        torch.set_flush_denormal(True)  # before there are other threads, which take it over
    torch.set_num_threads(cpu_threads or threads_per_rank(local_ranks()))
    if on_gpu and bind_cores:
        bind_to(cores_beside(_pci_address(int(os.environ["LOCAL_RANK"]))))  # before there are other threads
    if not any_version:
        deepspeed_private.check_version()
    deepspeed_private.deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")  # set below
    # longer than the watchdog's limit, since the watchdog reports more
    timeout = timedelta(seconds=seconds + 2 * watchdog.GRACE)
    deepspeed_private.load_no_extensions()
    with _store_on_loopback(timeout):
        deepspeed_private.deepspeed.init_distributed(timeout=timeout)
    keep_compiler_away()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # where NCCL communicates
    rank = dist.get_rank()
    try:
        yield rank, dist.get_world_size()
    except BaseException as error:
        raise _leave(error, rank) from None
    dist.destroy_process_group()


@contextlib.contextmanager
def _store_on_loopback(timeout: timedelta) -> Iterator[None]:
    """Has the store, where ranks meet, listen for this machine alone if all ranks are on it.

    PyTorch's own would listen on all interfaces, and it asks nobody for a token.
    """
    ours = os.environ["MASTER_ADDR"] == _LOOPBACK and os.environ.get(_STORE_EXISTS) != "True"
    if not ours or os.environ["RANK"] != "0":
        yield
        return
    port, ranks = int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    listener = socket.create_server((_LOOPBACK, port), backlog=ranks + 16)
    # all ranks connect to it, this one too; `dist` holds on to connections alone, so this module keeps the server
    _opened.append(
        dist.TCPStore(
            _LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    )
    os.environ[_STORE_EXISTS] = "True"
    try:
        yield
    finally:
        del os.environ[_STORE_EXISTS]


def _leave(error: BaseException, rank: int) -> BaseException:
    """Reports `error` and leaves the process group; returns the exception that this rank ends with."""
    end = error
    if isinstance(error, Exception):
        heartbeat.tell_failed(rank, error)
    if isinstance(error, UserError):
        if rank and not rank_logs.supervised():
            end = SystemExit(error.exit_code)
    elif isinstance(error, Exception):
        traceback.print_exc()  # now: leaving a group whose other ranks are dead may take long
        end = SystemExit(1)
    elif isinstance(error, SystemExit):  # by code that the run calls; the other ranks wait for this one
        print(f"error: exited with code {error.code or 0} before the run's end", file=sys.stderr, flush=True)
    if _exit_may_block():
        if isinstance(end, UserError):
            print_error(end)
        _exit_now(error.exit_code if isinstance(error, UserError) else 1)
    dist.destroy_process_group()
    return end


def _exit_may_block() -> bool:
    """True if leaving the process group may wait for ranks that wait for this one, as NCCL's communicators do, or end
    in an abort, as gloo does while a thread communicates."""
    return dist.get_backend() == "nccl" or (bool(_of_threads) and dist.get_world_size() > 1)


def _exit_now(code: int) -> NoReturn:
    """Exits without the cleanup of Python and libraries, which would wait for other ranks."""
    for child in multiprocessing.active_children():  # the loader's
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def group_of_threads() -> dist.ProcessGroup:
    """A group in which threads of all ranks communicate beside training. All ranks call this together."""
    group = dist.new_group(backend="gloo", timeout=timedelta(days=99))  # a disk may be slow; the watchdog has the limit
    _of_threads.append(group)
    return group


def from_rank_0(value: T) -> T:
    """Rank 0's `value`, on all ranks, which call this together. For what is read from files, which may change."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def on_rank_0(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 only and returns its result on all ranks. A UserError is raised on all ranks."""
    result: T | None = None
    refused: UserError | None = None
    if dist.get_rank() == 0:
        try:
            result = work()
        except UserError as error:
            refused = error
    result, refused = from_rank_0((result, refused))
    if refused is not None:
        raise refused
    return cast(T, result)


def of_all_ranks(value: T) -> list[T]:
    """The values of all ranks, on each of them. They call this together."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_value(value: T | None) -> T | None:
    """The value of the first rank that has one, on all ranks, which call this together."""
    return next((value for value in of_all_ranks(value) if value is not None), None)


def least(value: int, device: torch.device) -> int:
    """The least value of all ranks, which call this together."""
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)


def communication_device() -> torch.device:
    """The device that tensors must be on to be exchanged between ranks."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _pci_address(gpu: int) -> str:
    """Where a visible GPU is on the PCI bus: 0000:17:00.0; "" if PyTorch doesn't say. Makes no context on it."""
    found: Any = torch.cuda.get_device_properties(gpu)  # PyTorch's stubs lack these
    domain, bus, device = (getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return "" if None in (domain, bus, device) else f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _environment_of_one_process() -> None:
    # matrix products then sum in the same order whatever the alignment of their operands
    os.environ.setdefault("MKL_CBWR", "AUTO")
    if "RANK" in os.environ:
        if lacking := [name for name in _OF_LAUNCHERS if name not in os.environ]:
            raise UserError(
                f"RANK is set, but not {', '.join(lacking)}: launchers set all of them; unset RANK without one"
            )
        return
    # without LOCAL_SIZE, DeepSpeed starts a program at each reduction, which counts the CPUs
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": _LOOPBACK}
    os.environ |= {**single, "MASTER_PORT": str(free_port())}
