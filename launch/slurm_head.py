"""The head of a SLURM job: trains, or builds a corpus with Ray on each node.

The batch script calls it on the first node of the allocation.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.command import STOPPED, print_error
from data_pipeline.base.config_file import load, sections
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.processes import PYTHON, SAFE_PATH, Process, ProcessGroup, announce, caught, until
from data_pipeline.config import CorpusConfig
from data_pipeline.engine import workers
from launch.agent import address_towards
from launch.attempts import NOTHING_STARTED, Ended, Run, launch
from launch.head import StopRequests
from launch.nodes import Access, Node
from pretrain.config import RunConfig
from pretrain.run import slurm, status
from pretrain.training.preflight import is_finished, preflight

Launcher = Literal["agent", "deepspeed"]
LAUNCH = [*PYTHON, "-m", "launch"]
_SECONDS_TO_BE_REQUEUED = 120.0
_SECONDS_TO_START, _SECONDS_TO_STOP, _SECONDS_TO_ANSWER = 180.0, 30.0, 0.2
_SECONDS_TO_NOTICE = 5.0  # that Ray's head has ended: `ray start` looks each second
_RESTARTS = 3  # of Ray on a node
_LAST_LINES = 5
# Other programs of the job share the node and its cores; each rank binds itself to the cores beside its GPU.
_SHARED = ["--overlap", "--cpu-bind=none"]
_RAY = "from ray.scripts.scripts import main; main()"


@dataclass(frozen=True)
class HeadJob:
    """How the head of a job trains or builds.

    Attributes:
        per_node: number of ranks on each node.
        srun: further options of srun.
        container: the command that precedes what srun starts.
        doctor: whether `launch doctor` checks the nodes first, with `cluster_file`.
        launcher: what starts the ranks of a node: an agent, or DeepSpeed's launcher.
    """

    per_node: int
    min_nodes: int | None = None
    requeue: bool = False
    stop_at_step: int | None = None
    srun: list[str] = field(default_factory=list)
    container: list[str] = field(default_factory=list)
    doctor: bool = False
    cluster_file: str | None = None
    launcher: Launcher = "agent"

    @property
    def as_json(self) -> str:
        """The argument of `launch head` besides the file."""
        return json.dumps({name: value for name, value in vars(self).items() if value not in (None, False, [])})


def head(path: Path, job: HeadJob) -> int:
    """Trains the run file `path`, or builds the corpus file, in this allocation; returns the exit code.

    With `requeue`, the job is requeued if the scheduler stops it or a node is lost.
    """
    number = os.environ.get("SLURM_JOB_ID")
    if number is None or "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("launch head: not in an allocation of SLURM; `launch slurm` writes the script that calls it")
    names = slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])
    if "model" in sections(path, []):
        ended = _train(path, job, [Node(name, job.per_node) for name in names])
    else:
        ended = _build_corpus(path, job, names, number)
    if job.requeue and ended.interrupted:
        _requeue(number)
    return ended.code


def access(nodes: list[Node], srun: list[str], container: list[str], variables: dict[str, str]) -> Access:
    """The access to nodes of this allocation through srun. `variables`: added to the agents' environment."""

    def command(node: str) -> list[str]:
        return [*_on(node), *srun, *container, *LAUNCH, "agent"]

    # the local address that routes to another node of the job
    return Access(command, variables, address_towards(slurm.node_address(nodes[-1].name)))


def _on(node: str) -> list[str]:
    """The command that runs the following command on a node."""
    return ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", *_SHARED]


def _train(path: Path, job: HeadJob, nodes: list[Node]) -> Ended:
    run = Run(path, [], job.stop_at_step, min_nodes=job.min_nodes)
    if job.doctor:
        cluster = ["--cluster", job.cluster_file] if job.cluster_file else []
        if ended := _run_before([*LAUNCH, "doctor", "--ranks", str(job.per_node), *cluster, "--", str(path)]):
            return ended
    if job.launcher == "deepspeed":
        return _train_with_deepspeed(run, nodes, job)
    return launch(run, nodes, access(nodes, job.srun, job.container, {}))


def _train_with_deepspeed(run: Run, nodes: list[Node], job: HeadJob) -> Ended:
    """Starts the ranks of each node with DeepSpeed's launcher. No attempt follows a failed one.

    On the first signal the ranks save and stop; the second kills them.
    """
    with caught(numbers=[signal.SIGUSR1]) as warned:  # it would end this process: no requeue
        config = load(run.path, run.overrides, RunConfig)
        setup = preflight(config, sum(node.ranks for node in nodes), here=False, folder=run.path.parent)
        if is_finished(setup):
            return Ended(0, False)
        command, requests = _deepspeed_command(run, nodes, job), StopRequests(setup.directory)
        with caught(requests.on_signal), ProcessGroup() as group:
            if warned:
                print(NOTHING_STARTED, file=sys.stderr, flush=True)
                return Ended(STOPPED, True)
            process = group.add(Process(command, {**os.environ, **SAFE_PATH, status.CLEARED: "1"}))
            group.watch(stop=lambda: len(requests.signals) > 1)
            code = process.code
    interrupted = code == STOPPED and requests.interrupted(run.stop_at_step)
    return Ended(code if code in (0, 2, STOPPED) else 1, interrupted)


