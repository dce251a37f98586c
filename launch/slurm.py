"""Reads cluster files, and writes and submits the batch scripts of runs and builds under SLURM."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveInt

from data_pipeline.base.atomic import write_bytes
from data_pipeline.base.config_file import Section, load, merged
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import masked_code
from data_pipeline.config import CorpusConfig
from launch.slurm_head import LAUNCH, HeadJob
from pretrain.config import RunConfig
from pretrain.device_speed import GPUS
from pretrain.run import rank_environment
from pretrain.training.preflight import preflight, unchecked

SCRIPT = "job.sbatch"
_PROLOGUE = """\
echo "job $SLURM_JOB_ID, start ${{SLURM_RESTART_COUNT:-0}}, $(date --iso-8601=seconds), nodes $SLURM_JOB_NODELIST"
{launch} --version

# {path} as it was when this was written, with what it extends and the overrides
copy={directory}/"$SLURM_JOB_ID".yaml
(umask 077; cat > "$copy.tmp") <<'END_OF_FILE'
{content}END_OF_FILE
mv "$copy.tmp" "$copy"
"""
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE")  # sbatch's forms
_TIME_EXPECTED = "expected days-hours:minutes:seconds, hours:minutes:seconds or minutes"
_SAFE = re.compile(r"[\w./:=,@%+-]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Keys of a cluster file that are options of sbatch.
_KEYS = ("cpus_per_task", "mem", "partition", "account", "qos", "constraint", "reservation", "mail_type", "mail_user")


def _one_line(text: str) -> str:
    if _CONTROL.search(text):
        raise ValueError(f"expected one line, got {text!r}")
    return text


def _known_gpu(name: str) -> str:
    if name not in GPUS:
        raise ValueError(f"expected one of {', '.join(sorted(GPUS))}, got {name!r}")
    return name


def _time_limit(text: str) -> str:
    if not _TIME.fullmatch(text):
        raise ValueError(f"{_TIME_EXPECTED}, got {text!r}")
    return text


Line = Annotated[str, AfterValidator(_one_line)]


def _named(variables: dict[str, str]) -> dict[str, str]:
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} can't be the name of an environment variable")
    return variables


class ClusterConfig(Section):
    """A cluster file, configs/clusters/*.yaml: what SLURM and the nodes of a cluster need for any run."""

    partition: Line | None = None
    """SLURM's partition."""
    account: Line | None = None
    """The account that the job is charged to."""
    qos: Line | None = None
    """SLURM's quality of service."""
    time: Annotated[str, AfterValidator(_time_limit)] | None = None
    """The job's time limit, days-hours:minutes:seconds, unless --time gives another."""
    device: Literal["gpu", "cpu"] = "gpu"
    """`cpu`: the job requests no GPUs, and its ranks run on the CPU."""
    gpus_per_node: PositiveInt | None = None
    """Number of GPUs of a node."""
    gpu: Annotated[str, AfterValidator(_known_gpu)] | None = None
    """The kind of GPU, as `pretrain plan` names it. `launch slurm` then prints the time of a run beside the job's time
    limit."""
    gres: Line | None = None
    """The GPUs to request instead of `--gpus-per-node`, on clusters that need it: `gpu:a100:4`."""
    exclusive: bool = True
    """The job has its nodes to itself. false: set `mem` and `cpus_per_task`, too."""
    mem: Line | None = None
    """Memory of a node: `200G`. null: the cluster's default, on an exclusive node too. `"0"`: all memory of the
    node."""
    cpus_per_task: PositiveInt | None = None
    """CPUs of a node. Each node has one task, the agent, whose ranks share these CPUs. null: the cluster's default."""
    constraint: Line | None = None
    """Features that the nodes must have: `a100&ib`."""
    reservation: Line | None = None
    """SLURM's reservation."""
    mail_type: Line | None = None
    """The events of the job for which SLURM sends mail: `END,FAIL,REQUEUE`."""
    mail_user: Line | None = None
    """Recipient of the mail. null: the user who submits."""
    interface: Line | None = None
    """The network interface that NCCL and gloo use. null: they choose."""
    environment: Annotated[dict[str, str], AfterValidator(_named)] = {}
    """Environment variables of the job."""
    modules: list[Line] = []
    """The modules that `module load` loads."""
    setup: list[str] = []
    """Further lines of the batch script, in shell."""
    container: list[Line] = []
    """A command that runs another command in a container, such as `[apptainer, exec, --nv, image.sif]`. It precedes
    the command of each node's agent."""
    sbatch: list[Line] = []
    """Further options of sbatch."""
    srun: list[Line] = []
    """Further options of srun."""

    @property
    def variables(self) -> dict[str, str]:
        """`environment` and the variables that `interface` sets."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.interface else ()
        return {**dict.fromkeys(names, self.interface or ""), **self.environment}


@dataclass(frozen=True)
class Job:
    """A job of `launch slurm`: the run or corpus file, what its head does, the number of nodes, and SLURM's options."""

    path: Path
    overrides: list[str]
    is_run: bool
    head: HeadJob
    nodes: int
    cluster: ClusterConfig
    time: str | None = None
    warn_seconds: int = 300
    chain: int = 1


def submit(job: Job, dry_run: bool, submit: bool, forecast: Callable[[Job], str]) -> None:
    """Writes the batch script, and submits it if `submit`. `dry_run`: only prints the script. `forecast`: a line about
    the job's time; "" if there is none.

    Raises UserError, before anything is written, if the file, the cluster and the batch sizes don't fit.
    """
    if submit and shutil.which("sbatch") is None:
        raise UserError("sbatch is not on the PATH; submit from a login node of the cluster, or leave out --submit")
    name, directory = _checked(job, dry_run, submit)
    script = batch_script(job, name, directory)
    if dry_run:
        print(script, end="")
        return
    if line := forecast(job):
        print(line)
    path = directory / SCRIPT
    write_bytes(path, script.encode(), mode=0o755 if masked_code(script) == script else 0o700)
    if not submit:
        print(f"{path} is written. Next: the same command with --submit, or sbatch {shlex.quote(str(path))}")
        return
    jobs: list[str] = []
    for _ in range(job.chain):
        after = [f"--dependency=afterany:{one}" for one in jobs[-1:]]  # by id: other runs' jobs may have the same name
        done = subprocess.run(["sbatch", "--parsable", *after, str(path)], capture_output=True, text=True)
        if done.returncode:
            earlier = f"; already submitted: {', '.join(jobs)}; to cancel: scancel {' '.join(jobs)}" if jobs else ""
            raise FailedError(f"sbatch: {' '.join(done.stderr.split())}{earlier}")
        jobs.append(done.stdout.strip().partition(";")[0])
    print(f"submitted {'job' if len(jobs) == 1 else 'jobs'} {', '.join(jobs)}: {path}")
    print(f"  follow: tail -F {shlex.quote(str(directory))}/{jobs[0]}.out")
    if job.is_run:
        stop = directory.parent / "stop"
        print(f"  save and stop: touch {shlex.quote(str(stop))}, or scancel --batch --signal=TERM {jobs[0]}")
    else:
        print(f"  stop: scancel {jobs[0]}")
    print(f"  resume: sbatch {shlex.quote(str(path))}")


def _checked(job: Job, dry_run: bool, submit: bool) -> tuple[str, Path]:
    """Checks the job; returns its name and the directory of its script and output.

    If corpora don't exist yet, what depends on them is checked only for `submit`: they may be built before.
    """
    head, most = job.head, job.cluster.gpus_per_node
    if most and head.per_node > most:
        raise UserError(f"--gpus-per-node: {head.per_node}, but a node of this cluster has {most} (gpus_per_node)")
    if job.time and not _TIME.fullmatch(job.time):
        raise UserError(f"--time: {job.time!r}; {_TIME_EXPECTED}")
    if head.min_nodes and head.min_nodes > job.nodes:
        raise UserError(f"--min-nodes: {head.min_nodes} is more than --nodes {job.nodes}")
    if job.is_run:
        config = load(job.path, job.overrides, RunConfig)
        ranks, folder = job.nodes * head.per_node, job.path.parent
        if submit or not unchecked(config, ranks, folder):
            preflight(config, ranks, may_train=dry_run, here=False, folder=folder)
        return config.run.name, Path(config.run.directory).absolute() / "slurm"
    corpus = load(job.path, job.overrides, CorpusConfig)
    return corpus.name, Path(f"{Path(corpus.name if '://' in corpus.output else corpus.output).absolute()}.slurm")


def batch_script(job: Job, name: str, directory: Path) -> str:
    """The batch script. A name or path with any characters is one word for SLURM and for the shell."""
    head, cluster, plain = job.head, job.cluster, re.sub(r"[^\w.-]+", "-", name).strip("-") or "run"
    on_gpus = job.is_run and cluster.device == "gpu"
    options: list[tuple[str, str | int | None]] = [
        ("job-name", plain),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", head.per_node if on_gpus and not cluster.gres else None),
        ("gres", cluster.gres if on_gpus else None),
        *((name.replace("_", "-"), getattr(cluster, name)) for name in _KEYS),
        ("time", job.time or cluster.time),
        ("output", f"{str(directory).replace('%', '%%')}/%j.out"),
        ("open-mode", "append"),
        ("signal", f"B:USR1@{job.warn_seconds}"),
    ]
    flags = ["--exclusive"] if cluster.exclusive else []
    flags += ["--requeue" if head.requeue else "--no-requeue", *(["--no-kill"] if head.min_nodes else [])]
    lines = [f"--{key}={_directive(str(value), key)}" for key, value in options if value is not None]
    lines += [*flags, *(_directive(option, "sbatch") for option in cluster.sbatch)]
    script = ["#!/bin/bash", "# Written by `launch slurm`.", *(f"#SBATCH {line}" for line in lines), ""]
    script += [f"module load {shlex.join(cluster.modules)}"] if cluster.modules else []
    variables = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}  # where this code is found
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if cluster.device == "cpu" else {}
    variables |= {rank_environment.COMMAND: shlex.join(["sbatch", str(directory / SCRIPT)])} if job.is_run else {}
    script += [f"export {key}={shlex.quote(value)}" for key, value in (variables | cluster.variables).items()]
    script += [*cluster.setup, f"cd {shlex.quote(str(Path.cwd()))}", ""]
    content = merged(job.path, job.overrides, RunConfig if job.is_run else CorpusConfig)
    launch, place = shlex.join(LAUNCH), shlex.quote(str(directory))
    shown = _CONTROL.sub("?", str(job.path))
    script += [_PROLOGUE.format(launch=launch, path=shown, directory=place, content=content)]
    # exec: SLURM sends USR1 to the batch shell before the time is over, and the head must get it
    return "\n".join([*script, f'exec {launch} head {shlex.quote(head.as_json)} "$copy"', ""])


def _directive(text: str, key: str) -> str:
    """`text` as one word of an #SBATCH line, which may have quotes and backslashes, but no end of line."""
    if _CONTROL.search(text):
        raise UserError(f"{key}: {text!r}: SLURM takes no control characters here, such as an end of line")
    if _SAFE.fullmatch(text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
