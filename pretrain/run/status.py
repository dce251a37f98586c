"""RUN/status.json: how the run stands; RUN/stop: a request to stop, at which ranks look each step."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt

from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.json_file import read_sound_json

STATUS, STOP = "status.json", "stop"


@dataclass(frozen=True)
class Status:
    """`attempt` counts the starts of the run from 1; `step`: steps done when it ended."""

    state: Literal["new", "running", "stopped", "finished"] = "new"
    attempt: NonNegativeInt = 0
    step: NonNegativeInt | None = None


def read(run: Path) -> Status:
    """How `run` stands; a new run where its file is missing or damaged."""
    return read_sound_json(run / STATUS, Status) or Status()


def write(run: Path, status: Status) -> None:
    write_json(run / STATUS, asdict(status))


def move_aside(run: Path) -> Path | None:
    """Renames `run`, so that a new run may begin in its place; returns its new name, None where there is nothing.

    Raises UserError where it can't be renamed.
    """
    if not run.exists():
        return None
    number = 1
    while (aside := run.with_name(f"{run.name}.old-{number}")).exists():
        number += 1
    try:
        return run.rename(aside)
    except OSError as error:
        raise UserError(f"run.directory: {run} can't be moved to {aside}: {error.strerror}") from None


def request_stop(run: Path) -> None:
    """Asks the ranks of `run` to save and leave after their step."""
    run.mkdir(parents=True, exist_ok=True)
    (run / STOP).touch()


def stop_requested(run: Path) -> bool:
    return (run / STOP).exists()


def clear_stop(run: Path) -> None:
    (run / STOP).unlink(missing_ok=True)