def _deepspeed_command(run: Run, nodes: list[Node], job: HeadJob) -> list[str]:
    """The command that starts DeepSpeed's launcher on each node. Writes its hostfile beside the run file."""
    number, hostfile = os.environ["SLURM_JOB_ID"], run.path.with_suffix(".hosts")
    write_bytes(hostfile, "".join(f"{node.name} slots={node.ranks}\n" for node in nodes).encode())
    meeting = [f"--master_addr={slurm.node_address(nodes[0].name)}", f"--master_port={slurm.master_port(number)}"]
    options = [f"--hostfile={hostfile}", "--no_ssh", *meeting, "--no_python", "--no_local_rank"]
    # a task finds the number of its node only in its environment
    script = 'exec "$0" -P -m deepspeed.launcher.runner --node_rank "$SLURM_NODEID" "$@"'
    on_each = ["srun", "--ntasks-per-node=1", f"--ntasks={len(nodes)}", *_SHARED, *job.srun, *job.container]
    return [*on_each, "sh", "-c", script, PYTHON[0], *options, *run.rank]


def _run_before(command: list[str]) -> Ended | None:
    """Runs a command before the run; None if it succeeds.

    A signal ends the command. Without the handler, SIGUSR1 would kill this process, and SLURM wouldn't requeue the job.
    """
    on_signal = partial(announce, what="stopping before the run")
    with caught(on_signal) as received, ProcessGroup() as group:
        process = group.add(Process(command))
        group.watch(stop=lambda: received)
        if received:
            print(NOTHING_STARTED, file=sys.stderr, flush=True)
            return Ended(STOPPED, received[0] == signal.SIGUSR1)
        return Ended(max(process.code, 1), False) if process.code else None


def _requeue(job: str) -> None:
    """Puts this job back into SLURM's queue, which ends this process."""
    print(f"requeueing job {job}", file=sys.stderr, flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        print(f"scontrol requeue {job}: {' '.join(done.stderr.split())}", file=sys.stderr)
        return
    time.sleep(_SECONDS_TO_BE_REQUEUED)  # until SLURM ends this process; an exit would end the job


def _build_corpus(path: Path, job: HeadJob, names: list[str], number: str) -> Ended:
    """Starts Ray on the nodes `names`, builds the corpus, and ends Ray.

    The build begins on the first node, and other nodes join it once their Ray is up. If Ray ends on another node, it is
    started again while the build continues. If Ray ends on the first node, the job is interrupted. SIGUSR1 (SLURM's
    warning), SIGTERM and SIGINT end the build, which can be resumed at any time. Raises FailedError if Ray doesn't
    start on the first node.
    """
    workers.check_dashboard(config := load(path, [], CorpusConfig).ray)
    host, port = slurm.node_address(names[0]), slurm.master_port(number)
    cpus = dict(zip(names, slurm.cpus_per_node(os.environ), strict=False))
    # Ray answers only requests with its token, which nobody outside this job has
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in workers.SETTINGS.items():
        os.environ.setdefault(name, value)

    def ray_on(name: str) -> Process:
        where = [f"--address={host}:{port}"]
        if name == names[0]:
            where = ["--head", f"--port={port}", f"--include-dashboard={str(config.dashboard).lower()}"]
        options = [*where, "--block", "--disable-usage-stats", f"--object-store-memory={workers.OBJECT_STORE_BYTES}"]
        options += [f"--num-cpus={cpus[name]}"] if name in cpus else []
        command = [*_on(name), *job.srun, *job.container, *PYTHON, "-c", _RAY, "start", *options]
        return group.add(Process(command, output="kept"))

    with caught() as received, ProcessGroup() as group:  # at the end, srun forwards SIGTERM to Ray
        head = ray_on(names[0])
        _wait_for_head(head, host, port, received)
        others, starts = {ray_on(name): name for name in names[1:]}, Counter[str]()
        command = [*PYTHON, "-m", "data_pipeline", "build", str(path), f"ray.address={host}:{port}"]
        process = group.add(Process(command))
        while (ended := group.watch(stop=lambda: received)) in others:
            name = others.pop(ended)
            again = starts[name] < _RESTARTS
            what = "it is started again" if again else "the build continues without it"
            print(f"warning: node {name}: {_ended(ended)}; {what}", file=sys.stderr, flush=True)
            group.remove(ended)
            if again:
                starts[name] += 1
                others[ray_on(name)] = name
        if ended:
            failed = ended is head or process.code not in (0, UserError.exit_code)
            if failed and until(lambda: head.code is not None, _SECONDS_TO_NOTICE):
                print_error(_ended(head))
                return Ended(FailedError.exit_code, True)
            return Ended(process.code or 0, False)
        process.send_signal(signal.SIGINT)
        until(lambda: process.code is not None, _SECONDS_TO_STOP)
    return Ended(STOPPED, received[0] == signal.SIGUSR1)


def _wait_for_head(ray: Process, host: str, port: int, received: list[int]) -> None:
    """Waits until Ray's head listens, or a signal comes. Raises FailedError if the head doesn't start."""

    def decided() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _SECONDS_TO_ANSWER):
            return True
        return bool(received) or ray.code is not None

    if not until(decided, _SECONDS_TO_START) or (ray.code is not None and not received):
        raise _ended(ray)


def _ended(ray: Process) -> FailedError:
    code = "doesn't start" if ray.code is None else f"ended with exit code {ray.code}"
    return FailedError(f"ray: {code}: {'; '.join(ray.last_lines(_LAST_LINES))}")
