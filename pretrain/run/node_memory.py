"""Finds and makes a run's directory in the memory of a node, for data that outlive the ranks but not the machine."""

import contextlib
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from data_pipeline.base.atomic import lock

DIRECTORY = "PRETRAIN_NODE_DIRECTORY"  # variable of ranks
_MEMORY = Path("/dev/shm")
_RANKS = "ranks-"  # prefix of the folders of attempts
_RUN = "run"  # a file with the path of the run's directory


def node_name() -> str:
    """The name of this node. A machine may be several nodes of SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def path(run: Path, host: str | None = None) -> Path | None:
    """The directory for `run` on this node, or on `host`. None if there is no file system in memory, or if something of
    this name isn't a directory of this user alone."""
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return None
    named = hashlib.blake2b(f"{host or node_name()}:{run.resolve()}".encode(), digest_size=8).hexdigest()
    node = _MEMORY / f"{_prefix()}{named}"
    return node if is_private(node) else None


def is_private(directory: Path) -> bool:
    """True if `directory` is one that only this user can read and write, or doesn't exist."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _prefix() -> str:
    return f"encdec-pretrain-{os.getuid()}-"


def given() -> Path | None:
    """This rank's directory; None without a supervisor."""
    directory = os.environ.get(DIRECTORY)
    return Path(directory) if directory else None


def for_ranks(run: Path) -> Path:
    """A new directory for the ranks of one attempt. Removes the directories that dead supervisors have left."""
    node = path(run)
    if node is not None:
        with contextlib.suppress(OSError):
            while is_private(node):  # else another user has just made it
                with contextlib.suppress(FileExistsError):
                    node.mkdir(mode=0o700)
                with locked(node) as is_there:
                    if not is_there:
                        continue  # another supervisor has just removed it
                    (node / _RUN).write_text(str(run.resolve()))
                    for left in node.glob(f"{_RANKS}*"):
                        if not _is_alive(left):
                            shutil.rmtree(left, ignore_errors=True)
                    return Path(tempfile.mkdtemp(prefix=f"{_RANKS}{os.getpid()}-", dir=node))
    return Path(tempfile.mkdtemp(prefix="encdec-pretrain-"))


@contextlib.contextmanager
def locked(node: Path) -> Iterator[bool]:
    """Within the block, no other supervisor makes directories in `node`, or removes it. Yields True if it exists."""
    with contextlib.ExitStack() as stack:
        try:
            opened = os.open(node, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield False
            return
        stack.callback(os.close, opened)
        lock(opened, None, wait=True)
        yield node.exists() and os.path.samestat(os.fstat(opened), node.lstat())


def is_used(node: Path) -> bool:
    """True if a supervisor that lives has ranks in `node`."""
    return any(map(_is_alive, node.glob(f"{_RANKS}*")))


def runs() -> Iterator[tuple[Path, Path | None]]:
    """This user's directories in the memory of this node, each with the directory of its run, if known."""
    for node in _MEMORY.glob(f"{_prefix()}*"):
        if node.is_dir() and is_private(node):
            with contextlib.suppress(OSError):
                yield node, Path((node / _RUN).read_text()) if (node / _RUN).is_file() else None


def _is_alive(ranks: Path) -> bool:
    """True if the supervisor that made a directory for its ranks lives."""
    return psutil.pid_exists(int(ranks.name.split("-")[1]))
