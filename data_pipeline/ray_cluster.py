"""Ray as the units see it: a cluster that is started or joined, and a function applied to names, in any order."""

import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.data.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from data_pipeline import ownership
from data_pipeline.config import RayConfig
from data_pipeline.errors import FailedError

_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_PROBE = 60.0  # a node may have to start a worker first
_RETRIES = 20  # of a unit whose worker was lost; Ray Data's own number is infinite, and a crash may be the unit's fault


def start(config: RayConfig, corpus: Path, token: str) -> None:
    """Starts Ray here, or joins the cluster at `config.address`, all of whose nodes must see `corpus`.

    Raises FailedError where the cluster can't be reached or one of its nodes sees another directory.
    """
    if ray.is_initialized():
        return
    if config.address is None:
        # Only counts travel through the object store; the rest of the memory is the workers'.
        ray.init(
            address="local",  # not a cluster that happens to run on this machine
            num_cpus=config.num_cpus,
            object_store_memory=256 * 2**20,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
    else:
        _join(config.address)
        _probe(corpus, token)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.execution_options.verbose_progress = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it logs as an error it raises too


def each(function: Callable[[str], str], names: list[str], what: str) -> Iterator[str]:
    """`function` of each name, as they finish; a lost worker's or node's names go to others.

    Raises FailedError, which says that `what` failed, where Ray gives up.
    """

    def perform(batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"result": [function(str(name)) for name in batch["name"]]}

    dataset = ray.data.from_items([{"name": name} for name in names], override_num_blocks=len(names))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Ray 2.60 has no other way to bound retries than the one it will replace in 2.64
        dataset = dataset.map_batches(perform, batch_size=1, num_cpus=1, max_retries=_RETRIES)
    try:
        for row in dataset.iter_rows():
            yield row["result"]
    except (ray.exceptions.RayError, ray.data.exceptions.SystemException) as error:
        raise FailedError(f"{what}: Ray gave up: {_one_line(error)}; what is finished is kept") from None


def _join(address: str) -> None:
    # One attempt, of 40 s at most. Ray makes 20, so that another program at the port would keep us for a quarter hour.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # tells at once where nobody listens
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        ray.init(address=address, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise FailedError(f"ray.address: can't join the cluster at {address}: {_one_line(error)}") from None


def _probe(corpus: Path, token: str) -> None:
    """Every node of the cluster looks for the token that this build has written into `corpus`."""

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
        with contextlib.suppress(ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):  # gone since
            if not ray.get(answer):
                where = nodes[answers[answer]]
                problems.append(f"output: {corpus} on node {where} isn't the directory that this build writes to")
    if problems:
        raise FailedError("\n".join(problems))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500].rstrip(".")
