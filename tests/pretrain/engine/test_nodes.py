"""What is done once on each node: four ranks on two of them. Each node is a host name, in a namespace of its own."""

import ctypes
import functools
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.base.config_file import load
from pretrain.config import RunConfig
from pretrain.run.world import World
from tests.pretrain.training.test_attention_check import a_run, child
from tests.support.rank_processes import on_ranks
from tests.support.runs import run_file

NODES = ["alpha", "beta", "alpha", "beta"]  # of each rank
FIRST = (0, 1)  # of their nodes
CLONE_NEWUTS = 0x04000000  # linux/sched.h

# It begins on each node once. That of beta ends after that of alpha.
CHECK = """
import os, pathlib, socket, sys, time
folder, node = pathlib.Path({folder!r}), socket.gethostname()
while node == "beta" and not (folder / "alpha").exists():
    time.sleep(0.01)
with (folder / node).open("x") as file:
    file.write(f"{{os.environ['RANK']}} {{time.monotonic()}}")
sys.exit({failing!r} == node and "no compiler")
"""


@pytest.fixture(autouse=True)
def _host_names():
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("a host name of one's own takes root")


def on_its_node(work: Callable[[World], Any]) -> Any:
    """What `work` returns on this rank, which sees a GPU of its own alone: LOCAL_RANK is 0."""
    from pretrain.engine.ranks import process_group

    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(NODES[int(os.environ["RANK"])])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    os.environ.pop("SLURMD_NODENAME", None)
    with process_group(cpu_threads=1, seconds=120) as world:
        rank = int(os.environ["RANK"])
        assert world == World(rank, 4, ((0, 2), (1, 3)))
        assert world.on_node == ((0, 2), (1, 3))[rank % 2]
        assert world.local_rank == rank // 2
        return work(world)


def chosen(folders: dict[str, Path], world: World) -> list[tuple[float, str | None, str | None]]:
    """On a GPU, for each node whose check fails: when this rank has chosen what computes attention, what it says and
    what it takes."""
    from pretrain.models.functional import attention_backends
    from pretrain.training import attention_check

    found: list[tuple[float, str | None, str | None]] = []
    for failing, folder in folders.items():
        with pytest.MonkeyPatch.context() as patch, attention_backends.using(None):
            child(patch, CHECK.format(folder=str(folder), failing=failing))
            patch.setattr(attention_check, "forms", lambda *_: [])
            patch.setattr(attention_check, "_rows", lambda *_: [])
            line = attention_check.choose_attention(a_run("auto", world), torch.device("cuda"))
            found.append((time.monotonic(), line, attention_backends._backend))
    return found


def test_one_rank_of_each_node_checks_kernels_and_all_wait_for_both(tmp_path):
    folders = {node: tmp_path / (node or "none") for node in ("", "beta")}
    for folder in folders.values():
        folder.mkdir()
    of_ranks = on_ranks(4, on_its_node, functools.partial(chosen, folders), joined=False)
    for failing, found in zip(folders, zip(*of_ranks, strict=True), strict=True):
        checks = {path.name: path.read_text().split() for path in folders[failing].iterdir()}
        assert {node: int(rank) for node, (rank, _) in checks.items()} == {"alpha": 0, "beta": 1}
        last = max(float(when) for _, when in checks.values())
        for rank, (when, line, backend) in enumerate(found):
            why = "no compiler" if rank in FIRST and NODES[rank] == failing else "on another rank"
            said = f"compute.attention: the Triton kernels fail: {why}; using PyTorch's attention (sdpa)"
            assert when > last
            assert (line, backend) == ((said, "sdpa") if failing else (None, "triton"))


def compiled(path: Path, world: World) -> list[int]:
    """Trains a step; how many graphs the first rank of this node had compiled when this one began each of its own."""
    from pretrain.engine import construction
    from pretrain.training.run import train_in_group

    node = socket.gethostname()
    folder, other = path.parent / node, path.parent / f"the other of {node}"
    folder.mkdir(exist_ok=True)
    found: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        found.append(len([*folder.iterdir()]))
        if world.rank in FIRST:
            until = time.monotonic() + 1  # the other has begun by then, if it doesn't wait
            while not other.exists() and time.monotonic() < until:
                time.sleep(0.01)
            (folder / str(len(found))).touch()
        else:
            other.touch()
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(construction, "BACKEND", backend)
        overrides = [f"run.directory={path.parent}/of-{node}"]
        assert train_in_group(world, load(path, overrides, RunConfig)) == 0
    return found


def test_one_rank_of_each_node_compiles_and_the_others_wait_for_it(small_corpus, tmp_path):
    """Two graphs: a layer of the encoder and one of the decoder."""
    batch = {"global_batch_size": 16, "micro_batch_size": 4}
    changes: dict[str, Any] = {"compute": {"compile": True}, "batch": batch, "evaluation": []}
    path = run_file(tmp_path, small_corpus, 1, {"max_steps": 1}, **changes)
    of_ranks = on_ranks(4, on_its_node, functools.partial(compiled, path), joined=False)
    assert of_ranks == [[0, 1] if rank in FIRST else [2, 2] for rank in range(4)]
