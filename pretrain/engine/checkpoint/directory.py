"""Finds and sets aside the checkpoints of a run, in directories such as RUN/checkpoints/step-00001000. The file
`latest` names the latest.

Only names of this form count; other names, in the directory or in `latest`, are ignored. A run's directory in the
memory of a node has checkpoints under the same names. This module imports no PyTorch, because launchers use it.
"""

import re
import shutil
import stat
from pathlib import Path

from data_pipeline.base.atomic import write_bytes
from pretrain.run import node_memory

_LONGEST = 4096  # bytes of `latest`
_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,17})")  # exactly one name for each step


def checkpoint_directory(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_in_name(name: str) -> int | None:
    """The step in the name of a checkpoint's directory; None if the name has another form."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def all_steps(run: Path) -> list[int]:
    """The steps of the checkpoints of `run`, ascending, valid or not."""
    found = [step_in_name(path.name) for path in (run / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted(step for step in found if step is not None)


def candidates(run: Path) -> tuple[list[Path], str | None]:
    """The checkpoints that `run` could resume from, newest first, and the problem with `latest`, if any.

    These are the checkpoint that `latest` names, and the checkpoints before it. If `latest` is missing or names no
    checkpoint, they are all checkpoints.
    """
    newest_first = all_steps(run)[::-1]
    named, problem = _latest(run)
    if named is None:
        return [checkpoint_directory(run, step) for step in newest_first], problem if newest_first else None
    return [checkpoint_directory(run, step) for step in (named, *(step for step in newest_first if step < named))], None


def set_aside(directory: Path) -> Path:
    """Renames an unsound checkpoint, so that no run resumes from it. Returns its new path."""
    aside = directory.with_name(f"unsound-{directory.name}")
    if aside.exists():
        shutil.rmtree(aside)  # of the same step, from an earlier attempt
    return directory.rename(aside)


def set_latest(run: Path, step: int) -> None:
    write_bytes(run / "checkpoints" / "latest", (checkpoint_directory(run, step).name + "\n").encode())


def _latest(run: Path) -> tuple[int | None, str]:
    """The step that `latest` names, or None and the reason."""
    path = run / "checkpoints" / "latest"
    try:
        found = path.lstat()
        # a FIFO would wait for a writer, and a message about a link would show the content of a file elsewhere
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST:
            return None, f"{path}: names no checkpoint: expected a small regular file"
        name = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{path}: missing"
    except OSError as error:
        return None, f"{path}: can't be read: {error.strerror}"
    step = step_in_name(name)
    return step, "" if step is not None else f"{path}: names no checkpoint of this run: {name[:60]!r}"


def release_memory(run: Path) -> str | None:
    """Removes the checkpoints of `run` in this node's memory, unless they are newer than those on disk: then returns a
    message.

    The same command resumes from the memory until the machine is rebooted. If the run has started again already, as
    after a requeue, nothing is removed.
    """
    node = node_memory.path(run)
    if node is None or _removed(node, run):
        return None
    step, on_disk = max(all_steps(node), default=0), max(all_steps(run), default=0)
    if step <= on_disk:
        return None
    than = f"step {on_disk:,}" if on_disk else "no checkpoint"
    return f"{run}: step {step:,} is in memory ({node}), the disk has {than}; a start of this run resumes from memory"


def remove_left_in_memory() -> None:
    """Removes the checkpoints in memory that killed runs of this user have left, unless they are newer than those on
    disk."""
    for node, run in node_memory.runs():
        _removed(node, run)


def _removed(node: Path, run: Path | None) -> bool:
    """Removes a run's directory in memory if no supervisor uses it and the disk has a checkpoint as new. Returns True
    if it did."""
    with node_memory.locked(node) as is_there:
        if not is_there or node_memory.is_used(node):
            return False
        newer = run is not None and run.is_dir() and max(all_steps(node), default=0) > max(all_steps(run), default=0)
        if not newer:
            shutil.rmtree(node, ignore_errors=True)
        return not newer
