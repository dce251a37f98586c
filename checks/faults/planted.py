"""Plants one fault in a rank, at a point of its work, and records the rows that each step takes."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from checks.faults import happening
from checks.faults.happening import FAULTS, Here

ENGINE = "pretrain.engine.engine"
POINTS = {  # where each is: the module and its function
    "import": (ENGINE, ""),
    "build": ("pretrain.engine.construction", "construct"),
    "load": ("pretrain.engine.checkpoint.engine_state", "restore"),
    "first step": (ENGINE, ""),
    "step": (ENGINE, ""),
    "forward": (ENGINE, "Engine.training_losses"),
    "all-reduce": (ENGINE, "dist.all_reduce"),
    "copy of a save": ("pretrain.engine.checkpoint.engine_state", "PinnedStaging.take"),
    "write of a save": ("pretrain.engine.checkpoint.tensors", "write_part"),
    "rename of a save": ("pretrain.engine.checkpoint.save", "commit"),
    "rename of latest": ("pretrain.engine.checkpoint.save", "set_latest"),
    "comparison of weights": ("fault_hunting.memory", "WeightComparison.compare"),
    "log": ("pretrain.training.callbacks.reporting", "Reporting.log"),
    "evaluation": ("pretrain.evaluate.hook_runner", "HookRunner.after"),
    "hook": ("pretrain.evaluate.hook_runner", "HookRunner._evaluate"),
    "end": ("pretrain.training.run_report", "RunReport.finish"),
}
EARLY = ("import", "build", "load", "first step")  # these come before any step
OF_RANK_0 = ("rename of a save", "rename of latest")
MODULES = sorted({module for module, _ in POINTS.values()})
FIRST_KILL = 15  # the step before which every rank of attempt 1 is killed, where the fault is for attempt 2
_step = 0  # the one that this rank takes, from 1


@dataclass(frozen=True)
class Planted:
    """A fault of `rank` at `point`, in or after `step`, in the `attempt` of its run; `marker` is created with it."""

    fault: str
    point: str
    rank: int
    step: int
    attempt: int
    marker: str


def before_import(module: str, planted: Planted | None) -> None:
    if planted and planted.point == "import" and module == ENGINE:
        _happen(planted, Here())


def plant(module: ModuleType, planted: Planted | None) -> None:
    """Plants the fault in a module that has just been imported, if its point is there, and the recorder."""
    if module.__name__ == ENGINE:
        if "RECORDED_ROWS" in os.environ:
            from tests.support.recorded import record_steps  # takes the engine's module

            record_steps(module.Engine)  # type: ignore[attr-defined]
        _count_steps(module, planted)
    if planted and POINTS[planted.point][0] == module.__name__ and (function := POINTS[planted.point][1]):
        owner: Any = module
        *classes, last = function.split(".")
        for one in classes:
            owner = getattr(owner, one)
        _wrap(owner, last, planted)


def _count_steps(module: Any, planted: Planted | None) -> None:
    take_step = module.Engine.step

    def step(self: Any, step: int, *arguments: Any) -> Any:
        global _step
        _step = step + 1
        if planted and planted.attempt == 2 and step >= FIRST_KILL and _attempt() == 1:
            while not (_run() / "checkpoints/latest").exists():  # attempt 2 resumes from the first checkpoint
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if planted and planted.point in ("first step", "step"):
            _happen(planted, Here(self))
        happening.be_slow()
        return take_step(self, step, *arguments)

    module.Engine.step = step


def _wrap(owner: Any, name: str, planted: Planted) -> None:
    inner = getattr(owner, name)

    def outer(*arguments: Any, **named: Any) -> Any:
        _happen(planted, Here(*arguments, call=lambda: inner(*arguments, **named)))
        return inner(*arguments, **named)

    setattr(owner, name, outer)


def _happen(planted: Planted, here: Here) -> None:
    """The fault, if this is its rank, attempt and step, and it hasn't happened before."""
    if (int(os.environ["RANK"]), _attempt()) != (planted.rank, planted.attempt) or _step < planted.step:
        return
    try:
        os.close(os.open(planted.marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    FAULTS[planted.fault](here)


def _attempt() -> int:
    return int(Path(os.environ["PRETRAIN_SUPERVISED"]).name.rpartition("-")[2])


def _run() -> Path:
    return Path(os.environ["PRETRAIN_SUPERVISED"]).parent.parent


def turn_clock(planted: Planted) -> None:
    """Once the fault has happened, this process's clock is wrong by `happening.CLOCKS`."""
    now, seconds = time.time, happening.CLOCKS[planted.fault]
    turned: Callable[[], float] = lambda: now() + (seconds if Path(planted.marker).exists() else 0)  # noqa: E731
    time.time = turned


def planned() -> Planted | None:
    """The fault that the environment has as JSON."""
    return Planted(**json.loads(os.environ["FAULT"])) if "FAULT" in os.environ else None
