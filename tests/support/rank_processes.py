"""Runs a function on several ranks, each a process of its own: over gloo on CPUs, over NCCL with a GPU for each."""

import contextlib
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.ports import free_port

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed asks for GPUs when it is imported; CUDA, if it answered that in the server, would fail in forked processes
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A server that has imported all this once forks the ranks: in each the imports would take seconds.
# `fork`: from the test's own process, where checks/mutation has changed the code.
PROCESSES = mp.get_context(os.environ.get("RANKS_START", "forkserver"))
PRELOADED = [
    "hypothesis",  # first, as its plugins search all objects; the modules of most tests import it
    "pytest",
    "pretrain.cli",
    "pretrain.training.run",
    "pretrain.training.callbacks",
    "pretrain.training.trainer",
    "pretrain.models.t5",
    "pretrain.engine.optimizers",
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
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 180,
    joined: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """Returns the result of `function(*arguments)` on each rank. Raises if a rank fails, or all take over `seconds`.

    `joined`: whether the process group exists when `function` is called; otherwise `function` creates it.

    With `device` cuda each rank needs a GPU of its own; where there are fewer, the test that called this is skipped.
    """
    if device == "cuda" and ranks > (gpus := torch.cuda.device_count()):
        pytest.skip(f"needs {ranks} GPUs; this machine has {gpus}")
    # a process that is forked can't use CUDA if the server did
    processes = PROCESSES if device == "cpu" else mp.get_context("spawn")
    pipes = [processes.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        processes.Process(
            target=_on_rank, args=(environment, sender, function, arguments, joined, seconds), daemon=True
        )
        for environment, (_, sender) in zip(environments(ranks), pipes, strict=True)
    ]
    try:
        with _computing_on(device):
            for process in started:
                process.start()
        for _, sender in pipes:
            sender.close()  # so that a rank that dies ends its pipe
        received = _received([receiver for receiver, _ in pipes], seconds)
    finally:
        for process in started:
            process.kill()
            process.join()
    if failures := [f"rank {rank}: {result}" for rank, (succeeded, result) in enumerate(received) if not succeeded]:
        raise RuntimeError("\n".join(failures))
    return [result for _, result in received]


def environments(ranks: int) -> list[dict[str, str]]:
    """The variables of each of the ranks of a group on this machine."""
    group = {"WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    own = [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    return [{name: str(value) for name, value in one.items()} for one in own]


@contextlib.contextmanager
def _computing_on(device: str) -> Iterator[None]:
    """Processes that start within the block compute on `device`: DeepSpeed chooses when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", device)
        if device == "cpu":
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def each(function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Calls `function` with the arguments of each case in turn: starting ranks is slow."""
    return [function(*case) for case in cases]


_PATIENCE = 10  # seconds that the others have after a rank has failed: they may say more


def _received(receivers: list[Connection], seconds: float) -> list[tuple[bool, Any]]:
    """For each rank: whether it succeeded, and its result or its error."""
    found: dict[Connection, tuple[bool, Any]] = {}
    end = time.monotonic() + seconds
    while waiting := [receiver for receiver in receivers if receiver not in found]:
        ready = wait(waiting, max(end - time.monotonic(), 0))
        if not ready:
            return [found.get(receiver, (False, "gave nothing in time")) for receiver in receivers]
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                found[receiver] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                found[receiver] = False, "died"
            if not found[receiver][0]:
                end = min(end, time.monotonic() + _PATIENCE)
    return [found[receiver] for receiver in receivers]


def _on_rank(
    environment: dict[str, str],
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    join: bool,
    seconds: float,
) -> None:
    os.environ |= environment
    gc.freeze()  # of what the server has imported there is no garbage to collect, which DeepSpeed does a few times
    from pretrain.engine.ranks import process_group

    try:
        with process_group(cpu_threads=1, seconds=seconds) if join else contextlib.nullcontext():
            result = True, function(*arguments)
    except BaseException as error:
        trouble = traceback.format_exception(error)
        if isinstance(error, SystemExit) and error.__context__ is not None:  # the output of `process_group`
            trouble = traceback.format_exception(error.__context__)
        result = False, "".join(trouble)
    sender.send_bytes(pickle.dumps(result))
