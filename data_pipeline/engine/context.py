"""One attempt at a unit in a worker: what its work gets, what it needs of a node, how it fails. Works without Ray."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from data_pipeline.base.errors import UserError, may_be_of_node
from data_pipeline.base.progress import Activity, Reporter
from data_pipeline.base.store import Store
from data_pipeline.base.stores import Checksum

FOLDER = "DATA_PIPELINE_FOLDER"  # the variable of a worker with the command's current folder
SECONDS_TO_ANSWER = 10.0  # for the actor to which workers report
_reporter = Reporter()  # of this worker
Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Attempt:
    """One attempt at a unit.

    Attributes:
        activity: what the worker does; the driver shows it.
        others_may_try: True: another node would try the unit after this one.
        confirm: gets the activity whenever another file is at work, if the unit may kill this process.
    """

    activity: Activity = field(default_factory=lambda: Activity(""))
    others_may_try: bool = False
    confirm: Callable[[Activity], None] | None = None

    def may_be_retried(self, error: Exception) -> bool:
        """True if `error` may be the node's fault and another node is free to try. The worker then raises it, instead
        of recording damage of the input."""
        return self.others_may_try and may_be_of_node(error)


@dataclass(frozen=True)
class Context:
    """The argument of a stage's `work`, beside the spec.

    Attributes:
        store: the files of the corpus.
        attempt: this attempt at the unit.
        shared: names the units that share what `cached` makes: those of one stage in one build.
    """

    store: Store
    attempt: Attempt = field(default_factory=Attempt)
    shared: str = ""

    def __post_init__(self) -> None:
        _shared.of((str(self.store), self.shared))  # frees what another stage has made

    @property
    def progress(self) -> Activity:
        """What the unit does. Set `doing` to a step in words: "training on 38 MB of text"."""
        return self.attempt.activity

    def file(self, name: str) -> None:
        """Says that the unit now works on an input file: `Stage.without` leaves this file out if it kills workers."""
        self.progress.file = self.progress.doing = name
        if self.attempt.confirm:
            self.attempt.confirm(self.progress)

    def checksum(self, path: str) -> Checksum:
        """The sha256 of the input file at `path`, and its progress; `Input` passes it on to what opens the file."""
        return Checksum(path, self.progress)

    def may_be_retried(self, error: Exception) -> bool:
        """As `Attempt.may_be_retried`."""
        return self.attempt.may_be_retried(error)

    def cached(self, key: str, make: Callable[[], Made]) -> Made:
        """The result of `make`, which the stage's units in this process share under `key`. Nobody may change it."""
        found = _shared.of((str(self.store), self.shared))
        if key not in found:
            found[key] = make()
        return cast(Made, found[key])


class _Shared:
    """What the units of one stage share in this process. The first unit of another stage begins with nothing."""

    def __init__(self) -> None:
        self._whose: tuple[str, str] = ("", "")
        self._made: dict[str, Any] = {}

    def of(self, whose: tuple[str, str]) -> dict[str, Any]:
        if whose != self._whose or not whose[1]:
            self._whose, self._made = whose, {}
        return self._made


_shared = _Shared()


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
