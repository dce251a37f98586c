"""A rank that has imported everything and waits to be needed: for the attempt after the one that trains.

Its supervisor holds a lock on a file, the gate, and releases it when that attempt begins; the gate's content then says
what is new in the environment.
"""

import fcntl
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

GATE = "PRETRAIN_GATE"  # in the environment of a standby: the path of its gate
_SLOW_IMPORTS = "pretrain.trainer.imports"


class Gate:
    """The supervisor's side: processes that wait at the gate go on once it is opened."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self, environment: Mapping[str, str]) -> None:
        """Lets the processes go on, with `environment` added to theirs."""
        json.dump(dict(environment), self._file)
        self._file.close()

    def close(self) -> None:
        """Ends the processes that wait."""
        self._file.close()


def waited(tracked: bool) -> bool:
    """False at once in an ordinary process.

    A standby imports what a rank needs, on rank 0 of a run that is `tracked` also MLflow, and returns True when its
    gate opens. It ends if its supervisor has ended.
    """
    gate = os.environ.pop(GATE, None)
    if gate is None:
        return False
    imports = importlib.import_module(_SLOW_IMPORTS)
    if tracked and os.environ["RANK"] == "0":
        imports.import_tracking()
    with Path(gate).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        environment = file.read()
    if not environment:
        sys.exit()  # no attempt follows
    os.environ |= json.loads(environment)
    return True
