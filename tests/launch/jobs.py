"""Runs and builds as jobs of SLURM: submits them, and waits for what they do."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.run.metrics_file import read_metrics
from tests.in_process import done_here
from tests.launch.slurm_cluster import Cluster


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


def status(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run/status.json").read_text())


def said(folder: Path, job: str) -> str:
    output = folder / f"run/slurm/{job}.out"
    return output.read_text() if output.exists() else ""


def inside(when: str, script: str) -> list[str]:
    """A container that runs `script` before commands that contain the word `when`."""
    return ["sh", "-c", f'case " $* " in *" {when} "*) {script};; esac; exec "$@"', "container"]
