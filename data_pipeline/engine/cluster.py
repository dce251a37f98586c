"""Starts or joins a driver's Ray cluster; has the actor to which workers report."""

import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util import scheduling_strategies

import data_pipeline
from data_pipeline.base.errors import FailedError, one_line
from data_pipeline.base.progress import Board
from data_pipeline.engine.config import RayConfig
from data_pipeline.engine.context import FOLDER, SECONDS_TO_ANSWER
from data_pipeline.engine.dispatch import cpus_of, rooms_of_nodes

_SECONDS_TO_CONNECT = 10.0
_OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the variable that `ray job submit` sets for the command that it starts
_board: tuple[str, str, Any] | None = None  # node and job of this driver; the actor to which its workers report
_is_own = False  # whether this module has started or joined the cluster, and not the program that builds


def joined(config: RayConfig, object_store_bytes: int) -> int:
    """Starts or joins a cluster, unless this process has one; returns the number of its CPUs. Raises FailedError if the
    cluster can't be used."""
    global _is_own
    if not ray.is_initialized():
        _is_own = True
        if config.address is None:
            _start(config, object_store_bytes)
        else:
            _join(config.address)
    return cpus_of(room for _, room in rooms_of_nodes().values())


def leave() -> None:
    """Ends or leaves the cluster, unless the program had it before."""
    global _is_own
    if _is_own:
        ray.shutdown()
    _is_own = False


def abandon(tasks: list[Any]) -> None:
    """Ends tasks that run. In the program's own cluster, waits a moment until their workers have stopped."""
    if _is_own:
        leave()  # ends the workers, too: `ray.cancel` of tasks that are just ending can crash the driver
        return
    with contextlib.suppress(ray.exceptions.RayError):
        for task in tasks:
            ray.cancel(task)
        ray.wait(tasks, num_returns=len(tasks), timeout=SECONDS_TO_ANSWER, fetch_local=False)


def _here() -> tuple[str, str]:
    """The node and the job of this driver: other ones after it has left a cluster and joined another."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def board() -> Any:
    """The actor to which this driver's workers report. It runs on the driver's node."""
    global _board
    here = _here()
    if _board is None or _board[:2] != here:
        on_this_node = scheduling_strategies.NodeAffinitySchedulingStrategy(here[0], soft=True)
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Board)
        _board = *here, actor.options(scheduling_strategy=on_this_node).remote()
    return _board[2]


def _start(config: RayConfig, object_store_bytes: int) -> None:
    """Starts Ray on this machine, with all CPUs by default. Raises FailedError if it can't."""
    try:
        own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]  # noqa: PTH100
        with _environment(own) as environment:
            started = ray.init(
                address="local",  # not a cluster that happens to run on this machine
                num_cpus=config.num_cpus,
                object_store_memory=object_store_bytes,
                include_dashboard=config.dashboard,
                logging_level=logging.ERROR,
                runtime_env=environment,
            )
    except Exception as error:  # Ray raises a bare one if the machine is so busy that it doesn't start in 30 s
        raise FailedError(f"Ray doesn't start here: {one_line(error)}; run the command again") from None
    if config.dashboard:
        print(f"Ray's dashboard: http://{started.dashboard_url}", flush=True)


def _join(address: str) -> None:
    """Joins the cluster at `address`. Raises FailedError if it can't be reached."""
    # One attempt of at most 40 s. By default Ray makes 20, a quarter of an hour if another program has the port.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # fails at once if nothing listens
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        with _environment([]) as environment:
            ray.init(address=address, logging_level=logging.ERROR, runtime_env=environment)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise FailedError(f"ray.address: can't join the cluster at {address}: {one_line(error)}") from None


@contextlib.contextmanager
def _environment(search_path: list[str]) -> Iterator[dict[str, Any] | None]:
    """Ray's runtime environment for workers that run no file of the current folder in place of a module.

    Ray puts the current folder and the script's first in the workers' search path, unless a `working_dir` is given.
    Theirs is an empty folder, which Ray copies to each node; `attempt` then changes to the current folder, for the
    relative paths in settings and variables. `search_path`: absolute folders that workers search besides those of
    their node. None within a job that was submitted to Ray, which has an environment; Ray refuses another.
    """
    if _OF_A_JOB in os.environ:
        yield None
        return
    package = str(Path(data_pipeline.__file__).parents[1])
    if not sys.flags.safe_path and os.path.abspath(sys.path[0]) == package:  # noqa: PTH100
        search_path = [package, *search_path]  # a checkout that may not be installed, and is run in place
    variables = {FOLDER: str(Path.cwd())}
    if search_path:
        variables["PYTHONPATH"] = os.pathsep.join(search_path)
    with tempfile.TemporaryDirectory() as empty:
        yield {"working_dir": empty, "env_vars": variables}
