"""Where units run: on a Ray cluster or, if their inputs are small, in this process; and where their time went."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from data_pipeline.execution.attempt import Needs
from data_pipeline.execution.config import RayConfig
from data_pipeline.foundation import progress
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.progress import Activity
from data_pipeline.foundation.store import Store

# Settings of Ray, for the driver and for `ray start`. By itself it prints pages about every lost worker and raylet; our
# own messages have what matters. By default it runs its workers at a low priority, and a build beside any other program
# hardly progresses. Users who want that can start the command with `nice`, which its workers inherit.
SETTINGS = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "retries remaining|worker died|killed due to (memory pressure|the node running low on memory)"
        r"|how to address the out of memory issue|Raylet is terminated|has been marked dead because|^\s*$"
    ),
    "RAY_worker_niceness": "0",
}
OBJECT_STORE_BYTES = 256 * 2**20  # only counts pass through it; workers get the rest of the memory

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
    """Whether inputs of `size` bytes aren't worth the start of a cluster."""
    return config.address is None and size <= config.small_bytes


@dataclass(frozen=True)
class Workers:
    """`number` workers, or this process itself (`in_process`)."""

    number: int
    in_process: bool
    _reported: dict[str, Activity] = field(default_factory=dict)

    def each(
        self, function: Callable[[Given], Any], inputs: Mapping[str, Given], what: str, needs: Callable[[Given], Needs]
    ) -> Iterator[tuple[str, Any]]:
        """Applies `function` to each input and yields (name, result) as they finish, with an error for an input whose
        worker was lost on every try.

        `what` names the work in messages, `needs` says what an input takes of a node. A result `Failed` may come from
        another node than the first.
        """
        if not self.in_process:
            from data_pipeline.execution import cluster  # as in `ready`

            yield from cluster.each(function, inputs, what, needs, self._reported)
            return
        for name, given in inputs.items():
            with progress.working_on(name):
                result = function(given)
            yield name, result

    def at_work(self) -> list[Activity]:
        """What is done now, and how far."""
        return [one for one in [progress.current()] if one] if self.in_process else [*self._reported.values()]

    def shown(
        self, answers: Iterator[tuple[str, Any]], what: str, sizes: Mapping[str, int], bar: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """The same `answers` of this `each`; shows how many there are or, if all `sizes` are known, of how many
        bytes."""
        return progress.track(
            answers,
            len(sizes),
            what,
            (lambda one: sizes[one[0]]) if all(sizes.values()) else None,
            total_size=sum(sizes.values()),
            in_progress=lambda: sum(activity.done for activity in self.at_work()),
            doing=lambda: next((activity.doing for activity in self.at_work()), ""),
            bar=bar,
        )

    def count(self, what: str, stage: str, number: int = 1) -> None:
        """Adds to one of Ray's metrics, `data_pipeline_…`, by stage. Does nothing without Ray."""
        if not self.in_process and number:
            from data_pipeline.execution import cluster  # as in `ready`

            cluster.count(what, stage, number)


def ready(config: RayConfig) -> Workers:
    """The workers; starts or joins a cluster if that is needed. Raises FailedError if it can't be used."""
    if _in_process:
        return Workers(1, True)
    for name, value in SETTINGS.items():  # Ray reads them when it is imported, below
        os.environ.setdefault(name, value)
    from data_pipeline.execution import cluster  # Ray takes 640 ms and 48 MB, and small builds do without

    return Workers(cluster.joined(config, OBJECT_STORE_BYTES), False)


def check_dashboard(config: RayConfig) -> None:
    """Raises UserError if Ray's dashboard is asked for and can't be had."""
    if config.dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        raise UserError('ray.dashboard: true, but its packages are not installed; pip install "ray[default]", or false')


@dataclass(frozen=True)
class Timing:
    """A stage's last run that had units to do, as its driver saw it: how long it took, and of that for a cluster to
    start.

    `idle_seconds`: the time of all workers without a unit, once the cluster was up. `driver_core_seconds`: the
    processor time of the driver.
    """

    seconds: float
    workers: int
    idle_seconds: float
    ray_start_seconds: float
    driver_core_seconds: float

    def write(self, corpus: Store, stage: str) -> None:
        corpus.write_json(_timing_file(stage), self)


def read_timing(corpus: Store, stage: str) -> Timing | None:
    """None if the stage has never had a unit to do."""
    return corpus.read_valid_json(_timing_file(stage), Timing)


def _timing_file(stage: str) -> str:
    return f".stages/timings/{stage}.json"
