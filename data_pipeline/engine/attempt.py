"""Does one attempt at a unit in a worker; what a unit needs, and how it fails. Works without Ray, too."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from data_pipeline.base.errors import UserError
from data_pipeline.base.progress import Activity, Reporter
from data_pipeline.engine.context import Attempt

FOLDER = "DATA_PIPELINE_FOLDER"  # the variable of a worker with the command's current folder
SECONDS_TO_ANSWER = 10.0  # for the actor to which workers report
_reporter = Reporter()  # of this worker
Given = TypeVar("Given")


@dataclass(frozen=True)
class Failed:
    """The failure of a unit. `of_node`: another node may succeed."""

    error: UserError
    of_node: bool = False


@dataclass(frozen=True)
class Needs:
    """The memory in bytes and the CPUs that a unit needs, or that a node has."""

    memory: int = 0
    cpus: int = 1

    def fits(self, node: "Needs") -> bool:
        return self.memory <= node.memory and self.cpus <= node.cpus


def attempt(
    function: Callable[[Given, Attempt], Any],
    given: Given,
    board: Any,
    node: str,
    name: str,
    tries: int,
    others_may_try: bool,
) -> Any:
    """Does a unit in a worker, and reports the activity to `board`. If earlier `tries` of the unit failed, reports each
    file at once, since this worker may be lost."""
    if FOLDER in os.environ:
        with contextlib.suppress(OSError):  # a node may lack it
            os.chdir(os.environ[FOLDER])
    process = os.getpid()

    def confirm(activity: Activity) -> None:
        import ray  # only in Ray's workers; a process without a cluster imports this module, too

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(board.note.remote(node, process, activity), timeout=SECONDS_TO_ANSWER)

    activity = Activity(name, tries)
    with _reporter.reporting(lambda: board.note.remote(node, process, activity)):
        return function(given, Attempt(activity, others_may_try, confirm if tries else None))
