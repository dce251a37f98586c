"""Runs and builds under SLURM: the batch script, and the head that it starts in the allocation."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.atomic import write_bytes
from data_pipeline.foundation.config_file import load, sections
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.progress import counted
from launch import nodes, staging
from launch.cluster import ClusterConfig
from launch.nodes import Node, Run
from launch.prelaunch import run_first
from launch.supervise.remote import Agent, Agents
from pretrain.config import RunConfig
from pretrain.run import slurm

SCRIPT = "job.sbatch"
_PYTHON = [sys.executable, "-P", "-m", "launch"]  # -P: not whatever is called so in the working directory
_SECONDS_TO_BE_REQUEUED = 120.0
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE")  # sbatch's forms
_SAFE = re.compile(r"[\w./:=,@%+-]+")


@dataclass(frozen=True)
class Job:
    """What `launch slurm` was asked for. `mode`: who starts the ranks of a node, DeepSpeed's launcher or srun.

    `cluster_file` is where `cluster` was read. `doctor`: whether the job examines its nodes first.
    """

    path: Path
    overrides: list[str]
    nodes: int
    per_node: int
    mode: str
    min_nodes: int | None
    requeue: bool
    warn_seconds: int
    chain: int
    time: str | None
    stop_at_step: int | None
    cluster: ClusterConfig
    cluster_file: Path | None = None
    doctor: bool = False

    @cached_property
    def is_run(self) -> bool:
        """Whether `path` is a run file; else it is a corpus file."""
        return "model" in sections(self.path, self.overrides)

    @property
    def head(self) -> list[str]:
        """The command that the batch script ends in."""
        if not self.is_run:
            options = ["--requeue"] if self.requeue else []
            return [*_PYTHON, "build-head", *options, *self._srun, "--", str(self.path.absolute()), *self.overrides]
        options = ["--mode", self.mode, "--per-node", str(self.per_node), *(["--requeue"] if self.requeue else [])]
        options += ["--min-nodes", str(self.min_nodes)] if self.min_nodes else []
        options += ["--stop-at-step", str(self.stop_at_step)] if self.stop_at_step else []
        options += ["--doctor"] if self.doctor else []
        options += ["--cluster", str(self.cluster_file.absolute())] if self.doctor and self.cluster_file else []
        options += ["--stage", self.cluster.stage] if self.cluster.stage else []
        return [*_PYTHON, "head", *options, *self._srun, "--", str(self.path.absolute()), *self.overrides]

    @property
    def _srun(self) -> list[str]:
        container = ["--container", shlex.join(self.cluster.container)] if self.cluster.container else []
        return [*(["--srun", shlex.join(self.cluster.srun)] if self.cluster.srun else []), *container]


def submit(job: Job, dry_run: bool, submit: bool) -> None:
    """Checks everything, then writes the batch script, prints it if `dry_run`, and hands it to sbatch if `submit`.

    Raises UserError if the file, the cluster or the batch sizes don't fit, before anything is written.
    """
    if submit and shutil.which("sbatch") is None:
        raise UserError("sbatch is not on the PATH; submit from a login node of the cluster, or leave out --submit")
    name, directory = _checked(job, dry_run)
    script = batch_script(job, name, directory)
    if dry_run:
        print(script, end="")
        return
    path = directory / SCRIPT
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, script.encode())
    path.chmod(0o755)
    if not submit:
        print(f"{path} is written. Next: the same command with --submit, or sbatch {shlex.quote(str(path))}")
        return
    jobs = [_submitted(path) for _ in range(job.chain)]
    print(f"submitted {'job' if len(jobs) == 1 else 'jobs'} {', '.join(jobs)}: {path}")
    print(f"  follow: tail -F {shlex.quote(str(directory))}/{jobs[0]}.out")
    if job.is_run:
        stop = directory.parent / "stop"
        print(f"  save and stop: touch {shlex.quote(str(stop))}, or scancel --batch --signal=TERM {jobs[0]}")
    else:
        print(f"  stop: scancel {jobs[0]}")
    print(f"  resume: sbatch {shlex.quote(str(path))}")


def _checked(job: Job, dry_run: bool) -> tuple[str, Path]:
    """The name of the job and the directory of its script and output."""
    most = job.cluster.gpus_per_node
    if most and job.per_node > most:
        raise UserError(f"--gpus-per-node: {job.per_node}, but a node of this cluster has {most} (gpus_per_node)")
    if job.time and not _TIME.fullmatch(job.time):
        raise UserError(f"--time: {job.time!r}; expected days-hours:minutes:seconds, hours:minutes:seconds or minutes")
    if job.min_nodes and job.min_nodes > job.nodes:
        raise UserError(f"--min-nodes: {job.min_nodes} is more than --nodes {job.nodes}")
    if job.is_run:
        setup = Run(job.path, job.overrides).checked(job.nodes * job.per_node, may_train=dry_run)
        return setup.config.run.name, setup.directory.absolute() / "slurm"
    if job.doctor:
        raise UserError(f"--doctor: {job.path} is a corpus file; the doctor examines nodes for a run")
    corpus = load(job.path, job.overrides, CorpusConfig)
    return corpus.name, Path(f"{Path(corpus.output).absolute()}.slurm")


def batch_script(job: Job, name: str, directory: Path) -> str:
    """The script that sbatch gets. Whatever a name or path holds, it is one word to SLURM and to the shell."""
    cluster, plain = job.cluster, re.sub(r"[^\w.-]+", "-", name).strip("-") or "run"
    each = counted(job.per_node, "GPU" if cluster.device == "gpu" else "rank")
    ranks = f"{counted(job.nodes, 'node')} × {each}"
    options: list[tuple[str, str | int | None]] = [
        ("job-name", plain),
        ("nodes", job.nodes),
        ("ntasks-per-node", job.per_node if job.is_run and job.mode == "srun" else 1),
        ("gpus-per-node", job.per_node if cluster.device == "gpu" and job.is_run else None),
        ("partition", cluster.partition),
        ("account", cluster.account),
        ("qos", cluster.qos),
        ("time", job.time or cluster.time),
        ("output", f"{str(directory).replace('%', '%%')}/%j.out"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{job.warn_seconds}"),
        ("dependency", "singleton" if job.chain > 1 else None),
    ]
    flags = ["--exclusive", "--requeue" if job.requeue else "--no-requeue", *(["--no-kill"] if job.min_nodes else [])]
    lines = [f"--{key}={_directive(str(value), key)}" for key, value in options if value is not None]
    lines += [*flags, *(_directive(option, "sbatch") for option in cluster.sbatch)]
    what = f"{ranks}, started by {'the deepspeed launcher' if job.mode == 'deepspeed' else 'srun'}"
    if not job.is_run:
        what = f"data-pipeline build on {counted(job.nodes, 'node')}"
    script = [
        "#!/bin/bash",
        f"# {plain}: {what}. Written by `launch slurm`.",
        *(f"#SBATCH {line}" for line in lines),
        "",
    ]
    script += [f"module load {shlex.join(cluster.modules)}"] if cluster.modules else []
    script += [f"export {key}={shlex.quote(value)}" for key, value in _variables(job).items()]
    script += [*cluster.setup, f"cd {shlex.quote(str(Path.cwd()))}", ""]
    script += _comment(job)
    # exec: SLURM sends the batch shell USR1 before the time is over, and only the head knows what to do then
    return "\n".join([*script, f"exec {_shell(job.head)}", ""])


def _comment(job: Job) -> list[str]:
    if not job.is_run:
        return ["# the head starts Ray on each node with srun, builds, and takes Ray down again"]
    first = (
        ["# the head runs the doctor first, and ends with its findings if one of them is a fault"] if job.doctor else []
    )
    if job.cluster.stage:
        first.append("# each node copies the corpora to its own disk, and the ranks read them there")
    if job.mode == "deepspeed":
        return [
            *first,
            "# on each node, the head's srun starts an agent, and that DeepSpeed's launcher of the node's ranks:",
            "#   deepspeed.launcher.launch --node_rank $SLURM_NODEID --master_addr FIRST_NODE … pretrain train",
        ]
    return [
        *first,
        "# for each GPU, the head's srun starts an agent, and that one rank: RANK is $SLURM_PROCID, and so on",
    ]


def _variables(job: Job) -> dict[str, str]:
    """What the batch script exports: the cluster's variables, and where this code is found."""
    own = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}
    return {**own, **({"CUDA_VISIBLE_DEVICES": ""} if job.cluster.device == "cpu" else {}), **job.cluster.variables}


