"""A directory of a run in the memory of a node, where its ranks leave what must outlive them, but not the machine."""

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

DIRECTORY = "PRETRAIN_NODE_DIRECTORY"  # in the environment of ranks
_MEMORY = Path("/dev/shm")
_RANKS = "ranks-"


def node_name() -> str:
    """The name of this node. A machine may be several of SLURM's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def path(run: Path, host: str | None = None) -> Path | None:
    """The directory for `run` on this node, or on `host`; None where there is no file system in memory."""
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return None
    named = hashlib.blake2b(f"{host or node_name()}:{run.resolve()}".encode(), digest_size=8).hexdigest()
    return _MEMORY / f"encdec-pretrain-{os.getuid()}-{named}"


def given() -> Path | None:
    """This rank's directory; None without a supervisor."""
    directory = os.environ.get(DIRECTORY)
    return Path(directory) if directory else None


def for_ranks(run: Path | None) -> Path:
    """A new directory for what only the ranks of one attempt need. Removes those that dead supervisors have left."""
    node = path(run) if run else None
    if node is not None:
        with contextlib.suppress(OSError):
            node.mkdir(mode=0o700, exist_ok=True)
            for left in node.glob(f"{_RANKS}*"):
                if not psutil.pid_exists(int(left.name.split("-")[1])):
                    shutil.rmtree(left, ignore_errors=True)
            return Path(tempfile.mkdtemp(prefix=f"{_RANKS}{os.getpid()}-", dir=node))
    return Path(tempfile.mkdtemp(prefix="encdec-pretrain-"))


def remove(run: Path) -> None:
    """Removes everything of `run` from the memory of this node."""
    if (node := path(run)) is not None:
        shutil.rmtree(node, ignore_errors=True)


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
