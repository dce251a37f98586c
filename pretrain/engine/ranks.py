"""Joins and leaves the process group of a run, and exchanges values among its ranks. The group is one process, or all
processes that a launcher started."""

import contextlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from data_pipeline.base.command import print_error
from data_pipeline.base.errors import FailedError, StoreUnavailable, UserError
from data_pipeline.base.json_file import adapter
from data_pipeline.base.processes import importing
from pretrain.engine.memory import keep_freed_memory
from pretrain.hardware import ACCELERATOR, device_type, local_gpu, rank_threads
from pretrain.run import heartbeat, rank_logs, watchdog
from pretrain.run.rank_environment import LOOPBACK, RankEnvironment, be_the_only_rank, is_launched, rank_environment
from pretrain.run.world import World, node_name

T = TypeVar("T")
_of_threads: list[dist.ProcessGroup] = []
_STORE_EXISTS = "TORCHELASTIC_USE_AGENT_STORE"  # True tells PyTorch that the store is open already


@contextlib.contextmanager
def process_group(cpu_threads: int | None, seconds: float) -> Iterator[World]:
    """Joins the process group for the duration of the block; yields its ranks.

    `cpu_threads` as in a run file. `seconds`: the watchdog's limit; collectives time out later.

    Each rank reports its own UserError, to stderr or in its own log; one that all ranks raise together is reported by
    rank 0, or in each log. The process group is destroyed at the end: otherwise gloo ranks may abort at exit. After an
    error, a rank that would wait for other ranks there ends at once instead, with the same exit code. A single rank
    raises every error as it is.
    """
    # matmuls then sum in the same order for any alignment of their operands
    os.environ.setdefault("MKL_CBWR", "AUTO")
    if not is_launched():
        be_the_only_rank()
    here = rank_environment()
    kind = os.environ[ACCELERATOR] = device_type()  # DeepSpeed reads it
    on_gpu = kind == "cuda"
    if on_gpu:
        # DeepSpeed reads it as the number of the GPU: 0 on all ranks if each rank sees only its own GPU
        gpu = local_gpu(here.local_rank, torch.cuda.device_count())
        os.environ["LOCAL_RANK"] = str(gpu)
    else:
        keep_freed_memory()
        # for numbers below 1e-38, as in the attention of a trained model, a CPU takes up to a hundred times as long
        torch.set_flush_denormal(True)  # before there are other threads, which inherit the setting
    torch.set_num_threads(cpu_threads or rank_threads(here.local_world_size))
    if on_gpu:
        bind_to(cores_beside(_pci_address(gpu)))  # before there are other threads
    with importing():
        import deepspeed  # chooses its accelerator now, by the environment

        from pretrain.engine import deepspeed_private  # imports DeepSpeed, too

    deepspeed_private.check_version()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")  # set below
    # longer than the watchdog's limit, since the watchdog's report says more
    timeout = timedelta(seconds=seconds + 2 * watchdog.GRACE)
    deepspeed_private.load_no_extensions()
    with _store_on_loopback(here, timeout) as store:
        deepspeed.init_distributed(timeout=timeout)
    if on_gpu:
        torch.cuda.set_device(gpu)  # where NCCL communicates
    rank = dist.get_rank()
    if dist.get_world_size() > 1:
        watchdog.share(dist.TCPStore(here.master_addr, here.master_port, timeout=timeout))
    try:
        yield joined_world()
    except BaseException as error:
        if (end := _leave(error, rank)) is error:
            raise
        raise end from None
    _leave_group()
    del store  # `dist` keeps only connections, and all ranks are connected to this server, even this rank