def _shell(command: list[str]) -> str:
    return shlex.join(command)


def _directive(text: str, key: str) -> str:
    """`text` as one word of an #SBATCH line. SLURM knows quotes and backslashes, but no end of line."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{key}: {text!r}: SLURM takes no control characters here, such as an end of line")
    if _SAFE.fullmatch(text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _submitted(path: Path) -> str:
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise FailedError(f"sbatch: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


@dataclass(frozen=True)
class First:
    """What a head does before the run: whether it calls the doctor, with which cluster file, and where the corpora are
    copied on each node."""

    doctor: bool = False
    cluster_file: Path | None = None
    stage: Path | None = None


def head(
    run: Run, mode: str, per_node: int, requeue: bool, srun: list[str], container: list[str], first: First = First()
) -> int:
    """Runs in the batch script of an allocation: starts agents with srun, and the ranks; returns the run's exit code.

    With `requeue`, a run that has stopped for the scheduler's sake or lost a node goes back into the queue.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None or "SLURM_JOB_NODELIST" not in os.environ:
        raise UserError("launch head: not in an allocation of SLURM; `launch slurm` writes the script that calls it")
    each_rank = mode == "srun"
    file = [str(run.path), *run.overrides]
    before = []
    if first.doctor:
        cluster = ["--cluster", str(first.cluster_file)] if first.cluster_file else []
        before.append([*_PYTHON, "doctor", "--ranks", str(per_node), *cluster, "--", *file])
    if first.stage:
        each_node = ["srun", "--ntasks-per-node=1", f"--ntasks={os.environ['SLURM_JOB_NUM_NODES']}", "--overlap", *srun]
        before.append([*each_node, *container, *_PYTHON, "stage", "--to", str(first.stage), "--", *file])
        copies = staging.overrides(load(run.path, run.overrides, RunConfig), first.stage)
        run = replace(run, overrides=[*run.overrides, *copies])

    def start(agents: Agents, chosen: list[Node]) -> None:
        tasks = per_node if each_rank else 1
        names = ",".join(node.name for node in chosen)
        command = ["srun", f"--nodes={len(chosen)}", f"--nodelist={names}", f"--ntasks={len(chosen) * tasks}"]
        # --overlap: the step of an attempt that has lost a node holds the others, as long as SLURM waits for that node
        command += [f"--ntasks-per-node={tasks}", "--overlap", "--kill-on-bad-exit=0", "--cpu-bind=none", "--no-kill"]
        command += srun
        index = "SLURM_PROCID" if each_rank else "SLURM_NODEID"
        agents.run([*command, *container, *_PYTHON, "agent"], "srun", index, {})

    allocated = [Node(name, per_node) for name in slurm.hostnames(os.environ["SLURM_JOB_NODELIST"])]
    # any other node tells on which of this node's networks they are
    address = nodes.address_towards(slurm.address_of(allocated[-1].name))

    def master(first: Agent) -> tuple[str, int]:
        return slurm.address_of(first.name), slurm.master_port(job)

    launcher = nodes.Launcher(start, each_rank, address, master)
    ended = run_first(before) or nodes.launch(run, allocated, launcher)
    if requeue and ended.to_go_on:
        requeue_job(job)
    return ended.code


def requeue_job(job: str) -> None:
    """Puts this job back into SLURM's queue, which ends it."""
    print(f"requeueing job {job}", file=sys.stderr, flush=True)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    if done.returncode:
        print(f"scontrol requeue {job}: {' '.join(done.stderr.split())}", file=sys.stderr)
        return
    time.sleep(_SECONDS_TO_BE_REQUEUED)  # SLURM ends this process; an exit of its own would end the job
