"""Runs a function on several ranks over gloo, each a process of its own."""

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

from pretrain.run.hardware import free_port

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed asks for GPUs when it is imported; CUDA, if it answered that in the server, would fail in forked processes
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A server that has imported all this once forks the ranks: in each the imports would take seconds.
PROCESSES = mp.get_context("forkserver")
PRELOADED = [
    "pretrain.cli",
    "pretrain.train",
    "pretrain.micro_batch",
    "pretrain.checkpoint.restore",
    "pretrain.checkpoint.save",
    "pretrain.evaluation.hooks",
    "pretrain.models.t5",
    "pretrain.optimizers.adamw",
    "pyarrow.dataset",
    "deepspeed.module_inject",  # what DeepSpeed and PyTorch import when an engine is built
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.onnx",
]
PROCESSES.set_forkserver_preload(PRELOADED)


def on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 1500, joined: bool = True
) -> list[Any]:
    """Returns the result of `function(*arguments)` on each rank. Raises if a rank fails or takes longer than `seconds`.

    `joined`: whether the process group exists when `function` is called; otherwise `function` creates it.
    """
    port = free_port()
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        PROCESSES.Process(
            target=_on_rank, args=(rank, ranks, port, pipes[rank][1], function, arguments, joined), daemon=True
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        for _, sender in pipes:
            sender.close()  # so that a rank that dies ends its pipe
        received = [_received(rank, receiver, seconds) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for process in started:
            process.kill()
            process.join()
    if failures := [f"rank {rank}: {result}" for rank, (succeeded, result) in enumerate(received) if not succeeded]:
        raise RuntimeError("\n".join(failures))
    return [result for _, result in received]


def each(function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Calls `function` with the arguments of each case in turn: starting ranks is slow."""
    return [function(*case) for case in cases]


def _received(rank: int, receiver: Connection, seconds: float) -> tuple[bool, Any]:
    """(whether the rank succeeded, its result or its error)"""
    try:
        if receiver.poll(seconds):
            return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return False, "died"
    return False, f"gave nothing in {seconds} s"


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
    from pretrain.zero.ranks import joined

    try:
        with joined(cpu_threads=1, seconds=1500) if join else contextlib.nullcontext():
            result = True, function(*arguments)
    except BaseException as error:
        trouble = traceback.format_exception(error)
        if isinstance(error, SystemExit) and error.__context__ is not None:  # the output of `joined`
            trouble = traceback.format_exception(error.__context__)
        result = False, "".join(trouble)
    sender.send_bytes(pickle.dumps(result))
