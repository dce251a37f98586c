"""The checkpoints that ended runs have left in the memory of this node. Imports no PyTorch, since launchers use it."""

import shutil
from pathlib import Path

from pretrain.checkpoint.directory import all_steps
from pretrain.run import node_memory


def release(run: Path) -> str | None:
    """Removes what `run` has in this node's memory, unless the disk has no checkpoint as new; then returns a message.

    The same command goes on from there, as long as the machine isn't started again.
    """
    node = node_memory.path(run)
    if node is None or not node.exists():
        return None
    step, on_disk = max(all_steps(node), default=0), max(all_steps(run), default=0)
    if step <= on_disk:
        shutil.rmtree(node, ignore_errors=True)
        return None
    than = f"step {on_disk:,}" if on_disk else "no checkpoint"
    return f"{run}: step {step:,} is in memory ({node}), the disk has {than}; the same command goes on from memory"


def remove_left() -> None:
    """Removes what runs of this user have left that were killed, unless it is newer than their checkpoints on disk."""
    for node, run in node_memory.unused():
        if run is None or not run.is_dir() or max(all_steps(node), default=0) <= max(all_steps(run), default=0):
            shutil.rmtree(node, ignore_errors=True)
