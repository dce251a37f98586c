"""Ray as units use it: starts or joins a cluster, and applies a function to inputs on free workers."""

import contextlib
import itertools
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from data_pipeline.execution import ownership
from data_pipeline.foundation.errors import FailedError, WorkerDied, one_line

_RETRIES = 2  # for a unit whose worker was lost; Ray's default is infinite, but the unit itself may kill its workers
# Ray reads these settings when it is imported. It prints pages about every lost worker and raylet; our own messages
# have what matters. By default it runs its workers at a low priority, and a build beside any other program hardly
# progresses. Users who want that can start the command with `nice`, which its workers inherit.
for _name, _value in {
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "retries remaining|worker died|killed due to (memory pressure|the node running low on memory)"
        r"|how to address the out of memory issue|Raylet is terminated|has been marked dead because|^\s*$"
    ),
    "RAY_task_oom_retries": str(_RETRIES),
    "RAY_worker_niceness": "0",
}.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

Given = TypeVar("Given")
Answer = TypeVar("Answer")
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_PROBE = 60.0  # a node may have to start a worker first
_AHEAD = 4  # inputs for each worker that Ray holds
_LOST = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


def start(num_cpus: int | None) -> None:
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


def join(address: str, corpus: Path, token: str) -> None:
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


def cpus() -> int:
    """How many units the cluster does at once."""
    return int(ray.cluster_resources().get("CPU", 1))


def each(
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
            for name, given in itertools.islice(waiting, max(0, _AHEAD * cpus() - len(running))):
                running[task.remote(given)] = name
            if not running:
                break
            (done,), _ = ray.wait(list(running), num_returns=1)
            name = running.pop(done)
            try:
                yield name, ray.get(done)
            except _LOST:
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
    """Like `each`, but with one try for each input, which gets all CPUs of a node."""
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
        except _LOST:
            cause = "it crashed, or the system ended it because memory ran out"
            yield name, WorkerDied(f"the worker died on every try, the last one with a node to itself: {cause}")


def _probe(corpus: Path, token: str) -> None:
    """Checks that every node of the cluster sees the token that this build wrote into `corpus`."""

    @ray.remote(num_cpus=0)
    def sees() -> bool:
        return ownership.sees(corpus, token)

    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    answers = {
        sees.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): node
        for node in nodes
    }
    done, silent = ray.wait(list(answers), num_returns=len(answers), timeout=_SECONDS_TO_PROBE)
    problems = [f"ray.address: node {nodes[answers[answer]]} doesn't answer" for answer in silent]
    for answer in done:
        with contextlib.suppress(ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):  # node left
            if not ray.get(answer):
                where = nodes[answers[answer]]
                problems.append(f"output: {corpus} on node {where} isn't the directory that this build writes to")
    if problems:
        raise FailedError("\n".join(problems))
