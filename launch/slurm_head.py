"""The head of a SLURM job: what its batch script calls on the first node of the allocation."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.processes import ProcessGroup
from data_pipeline.foundation.signals import announce, caught
from launch import corpus_staging, multi_node, slurm_build
from launch.agent_pool import Agent, AgentPool
from launch.attempts import NOTHING_STARTED, Ended, Run
from launch.multi_node import Access, Node
from pretrain.config import RunConfig
from pretrain.run import slurm

PYTHON = [sys.executable, "-P", "-m", "launch"]  # -P: never a folder `launch` of the working directory
_SECONDS_TO_BE_REQUEUED = 120.0


@dataclass(frozen=True)
class HeadJob:
    """What the head of a job is to do with the file `path`: train if `is_run`, else build a corpus.

    With `agent_per_rank`, srun starts the `per_node` ranks of each node, else DeepSpeed's launcher. `srun` has further
    options of srun, `container` is put before what it starts. `stage`: where each node first copies the corpora.
    `doctor`: whether the doctor examines the nodes first, with `cluster_file`.
    """

    path: Path
    per_node: int
    overrides: list[str] = field(default_factory=list)
    is_run: bool = False
    agent_per_rank: bool = False
    min_nodes: int | None = None
    requeue: bool = False
    stop_at_step: int | None = None
    srun: list[str] = field(default_factory=list)
    container: list[str] = field(default_factory=list)
    stage: Path | None = None
    doctor: bool = False
    cluster_file: Path | None = None

    @property
    def file(self) -> list[str]:
        return ["--", str(self.path), *self.overrides]


def head(job: HeadJob) -> int:
    """Trains or builds in this allocation; returns the exit code.

    With `requeue`, a job that the scheduler stops or that loses a node goes back into the queue.
    """
    number = os.environ.get("SLURM_JOB_ID")
    if number is None or "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("launch head: not in an allocation of SLURM; `launch slurm` writes the script that calls it")
    names = slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])
    if job.is_run:
        ended = _train(job, [Node(name, job.per_node) for name in names])
    else:
        ended = slurm_build.build_corpus([str(job.path), *job.overrides], names, number, job.srun, job.container)
    if job.requeue and ended.interrupted:
        _requeue(number)
    return ended.code


def access(
    nodes: list[Node], srun: list[str], container: list[str], variables: dict[str, str], agent_per_rank: bool = False
) -> Access:
    """Starts agents on nodes of this allocation with srun; `variables` are set in their environment."""

    def start(pool: AgentPool, chosen: list[Node]) -> None:
        tasks = chosen[0].ranks if agent_per_rank else 1
        names = [node.name for node in chosen]
        command = ["srun", f"--nodes={len(chosen)}", f"--nodelist={','.join(names)}", f"--ntasks={len(chosen) * tasks}"]
        # --overlap: the step of an attempt that has lost a node holds the others, as long as SLURM waits for that node.
        # --cpu-bind=none: each rank binds itself to the cores beside its GPU.
        command += [f"--ntasks-per-node={tasks}", "--overlap", "--kill-on-bad-exit=0", "--cpu-bind=none", "--no-kill"]
        index = "SLURM_PROCID" if agent_per_rank else "SLURM_NODEID"
        pool.start([*command, *srun, *container, *PYTHON, "agent"], names, index, variables)

    def master(first: Agent) -> tuple[str, int]:
        return slurm.node_address(first.name), slurm.master_port(os.environ["SLURM_JOB_ID"])

    # the way to any other node shows on which of this node's networks the nodes are
    address = multi_node.address_towards(slurm.node_address(nodes[-1].name))
    return Access(start, agent_per_rank, address, master)


def _train(job: HeadJob, nodes: list[Node]) -> Ended:
    run = Run(job.path, job.overrides, job.stop_at_step, min_nodes=job.min_nodes)
    before = []
    if job.doctor:
        cluster = ["--cluster", str(job.cluster_file)] if job.cluster_file else []
        before.append([*PYTHON, "doctor", "--ranks", str(job.per_node), *cluster, *job.file])
    if job.stage:
        each_node = ["srun", "--ntasks-per-node=1", f"--ntasks={len(nodes)}", "--overlap", *job.srun, *job.container]
        before.append([*each_node, *PYTHON, "stage", "--to", str(job.stage), *job.file])
        copies = corpus_staging.overrides(load(run.path, run.overrides, RunConfig), job.stage)
        run = replace(run, overrides=[*run.overrides, *copies])
    reached = access(nodes, job.srun, job.container, {}, job.agent_per_rank)
    return _run_before(before) or multi_node.launch(run, nodes, reached)


def _run_before(commands: list[list[str]]) -> Ended | None:
    """Runs one command after the other; None once all of them have succeeded.

    A signal ends them: the batch shell itself would die of SIGUSR1, and SLURM wouldn't requeue the job.
    """
    with (
        caught(lambda number: announce(number, "ending what comes before the run")) as received,
        ProcessGroup() as group,
    ):
        for command in commands:
            process = group.start(command)
            group.watch(stop=lambda: received)
            if received:
                print(NOTHING_STARTED, file=sys.stderr, flush=True)
                return Ended(STOPPED, received[0] == signal.SIGUSR1)
            if process.code:
                return Ended(max(process.code, 1), False)
            group.remove(process)
    return None


def _requeue(job: str) -> None:
    """Puts this job back into SLURM's queue, which ends it."""
    print(f"requeueing job {job}", file=sys.stderr, flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        print(f"scontrol requeue {job}: {' '.join(done.stderr.split())}", file=sys.stderr)
        return
    time.sleep(_SECONDS_TO_BE_REQUEUED)  # SLURM ends this process; an exit of its own would end the job
