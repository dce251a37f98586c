"""The name of this node, and a directory in its memory for the heartbeats of ranks."""

import os
import socket
import tempfile
from pathlib import Path

_MEMORY = "/dev/shm"


def node_name() -> str:
    """The name of this node. A machine may be several nodes of SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def new_directory() -> Path:
    """A new directory of this user alone. It is in memory, if there is such a file system: heartbeats need no disk."""
    return Path(tempfile.mkdtemp(prefix="encdec-pretrain-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