@contextlib.contextmanager
def _store_on_loopback(here: RankEnvironment, timeout: timedelta) -> Iterator[dist.TCPStore | None]:
    """If all ranks are on this machine, has the store where they meet listen on the loopback interface only. Yields the
    server of the store, if this process has it.

    PyTorch's own server would listen on all interfaces, without authentication.
    """
    ours = here.master_addr == LOOPBACK and os.environ.get(_STORE_EXISTS) != "True"
    if not ours or here.rank:
        yield None
        return
    listener = socket.create_server((LOOPBACK, here.master_port), backlog=here.world_size + 16)
    server = dist.TCPStore(
        LOOPBACK,
        here.master_port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    os.environ[_STORE_EXISTS] = "True"
    try:
        yield server
    finally:
        del os.environ[_STORE_EXISTS]


def _leave(error: BaseException, rank: int) -> BaseException:
    """Reports `error` and leaves the process group; returns the exception that this rank ends with."""
    end = error
    if isinstance(error, Exception):
        heartbeat.tell_failed(rank, error)
    blocks = _exit_may_block()
    if isinstance(error, UserError):
        if rank and not rank_logs.supervised():
            if not error.on_all_ranks:
                print_error(UserError(f"rank {rank}: {error}"))
            end = SystemExit(error.exit_code)
    elif isinstance(error, Exception) and (blocks or dist.get_world_size() > 1):
        traceback.print_exc()  # now: leaving a group whose other ranks are dead may take long
        end = SystemExit(1)
    elif isinstance(error, SystemExit):  # raised by code that the run calls, while other ranks wait for this one
        print(f"error: exited with code {error.code or 0} before the run's end", file=sys.stderr, flush=True)
    if blocks:
        if isinstance(end, UserError):
            print_error(end)
        _exit_now(error.exit_code if isinstance(error, UserError) else 1)
    _leave_group()
    return end


def _leave_group() -> None:
    import deepspeed  # as in `process_group`

    _of_threads.clear()
    deepspeed.comm.destroy_process_group()  # unlike PyTorch's, this also tells DeepSpeed that groups are gone


def _exit_may_block() -> bool:
    """True if leaving the process group may wait for ranks that wait for this rank, as with NCCL, or abort, as with
    gloo while a thread communicates."""
    return dist.get_world_size() > 1 and (dist.get_backend() == "nccl" or bool(_of_threads))


def _exit_now(code: int) -> NoReturn:
    """Exits without the cleanup of Python and libraries, which would wait for other ranks."""
    for child in multiprocessing.active_children():  # processes of the loader
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def group_of_threads() -> dist.ProcessGroup:
    """A group in which threads of all ranks communicate during training. All ranks call this together."""
    dist.barrier()  # fails where a rank has left the run; `new_group` would wait for that rank
    group = dist.new_group(backend="gloo", timeout=timedelta(days=99))  # the watchdog has the limit: disks may be slow
    _of_threads.append(group)
    return group


def broadcast(value: T, kind: Any) -> T:
    """Rank 0's `value` on all ranks, which call this together. For content of files, which may change meanwhile.

    `kind`: the type of the value, which pydantic sends as JSON. Nothing is unpickled, since a peer could run any code.
    """
    own = _tensor(_encoded(value, kind) if dist.get_rank() == 0 else b"")
    size = torch.tensor([own.numel()], device=own.device)
    dist.broadcast(size, src=0)
    sent = own if dist.get_rank() == 0 else own.new_empty(int(size))
    dist.broadcast(sent, src=0)
    return cast(T, _decoded(sent, kind))


def on_rank_0(work: Callable[[], T], kind: Any) -> T:
    """Runs `work` on rank 0 only and returns its result, a `kind`, on all ranks. A UserError is raised on all ranks."""
    return cast(T, broadcast(run_on_all_ranks(lambda: work() if dist.get_rank() == 0 else None), kind))


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result of `work` on this rank. All ranks call this together, and none waits for a rank where `work` failed.

    If `work` fails anywhere, every rank raises: the failing rank its own error, unless that is a UserError or an
    OSError; the others a UserError with the message of the first rank that failed. The message names that rank, unless
    rank 0 raised a UserError.
    """
    result: T | None = None
    own: Exception | None = None
    mine: tuple[int, str] | None = None
    try:
        result = work()
    except Exception as error:
        own, where = error, f"rank {dist.get_rank()}: "
        if isinstance(error, UserError):
            mine = error.exit_code, f"{where if dist.get_rank() else ''}{error}"
        else:
            mine = FailedError.exit_code, where + words(error)
    errors = all_gather(mine, tuple[int, str] | None, group)
    if own and not isinstance(own, UserError | OSError):
        raise own
    for code, message in filter(None, errors):
        of_all = next(kind for kind in (UserError, FailedError, StoreUnavailable) if kind.exit_code == code)(message)
        of_all.on_all_ranks = True
        raise of_all from own
    return cast(T, result)


def words(error: Exception) -> str:
    """An error in words, with its type unless it is an OSError or a UserError."""
    if isinstance(error, OSError | UserError):
        return getattr(error, "strerror", None) or str(error)
    return f"{type(error).__name__}: {error}"


def all_gather(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks, on each rank. All ranks call this together. `kind`: as in `broadcast`.

    Raises ValueError on all ranks if the value of one rank isn't of this `kind`.
    """
    content, wrong = b"", ValueError("a value of another rank can't be sent")
    try:
        content = _encoded(value, kind)
    except ValueError as error:  # raised below, after the other ranks are told
        wrong = error
    own = _tensor(content, group)
    size = torch.tensor([own.numel()], device=own.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group)
    if not all(map(int, sizes)):
        raise wrong
    padded = own.new_zeros(int(torch.cat(sizes).max()))
    padded[: own.numel()] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group)
    return [_decoded(part[: int(one)], kind) for part, one in zip(parts, sizes, strict=True)]


