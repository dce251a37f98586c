"""Runs units on a Ray cluster, or in this process if the input is small; records how long a stage took."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from data_pipeline.base import progress
from data_pipeline.base.errors import UserError
from data_pipeline.base.progress import Activity
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import Attempt, Needs

# Settings of Ray, for the driver and for `ray start`. The first silences pages about each lost worker and raylet: our
# messages say what matters. The second runs workers at normal priority. With Ray's default, nice 15, a build beside
# another program hardly progresses; users who want this can start the command with `nice`.
SETTINGS = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "retries remaining|worker died|killed due to (memory pressure|the node running low on memory)"
        r"|how to address the out of memory issue|Raylet is terminated|has been marked dead because|^\s*$"
    ),
    "RAY_worker_niceness": "0",
}
OBJECT_STORE_BYTES = 256 * 2**20  # only counts pass through Ray's object store; workers get the rest of the memory

Given = TypeVar("Given")
_in_process = False  # whether units run in this process


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Within the block, units run one after the other in this process."""
    global _in_process
    before, _in_process = _in_process, True
    try:
        yield
    finally:
        _in_process = before


def are_small(size: int, config: RayConfig) -> bool:
    """Whether inputs of `size` bytes are too small to start a cluster for."""
    return config.address is None and size <= config.small_bytes


@dataclass(frozen=True)
class Workers:
    """`number` workers, or this process itself (`in_process`)."""

    number: int
    in_process: bool
    _reported: dict[str, Activity] = field(default_factory=dict)

    def each(
        self,
        function: Callable[[Given, Attempt], Any],
        inputs: Mapping[str, Given],
        what: str,
        needs: Callable[[Given], Needs],
    ) -> Iterator[tuple[str, Any]]:
        """Applies `function` to each input and an attempt; yields (name, result) as they finish. The result is a
        FailedError if every worker of the input was lost.

        `what` names the work in messages; `needs` says what an input needs of a node. If a result `Failed` may be the
        node's fault, another node has tried the input, too.
        """
        if not self.in_process:
            from data_pipeline.engine import cluster, dispatch  # as in `ready`

            board, abandon = cluster.board(), cluster.abandon
            yield from dispatch.Dispatch(function, inputs, what, needs, board, self._reported, abandon).results()
            return
        for name, given in inputs.items():
            self._reported[name] = Activity(name)
            try:
                result = function(given, Attempt(self._reported[name]))
            finally:
                del self._reported[name]
            yield name, result

    def at_work(self) -> list[Activity]:
        """The activities of the workers."""
        return [*self._reported.values()]

    def shown(
        self, answers: Iterator[tuple[str, Any]], what: str, sizes: Mapping[str, int]
    ) -> Iterator[tuple[str, Any]]:
        """Yields `answers`, the results of `each`; shows how many have come or, if all `sizes` are known, the bytes."""
        how_far = progress.Progress(
            what,
            len(sizes),
            sum(sizes.values()) if all(sizes.values()) else 0,
            in_progress=lambda: sum(activity.done for activity in self.at_work()),
            doing=lambda: next((activity.doing for activity in self.at_work()), ""),
        )
        return progress.track(answers, how_far, lambda one: sizes[one[0]])


def ready(config: RayConfig) -> Workers:
    """The workers. Starts or joins a cluster if needed. Raises FailedError if the cluster can't be used."""
    if _in_process:
        return Workers(1, True)
    for name, value in SETTINGS.items():  # Ray reads them at its import, below
        os.environ.setdefault(name, value)
    from data_pipeline.engine import cluster  # Ray takes 640 ms and 48 MB, and small builds don't need it

    return Workers(cluster.joined(config, OBJECT_STORE_BYTES), False)


@contextlib.contextmanager
def cluster_left() -> Iterator[None]:
    """Ends or leaves, after the block, the cluster that `ready` has started or joined. A cluster that the program had
    before is kept."""
    try:
        yield
    finally:
        if cluster := sys.modules.get("data_pipeline.engine.cluster"):  # else no cluster was needed
            cluster.leave()


def check_dashboard(config: RayConfig) -> None:
    """Raises UserError if the config asks for Ray's dashboard and its packages are missing."""
    if config.dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        raise UserError('ray.dashboard: true, but its packages are not installed; pip install "ray[default]", or false')


@dataclass(frozen=True)
class Timing:
    """The times of a stage's last run that had units to do.

    Attributes:
        idle_seconds: the sum over workers of the time without a unit, once the cluster was up.
        ray_start_seconds: how long the cluster took to start.
        driver_core_seconds: the driver's CPU time.
    """

    seconds: float
    workers: int
    idle_seconds: float
    ray_start_seconds: float
    driver_core_seconds: float


def timing_file(stage: str) -> str:
    """The file of a stage's `Timing`."""
    return f".stages/timings/{stage}.json"
