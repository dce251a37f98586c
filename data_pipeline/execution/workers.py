"""Where units run: on a Ray cluster or, if their inputs are small, in this process; and where their time went."""

import contextlib
import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from data_pipeline.execution.config import RayConfig
from data_pipeline.execution.dispatch import Dispatch, Needs, cpus_of, rooms_of_nodes
from data_pipeline.foundation import progress
from data_pipeline.foundation.errors import FailedError, UserError, one_line
from data_pipeline.foundation.lazy_imports import imported_at_first_use
from data_pipeline.foundation.progress import Activity, Board
from data_pipeline.foundation.store import Store

with imported_at_first_use():  # Ray takes 640 ms and 48 MB, and small builds do without
    import ray
    from ray.util import metrics, scheduling_strategies

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
_SECONDS_TO_CONNECT = 10.0
_in_process = False  # whether units run in this process
_board: tuple[str, str, Any] | None = None  # the node and the job of this driver; the actor to which workers report


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
            yield from Dispatch(function, inputs, what, needs, _its_board(), self._reported).results()
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
            _metric(what, ray.get_runtime_context().get_job_id()).inc(number, {"stage": stage})


@cache
def _metric(what: str, job: str) -> "metrics.Counter":
    return metrics.Counter(f"data_pipeline_{what}", what.replace("_", " "), ("stage",))


def ready(config: RayConfig) -> Workers:
    """The workers; starts or joins a cluster if that is needed. Raises FailedError if it can't be used."""
    if _in_process:
        return Workers(1, True)
    for name, value in SETTINGS.items():  # Ray reads them when it is imported: at its first use, below
        os.environ.setdefault(name, value)
    if not ray.is_initialized():
        if config.address is None:
            _start(config)
        else:
            _join(config.address)
    return Workers(cpus_of(room for _, room in rooms_of_nodes().values()), False)


def check_dashboard(config: RayConfig) -> None:
    """Raises UserError if Ray's dashboard is asked for and can't be had."""
    if config.dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        raise UserError('ray.dashboard: true, but its packages are not installed; pip install "ray[default]", or false')


def _its_board() -> Any:
    """The actor to which the workers of this driver report, on the driver's node."""
    global _board
    context = ray.get_runtime_context()
    here = context.get_node_id(), context.get_job_id()
    if _board is None or _board[:2] != here:
        on_this_node = scheduling_strategies.NodeAffinitySchedulingStrategy(here[0], soft=True)
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Board)
        _board = *here, actor.options(scheduling_strategy=on_this_node).remote()
    return _board[2]


def _start(config: RayConfig) -> None:
    """Starts Ray on this machine, with all CPUs by default. Raises FailedError if it can't."""
    check_dashboard(config)
    try:
        started = ray.init(
            address="local",  # not a cluster that happens to run on this machine
            num_cpus=config.num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=config.dashboard,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises a bare one if the machine is so busy that it doesn't start in 30 s
        raise FailedError(f"Ray doesn't start here: {one_line(error)}; run the command again") from None
    if config.dashboard:
        print(f"Ray's dashboard: http://{started.dashboard_url}", flush=True)


def _join(address: str) -> None:
    """Joins the cluster at `address`. Raises FailedError if it can't be reached."""
    # One attempt, of 40 s at most. Ray makes 20, which would take a quarter hour if another program has the port.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # fails at once if nothing listens
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        ray.init(address=address, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise FailedError(f"ray.address: can't join the cluster at {address}: {one_line(error)}") from None


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
