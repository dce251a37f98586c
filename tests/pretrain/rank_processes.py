"""Running a function on several ranks over gloo, each a process of its own."""

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from pretrain.hardware import free_port

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# A server that has imported DeepSpeed once forks the ranks: each import takes seconds.
_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload(["pretrain.engine"])


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 400, joined: bool = True
) -> list[Any]:
    """What `function(*arguments)` returns on each rank. Raises where a rank fails, or gives nothing for so long.

    `joined`: whether the ranks have a process group already, or `function` is to make one.
    """
    port = free_port()
    pipes = [_processes.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        _processes.Process(
            target=_on_rank, args=(rank, ranks, port, pipes[rank][1], function, arguments, joined), daemon=True
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that a rank that dies ends its pipe
        return [_received(rank, receiver, seconds) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for process in started:
            process.kill()
            process.join()


def each(function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """What `function` returns for the arguments of each case, one after the other: ranks are slow to start."""
    return [function(*case) for case in cases]


def _received(rank: int, receiver: Connection, seconds: float) -> Any:
    if not receiver.poll(seconds):
        raise TimeoutError(f"rank {rank} gave nothing in {seconds} s")
    succeeded, result = pickle.loads(receiver.recv_bytes())
    if not succeeded:
        raise RuntimeError(f"rank {rank}: {result}")
    return result


def _on_rank(
    rank: int,
    ranks: int,
    port: int,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    join: bool,
) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    os.environ |= {**{name: str(value) for name, value in own.items()}, "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    from pretrain.ranks import joined

    try:
        with joined(cpu_threads=1, hang_seconds=240) if join else contextlib.nullcontext():
            result = True, function(*arguments)
    except BaseException:
        result = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(result))
