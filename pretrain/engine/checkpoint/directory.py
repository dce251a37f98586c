"""Finds and sets aside the checkpoints of a run, in directories such as RUN/checkpoints/step-00001000. The file
`latest` names the latest.

Only names of this form count; other names, in the directory or in `latest`, are ignored. This module imports no
PyTorch, because launchers use it.
"""

import re
import shutil
import stat
from pathlib import Path

from data_pipeline.base.atomic import write_bytes

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


def candidates(run: Path, before: int | None = None) -> tuple[list[Path], str | None]:
    """The checkpoints that `run` could resume from, newest first, and the problem with `latest`, if any.

    These are the checkpoint that `latest` names, and the checkpoints before it. If `latest` is missing or names no
    checkpoint, they are all checkpoints. `before`: only checkpoints of earlier steps than this one.
    """
    if before is not None:
        return [checkpoint_directory(run, step) for step in all_steps(run)[::-1] if step < before], None
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


def put_back(aside: Path, directory: Path) -> None:
    """Gives a checkpoint that was set aside its name again."""
    if directory.exists():
        shutil.rmtree(directory)  # of the same step, saved meanwhile
    aside.rename(directory)


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