def _encoded(value: object, kind: Any) -> bytes:
    # without unset fields, since a config knows which keys its file has; `json` keeps NaN and names that aren't UTF-8
    return json.dumps(adapter(kind).dump_python(value, mode="json", exclude_unset=True, warnings="error")).encode()


def _decoded(sent: torch.Tensor, kind: Any) -> Any:
    return adapter(kind).validate_python(json.loads(sent.cpu().numpy().tobytes()))


def _tensor(content: bytes, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return whole.to(communication_device(group))


def first_value(text: str | None) -> str | None:
    """The text of the first rank that has one, on all ranks. All ranks call this together."""
    return next(filter(None, all_gather(text, str | None)), None)


def joined_world() -> World:
    """The ranks of the process group that this process has joined. All ranks call this together."""
    names = all_gather(node_name(), str)
    nodes = tuple(tuple(rank for rank, name in enumerate(names) if name == node) for node in dict.fromkeys(names))
    return World(dist.get_rank(), len(names), nodes)


def max_over_ranks(value: int) -> int:
    """The greatest value of all ranks. All ranks call this together."""
    found = torch.tensor(value, device=communication_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def min_over_ranks(value: int) -> int:
    """The least value of all ranks. All ranks call this together."""
    return -max_over_ranks(-value)


def cores_beside(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores nearest to the device at a PCI address such as 0000:17:00.0; none if Linux doesn't say."""
    try:
        ranges = (devices / address / "local_cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in one.split("-")] for one in ranges if one]
    except (OSError, ValueError):
        return set()
    return {core for one in ends for core in range(one[0], one[-1] + 1)}


def bind_to(cores: set[int]) -> bool:
    """Binds this process, with its future threads and processes, to `cores`, as far as it may use them. Returns False
    if nothing changes: if it may use none of them, or already uses no others."""
    allowed = os.sched_getaffinity(0)
    if not cores & allowed or allowed <= cores:
        return False
    os.sched_setaffinity(0, cores & allowed)
    return True


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of tensors that ranks exchange, in a `group` or among all ranks."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _pci_address(gpu: int) -> str:
    """The PCI address of a visible GPU, such as 0000:17:00.0; "" if PyTorch doesn't say. Creates no CUDA context."""
    found: Any = torch.cuda.get_device_properties(gpu)  # PyTorch's stubs lack these
    ids: list[Any] = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return "" if None in ids else "{:04x}:{:02x}:{:02x}.0".format(*ids)
