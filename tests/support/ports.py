"""Ports of this machine, none of which two tests get, whatever runs beside them."""

import contextlib
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

from data_pipeline.base.atomic import lock

# below those that the product chooses by itself (20,000 and up), and those that Linux does
_PORTS = range(10_000, 20_000)
_TAKEN: list[IO[str]] = []


def free_port() -> int:
    """A port on which nothing listens. It is this process's until it ends, by a lock on a file of its name."""
    folder = Path(tempfile.gettempdir()) / "encdec-pretrain-test-ports"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        file = (folder / str(port)).open("w")
        with contextlib.suppress(OSError), socket.socket() as probe:
            lock(file, None, wait=False)
            probe.bind(("", port))
            _TAKEN.append(file)
            return port
        file.close()
    raise OSError(f"no port of {_PORTS} is free")
