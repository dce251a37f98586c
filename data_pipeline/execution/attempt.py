"""One attempt at a unit: what a unit needs, how it fails, and what a worker does. Works without Ray, too."""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from data_pipeline.foundation import progress
from data_pipeline.foundation.errors import UserError, may_be_of_node
from data_pipeline.foundation.progress import Activity

SECONDS_TO_ANSWER = 10.0  # for the actor to which workers report
Given = TypeVar("Given")


@dataclass(frozen=True)
class Failed:
    """A unit that could not be done. `of_node`: another node may be able to."""

    name: str
    error: UserError
    of_node: bool = False


@dataclass(frozen=True)
class Needs:
    """What a unit takes of a node, or what a node has: memory in bytes, and CPUs."""

    memory: int = 0
    cpus: int = 1

    def fits(self, node: "Needs") -> bool:
        return self.memory <= node.memory and self.cpus <= node.cpus


# In a worker

_reporter: threading.Thread | None = None
_others_may_try = False  # what this process fails to do


def better_tried_elsewhere(error: Exception) -> bool:
    """Whether `error` is to be raised, and not taken for a fault of the input: another node will try the unit."""
    return _others_may_try and may_be_of_node(error)


def attempt(
    function: Callable[[Given], Any], given: Given, board: Any, node: str, name: str, lost: int, others_may_try: bool
) -> Any:
    """Does a unit, and reports to `board` what it does; at once if earlier workers were `lost`, which may happen
    again."""
    global _reporter, _others_may_try
    _others_may_try, process = others_may_try, os.getpid()
    if _reporter is None:
        _reporter = progress.report_to(lambda activity: board.note.remote(node, process, activity))

    def confirm(activity: Activity) -> None:
        import ray  # a worker of Ray's has it; a process without a cluster needs the rest of this module alone

        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(board.note.remote(node, process, activity), timeout=SECONDS_TO_ANSWER)

    with progress.working_on(name, lost, confirm if lost else None):
        return function(given)
