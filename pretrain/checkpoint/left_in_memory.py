"""The checkpoints that ended runs have left in the memory of this node. Imports no PyTorch, since launchers use it."""

import contextlib
import json
import shutil
from pathlib import Path

from pretrain.checkpoint.directory import SHARD, all_steps
from pretrain.run import node_memory


def newest_in_memory(node: Path) -> int:
    """The newest step that `node`, a run's directory in memory, has of any rank; 0 if none."""
    steps = all_steps(node)
    for shard in node.glob(f"rank-*/{SHARD}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            steps.append(int(json.loads(shard.read_bytes())["train_state"]["step"]))
    return max(steps, default=0)


def release(run: Path) -> str | None:
    """Removes what `run` has in this node's memory, unless the disk has no checkpoint as new; then returns a message.

    The same command goes on from there, as long as the machine isn't started again.
    """
    node = node_memory.path(run)
    if node is None or not node.exists():
        return None
    step, on_disk = newest_in_memory(node), max(all_steps(run), default=0)
    if step <= on_disk:
        shutil.rmtree(node, ignore_errors=True)
        return None
    than = f"step {on_disk:,}" if on_disk else "no checkpoint"
    return f"{run}: step {step:,} is in memory ({node}), the disk has {than}; the same command goes on from memory"


def remove_left() -> None:
    """Removes what runs of this user have left that were killed, unless it is newer than their checkpoints on disk."""
    for node, run in node_memory.unused():
        if run is None or not run.is_dir() or newest_in_memory(node) <= max(all_steps(run), default=0):
            shutil.rmtree(node, ignore_errors=True)
