"""A SLURM of two nodes on this machine: munge, one controller and two node daemons in a directory of its own; its jobs.

It needs root and Debian's packages slurm-wlm and munge, and has a key, ports and state of its own, whatever SLURM is
there already.
"""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from pretrain.run.metrics_file import read_metrics
from tests.support.in_process import done_here
from tests.support.ports import free_port
from tests.support.processes import processes_with

NODES = ("n1", "n2")
_CORES = 2  # of each node; SLURM is to believe it
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
FirstJobId={first_job}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
SlurmdTimeout=120
MessageTimeout=100
TCPTimeout=60
KillWait=300
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PropagateResourceLimits=NONE
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} Boards=1 SocketsPerBoard=1 "
    f"CoresPerSocket={_CORES} ThreadsPerCore=1 State=UNKNOWN\n"
)


class Cluster:
    """Two nodes; all commands find them through `environment`. `host`: a command that starts each node's daemon."""

    def __init__(self, folder: Path, host: Sequence[str] = ()):
        self.folder, self._host = folder, host
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        names = {"folder": folder, "host": socket.gethostname()}
        (folder / "state").mkdir()
        # the ports of a job's ranks and of its Ray follow from its number; other tests may have a cluster of their own
        first_job = random.SystemRandom().randrange(10_000, 10_000_000)
        configuration = _CONFIGURATION.format(controller_port=free_port(), first_job=first_job, **names)
        for name in NODES:
            configuration += _NODE.format(name=name, port=free_port(), **names)
        configuration += f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(configuration)

    def start(self) -> None:
        key, socket_ = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        of_files = {"key-file": key, "socket": socket_, "pid-file": f"{key}.pid", "seed-file": f"{key}.seed"}
        self._start(
            "munged", "munged", "--foreground", "--force", *(f"--{one}={file}" for one, file in of_files.items())
        )
        _until(socket_.exists, "munged's socket")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        _until(lambda: self.run("sinfo", "-h", "-o", "%t", check=False).split() == ["idle"], "nodes to be idle")

    def start_node(self, node: str) -> None:
        self._start(f"slurmd of {node}", *self._host, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kills the node's daemon and all that runs there, as a machine's death does."""
        daemon = self._daemons.pop(f"slurmd of {node}")
        daemon.kill()
        daemon.wait()
        sockets = (self.folder / f"spool-{node}").glob(f"{node}_*")  # NODE_JOB.STEP
        steppers = {f"slurmstepd: [{path.name.removeprefix(f'{node}_')}]" for path in sockets}
        found = [one for one in psutil.process_iter(["cmdline"]) if " ".join(one.info["cmdline"] or ()) in steppers]
        _kill(*self._processes(SLURMD_NODENAME=node), *found)

    def raylets(self, node: str) -> list[psutil.Process]:
        """The processes on a node that run Ray's program `raylet`."""
        return [process for process in self._processes(SLURMD_NODENAME=node) if process.name() == "raylet"]

    @contextlib.contextmanager
    def suspended_ranks(self) -> Iterator[None]:
        """Within the block, the ranks of all jobs take no CPU time."""
        ranks = [process for process in self._processes() if {"pretrain", "train"} <= {*process.cmdline()}]
        for process in ranks:
            process.suspend()
        try:
            yield
        finally:
            for process in ranks:
                process.resume()

    def run(self, *command: str | Path, check: bool = True) -> str:
        """What one of SLURM's commands says."""
        done = subprocess.run([*map(str, command)], env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: int | str) -> str:
        """PENDING, RUNNING, COMPLETED, …"""
        (state,) = re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", str(job)))
        return state

    def until(self, job: int | str, *states: str, seconds: float = 600) -> str:
        _until(lambda: self.state(job) in states, f"job {job} to be {'/'.join(states)}", seconds)
        return self.state(job)

    def start_again(self, job: int | str, times: int) -> None:
        """Has a job that was requeued so many times start in 2 s. Else SLURM waits for `cred_expire`."""

        def requeued() -> bool:
            shown = self.run("scontrol", "show", "job", str(job))
            return f" Restarts={times} " in shown and "JobState=COMPLETING" not in shown

        _until(requeued, f"requeue {times} of job {job}", 600)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2", check=False)  # refused if it has started

    def until_over(self, job: int | str) -> None:
        """Until nothing of a job runs any more: a job is CANCELLED at once, and its ranks may still save."""
        _until(lambda: str(job) not in self.run("squeue", "-h", "-o", "%i").split(), f"job {job} to be over", 600)

    def stop(self) -> None:
        _kill(*self._processes())
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _processes(self, **variables: str) -> list[psutil.Process]:
        return processes_with(SLURM_CONF=self.environment["SLURM_CONF"], **variables)

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name.replace(' ', '-')}.out").open("w")
        self._daemons[name] = subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )


def _until(true: Callable[[], bool], what: str, seconds: float = 120) -> None:
    patience = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < patience, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def _kill(*processes: psutil.Process) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# Runs and builds as jobs


def submitted(path: Path, *options: str, **cluster: object) -> list[str]:
    """The ids of the jobs."""
    on_cpu = path.with_name("cluster.yaml")
    on_cpu.write_text(json.dumps({"device": "cpu", **cluster}))
    printed = done_here("launch", "slurm", path, "--nodes", "2", "--cluster", on_cpu, "--submit", *options)
    first, *_ = printed.splitlines()
    return first.partition(":")[0].removeprefix("submitted jobs ").removeprefix("submitted job ").split(", ")


def until(true: Callable[[], bool], cluster: Cluster, job: str, folder: Path) -> None:
    """Until something is true, which is to happen while a job runs."""
    while not true():
        if cluster.state(job) in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"):
            assert true(), said(folder, job)
            return
        time.sleep(0.1)


def until_steps(cluster: Cluster, job: str, folder: Path, attempt: int) -> None:
    """Until an attempt of a job has made two steps."""

    def made() -> bool:
        rows = read_metrics(folder / "run")
        return sum(row.attempt == attempt and "train/loss" in row.metrics for row in rows) >= 2

    until(made, cluster, job, folder)


def said(folder: Path, job: str) -> str:
    output = folder / f"run/slurm/{job}.out"
    return output.read_text() if output.exists() else ""
