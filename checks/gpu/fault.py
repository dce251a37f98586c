"""A callback that breaks a run on purpose, inside a step."""

import os
import signal
import time
from pathlib import Path

import torch

from pretrain.training.callback import Callback
from pretrain.training.trainer import Trainer


class Fault(Callback):
    """Breaks step `step`, between its gradients and its update. The time goes to the file `note`; once that exists, no
    step breaks.

    `kind`: "exception", "memory" (it takes memory until there is none) or "kill".
    """

    def __init__(self, kind: str, step: int, note: str):
        self._kind, self._step, self._note = kind, step, Path(note)

    def before_update(self, trainer: Trainer) -> None:
        if trainer.step == self._step and not self._note.exists():
            self._break(trainer.engine.device)

    def _break(self, device: torch.device) -> None:
        self._note.write_text(repr(time.time()))
        match self._kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                if device.type == "cuda":
                    torch.cuda.set_per_process_memory_fraction(0.05)  # the rest is for the runs beside this one
                held = []
                while True:  # a CPU would swap before it refuses gigabytes
                    size = 2**28 if device.type == "cuda" else 2**60
                    held.append(torch.empty(size, dtype=torch.uint8, device=device))
        raise ArithmeticError("a planted fault")
