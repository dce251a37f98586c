"""With this folder on PYTHONPATH, every Python process obeys two variables of the environment.

Python imports a module of this name before anything else.

- ABSENT_MODULES: names of modules, with commas between them, that can't be imported, as if they weren't installed.
- FAULT: what happens inside step FAULT_STEP of every rank: "exception", "memory" (it takes memory until there is none)
  or "kill". The time goes to the file FAULT_NOTE.
"""

import importlib.abc
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType


class _Absent(importlib.abc.MetaPathFinder):
    def __init__(self, names: list[str]):
        self._names = set(names)

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def _plant(engine: ModuleType) -> None:
    take_step = engine.Engine.step  # type: ignore[attr-defined]

    def step(self, number, *arguments):
        if number == int(os.environ["FAULT_STEP"]):
            self.deepspeed.module.register_forward_hook(lambda *_: _break(self.device))
        return take_step(self, number, *arguments)

    engine.Engine.step = step  # type: ignore[attr-defined]


def _break(device) -> None:
    import torch

    Path(os.environ["FAULT_NOTE"]).write_text(repr(time.time()))
    match os.environ["FAULT"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            held = []
            while True:  # a CPU would swap before it refuses gigabytes
                held.append(torch.empty(2**30 if device.type == "cuda" else 2**60, dtype=torch.uint8, device=device))
    raise ArithmeticError("a planted fault")


if "ABSENT_MODULES" in os.environ:
    sys.meta_path.insert(0, _Absent(os.environ["ABSENT_MODULES"].split(",")))
if "RANK" in os.environ and "FAULT" in os.environ:
    from tests.planting import Planting

    Planting(["pretrain.zero.engine"], _plant).start()
