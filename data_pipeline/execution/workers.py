"""Where units run: on a Ray cluster or, if their inputs are small, in this process; and where their time went."""

import contextlib
import itertools
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data_pipeline.config import RayConfig
from data_pipeline.execution import ownership
from data_pipeline.foundation.atomic import write_json
from data_pipeline.foundation.errors import FailedError, WorkerDied, one_line
from data_pipeline.foundation.json_file import read_valid_json
from data_pipeline.foundation.lazy_imports import imported_at_first_use

with imported_at_first_use():  # Ray takes 640 ms and 48 MB, and small builds do without
    import ray
    from ray.util import scheduling_strategies

_RETRIES = 2  # for a unit whose worker was lost; Ray's default is infinite, but the unit itself may kill its workers
# Settings of Ray. By itself it prints pages about every lost worker and raylet; our own messages
# have what matters. By default it runs its workers at a low priority, and a build beside any other program hardly
# progresses. Users who want that can start the command with `nice`, which its workers inherit.
_SETTINGS = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "retries remaining|worker died|killed due to (memory pressure|the node running low on memory)"
        r"|how to address the out of memory issue|Raylet is terminated|has been marked dead because|^\s*$"
    ),
    "RAY_task_oom_retries": str(_RETRIES),
    "RAY_worker_niceness": "0",
}

Given = TypeVar("Given")
Answer = TypeVar("Answer")
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_PROBE = 60.0  # a node may have to start a worker first
_AHEAD = 4  # inputs for each worker that Ray holds
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
    """`number` workers, or this process itself (`in_process`).

    `each(function, inputs, what)` applies a function to each input and yields (name, result) as they finish, with
    an error for an input whose worker was lost on every try; `what` names the work in errors.
    """

    number: int
    in_process: bool
    each: Callable[[Callable[[Any], Any], Mapping[str, Any], str], Iterator[tuple[str, Any]]]


def ready(corpus: Path, token: str, config: RayConfig) -> Workers:
    """The workers, which write to `corpus` as the build with `token`; starts or joins a cluster if that is needed.

    Raises FailedError if the cluster can't be used.
    """
    if _in_process:
        return Workers(1, True, _one_by_one)
    for name, value in _SETTINGS.items():  # Ray reads them when it is imported: at its first use, below
        os.environ.setdefault(name, value)
    if config.address is None:
        _start(config.num_cpus)
    else:
        _join(config.address, corpus, token)
    return Workers(_cpus(), False, _each)


def _one_by_one(
    function: Callable[[Given], Answer], inputs: Mapping[str, Given], what: str
) -> Iterator[tuple[str, Answer | FailedError]]:
    for name, given in inputs.items():
        yield name, function(given)


