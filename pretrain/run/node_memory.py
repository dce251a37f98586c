"""A directory in this node's memory for the heartbeats of ranks."""

import os
import tempfile
from pathlib import Path

_MEMORY = "/dev/shm"


def new_directory() -> Path:
    """A new directory of this user alone. It is in memory, if there is such a file system: heartbeats need no disk."""
    return Path(tempfile.mkdtemp(prefix="encdec-pretrain-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
