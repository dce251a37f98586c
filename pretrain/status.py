"""RUN/status.json: how the run stands; RUN/stop: a request to stop, at which ranks look each step."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from data_pipeline.atomic import write_json

STATUS, STOP = "status.json", "stop"


@dataclass(frozen=True)
class Status:
    """`attempt` counts the starts of the run from 1; `step`: steps done when it ended."""

    state: Literal["new", "running", "stopped", "finished"] = "new"
    attempt: int = 0
    step: int | None = None


def read(run: Path) -> Status:
    try:
        return Status(**json.loads((run / STATUS).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return Status()


def write(run: Path, status: Status) -> None:
    write_json(run / STATUS, asdict(status))


def request_stop(run: Path) -> None:
    """Asks the ranks of `run` to save and leave after their step."""
    run.mkdir(parents=True, exist_ok=True)
    (run / STOP).touch()


def stop_requested(run: Path) -> bool:
    return (run / STOP).exists()


def clear_stop(run: Path) -> None:
    (run / STOP).unlink(missing_ok=True)
