"""One attempt at a unit: what it needs, how it fails, and what the worker does. Works without Ray, too."""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from data_pipeline.base import progress
from data_pipeline.base.errors import UserError, may_be_of_node
from data_pipeline.base.progress import Activity

FOLDER = "DATA_PIPELINE_FOLDER"  # the variable of a worker with the command's current folder
SECONDS_TO_ANSWER = 10.0  # for the actor to which workers report
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


_reporter: threading.Thread | None = None  # of this worker
_others_may_try = False  # whether another node would retry the current unit


def better_tried_elsewhere(error: Exception) -> bool:
    """True if `error` may be the node's fault and another node is free to try. The worker then raises it, instead of
    recording damage of the input."""
    return _others_may_try and may_be_of_node(error)


def attempt(
    function: Callable[[Given], Any], given: Given, board: Any, node: str, name: str, tries: int, others_may_try: bool
) -> Any:
    """Does a unit in a worker, and reports the activity to `board`. If earlier `tries` of the unit failed, reports each
    activity at once, since this worker may be lost."""
    global _reporter, _others_may_try
    if FOLDER in os.environ:
        with contextlib.suppress(OSError):  # a node may lack it
            os.chdir(os.environ[FOLDER])
    _others_may_try, process = others_may_try, os.getpid()
    if _reporter is None:
        _reporter = progress.report_to(lambda activity: board.note.remote(node, process, activity))

    def confirm(activity: Activity) -> None:
        import ray  # only in Ray's workers; a process without a cluster imports this module, too

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(board.note.remote(node, process, activity), timeout=SECONDS_TO_ANSWER)

    with progress.working_on(name, tries, confirm if tries else None):
        return function(given)