def _start(num_cpus: int | None) -> None:
    """Starts Ray on this machine, with all CPUs by default. Raises FailedError if it can't."""
    if ray.is_initialized():
        return
    try:
        # Only counts pass through the object store; workers get the rest of the memory.
        ray.init(
            address="local",  # not a cluster that happens to run on this machine
            num_cpus=num_cpus,
            object_store_memory=256 * 2**20,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises a bare one if the machine is so busy that it doesn't start in 30 s
        raise FailedError(f"Ray doesn't start here: {one_line(error)}; run the command again") from None


def _join(address: str, corpus: Path, token: str) -> None:
    """Joins the cluster at `address`, all of whose nodes must see `corpus`, the directory of the build with `token`.

    Raises FailedError if the cluster can't be reached or one of its nodes sees another directory.
    """
    if ray.is_initialized():
        return
    # One attempt, of 40 s at most. Ray makes 20, which would take a quarter hour if another program has the port.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # fails at once if nothing listens
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        ray.init(address=address, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise FailedError(f"ray.address: can't join the cluster at {address}: {one_line(error)}") from None
    _probe(corpus, token)


def _cpus() -> int:
    """How many units the cluster does at once."""
    return int(ray.cluster_resources().get("CPU", 1))


def _each(
    function: Callable[[Given], Answer], inputs: Mapping[str, Given], what: str
) -> Iterator[tuple[str, Answer | FailedError]]:
    """Applies `function` to each of `inputs`; yields (name, result) as they finish.

    Several inputs wait for each worker, so that it goes on at once; the others wait here. If a worker or node is lost,
    its input is retried elsewhere, `_RETRIES` times at most. The last try gets a whole node to itself, which helps if
    only several units at once fill the memory. If that is lost too, the result is an error.

    Raises FailedError, which says that `what` failed, if Ray gives up.
    """
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(function)
    waiting = iter(inputs.items())
    running: dict[ray.ObjectRef, str] = {}
    lost: dict[str, Given] = {}
    try:
        while True:
            for name, given in itertools.islice(waiting, max(0, _AHEAD * _cpus() - len(running))):
                running[task.remote(given)] = name
            if not running:
                break
            (done,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(done)
            try:
                yield name, ray.get(done)
            except _lost():
                lost[name] = inputs[name]
        yield from _alone(function, lost)
    except ray.exceptions.RayError as error:
        way_out = "run the command again, what is finished is kept"
        raise FailedError(f"{what}: Ray gave up: {one_line(error)}; {way_out}") from None
    finally:
        for left in running:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(left)


def _alone(
    function: Callable[[Given], Answer], inputs: Mapping[str, Given]
) -> Iterator[tuple[str, Answer | FailedError]]:
    """Like `_each`, but with one try for each input, which gets all CPUs of a node."""
    if not inputs:
        return
    cpus = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    task = ray.remote(num_cpus=cpus, max_retries=0)(function)
    running = {task.remote(given): name for name, given in inputs.items()}
    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        name = running.pop(done)
        try:
            yield name, ray.get(done)
        except ray.exceptions.OutOfMemoryError as error:
            node = re.search(r"IP: ([^,\s]+)", str(error))
            where = f" on node {node[1]}" if node else ""
            yield name, FailedError(f"out of memory{where} on every try, the last one with the node to itself")
        except _lost():
            cause = "it crashed, or the system ended it because memory ran out"
            yield name, WorkerDied(f"the worker died on every try, the last one with a node to itself: {cause}")


def _lost() -> tuple[type[Exception], ...]:
    """The errors of an input whose worker or node was lost."""
    found = ray.exceptions
    return found.WorkerCrashedError, found.NodeDiedError, found.OutOfMemoryError, found.ObjectLostError


def _probe(corpus: Path, token: str) -> None:
    """Checks that every node of the cluster sees the token that this build wrote into `corpus`."""

    @ray.remote(num_cpus=0)
    def sees() -> bool:
        return ownership.sees(corpus, token)

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    on_node = scheduling_strategies.NodeAffinitySchedulingStrategy
    answers = {sees.options(scheduling_strategy=on_node(node, soft=False)).remote(): node for node in nodes}
    done, silent = ray.wait(list(answers), num_returns=len(answers), timeout=_SECONDS_TO_PROBE)
    problems = [f"ray.address: node {nodes[answers[answer]]} doesn't answer" for answer in silent]
    for answer in done:
        with contextlib.suppress(ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):  # node left
            if not ray.get(answer):
                where = nodes[answers[answer]]
                problems.append(f"output: {corpus} on node {where} isn't the directory that this build writes to")
    if problems:
        raise FailedError("\n".join(problems))


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

    def write(self, corpus: Path, stage: str) -> None:
        write_json(_timing_file(corpus, stage), self)


def read_timing(corpus: Path, stage: str) -> Timing | None:
    """None if the stage has never had a unit to do."""
    return read_valid_json(_timing_file(corpus, stage), Timing)


def _timing_file(corpus: Path, stage: str) -> Path:
    return corpus / ".stages" / "timings" / f"{stage}.json"
