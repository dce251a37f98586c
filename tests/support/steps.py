"""What the ranks of a run do to themselves at a step, so that no test depends on when it looks at them.

A test sets `environment(…)`, which agents hand on.
"""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.engine.checkpoint.directory import candidates, checkpoint_directory
from pretrain.run import watchdog

_HERE = Path(__file__).parent
_SEEN_AS_SILENT = 4.0  # s, more than the 3 s by which the supervisor tells which rank the others wait for


@dataclass(frozen=True)
class Planned:
    """What `rank` does at the first step from `step` on of one attempt, once the checkpoint of the step `saved`, if not
    0, is the run's latest.

    - "kill": it sends itself SIGKILL.
    - "stop": it notes its process in the file `path` and sends itself SIGSTOP.
    - "hang": as soon as the process in the file `path` is stopped, its watchdog's time is over.
    - "hold": it creates the file `path` and waits until the run is asked to stop.
    """

    rank: int
    step: int
    does: str
    path: str = ""
    attempt: int = 1
    saved: int = 0


def environment(*planned: Planned) -> dict[str, str]:
    """The variables that have ranks do what is planned."""
    search = [str(_HERE / "planned_steps"), str(_HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"STEPS": json.dumps([asdict(one) for one in planned]), "PYTHONPATH": os.pathsep.join(filter(None, search))}


def _plan_steps(module: Any) -> None:
    take_step = module.Engine.step
    left = [Planned(**one) for one in json.loads(os.environ["STEPS"])]
    attempt = int(Path(os.environ["PRETRAIN_SUPERVISED"]).name.rpartition("-")[2])
    left = [one for one in left if (one.rank, one.attempt) == (int(os.environ["RANK"]), attempt)]

    def step(self: Any, before: int, *arguments: Any) -> Any:
        for one in [one for one in left if before + 1 >= one.step]:
            left.remove(one)
            _do(one)
        return take_step(self, before, *arguments)

    module.Engine.step = step


def _do(planned: Planned) -> None:
    path, run = Path(planned.path), Path(os.environ["PRETRAIN_SUPERVISED"]).parent.parent
    while planned.saved and candidates(run)[0][:1] != [checkpoint_directory(run, planned.saved)]:
        time.sleep(0.05)
    match planned.does:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            path.with_suffix(".tmp").write_text(str(os.getpid()))
            path.with_suffix(".tmp").rename(path)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Thread(target=_end_time_of_watchdog, args=(path,), daemon=True).start()
        case "hold":
            path.touch()
            while not (run / "stop").exists():
                time.sleep(0.05)


def _end_time_of_watchdog(path: Path) -> None:
    while not path.exists() or Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.05)
    time.sleep(_SEEN_AS_SILENT)
    while True:  # the main thread may still have been on its way to where it waits
        watchdog._rank.last = -1e9
        time.sleep(0.1)


# What is done to modules.
CHANGES = {"pretrain.engine.engine": _plan_steps}
