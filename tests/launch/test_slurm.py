"""Runs and a build under a real SLURM of two nodes: signals, requeueing, lost nodes, time limits."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrain.metrics.log import read_metrics
from pretrain.run import slurm
from tests.conftest import run, write_c4, write_corpus_file
from tests.launch import slurm_cluster
from tests.launch.slurm_cluster import Cluster
from tests.pretrain.runs import losses, run_file, train_ranks

STEPS = 150
pytestmark = pytest.mark.skipif(slurm_cluster.lacking() is not None, reason=str(slurm_cluster.lacking()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
            yield cluster
    finally:
        cluster.stop()


def settings(folder: Path, steps: int = STEPS) -> dict[str, object]:
    return {"name": "test", "directory": str(folder / "run"), "max_steps": steps, "cpu_threads": 1}


def a_run(folder: Path, corpus: Path, steps: int = STEPS) -> Path:
    return run_file(folder, corpus, run=settings(folder, steps), evaluation=[])


def submitted(path: Path, *options: str, **cluster: object) -> list[str]:
    """The ids of the jobs."""
    on_cpu = path.with_name("cluster.yaml")
    on_cpu.write_text(json.dumps({"device": "cpu", **cluster}))
    done = run("launch", "slurm", path, "--nodes", "2", "--cluster", on_cpu, "--submit", *options)
    assert done.returncode == 0, done.stderr
    first, *_ = done.stdout.splitlines()
    return first.partition(":")[0].removeprefix("submitted jobs ").removeprefix("submitted job ").split(", ")


def until(true: Callable[[], bool], seconds: float = 600) -> None:
    patience = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < patience
        time.sleep(0.1)


def until_steps(cluster: Cluster, job: str, folder: Path, attempt: int) -> None:
    """Until an attempt of a job has made two steps."""

    def made() -> int:
        return sum(row.attempt == attempt and "train/loss" in row.metrics for row in read_metrics(folder / "run"))

    while made() < 2:
        assert cluster.state(job) not in ("FAILED", "COMPLETED", "CANCELLED"), said(folder, job)
        time.sleep(0.2)


def status(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run/status.json").read_text())


def said(folder: Path, job: str) -> str:
    return (folder / f"run/slurm/{job}.out").read_text()


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory) -> dict[int, float]:
    """The losses of the same run on two ranks without SLURM."""
    path = a_run(tmp_path_factory.mktemp("undisturbed"), small_corpus)
    assert train_ranks(path, 2) == [0, 0]
    return losses(path)


def test_a_job_goes_on_by_itself_after_its_warning_and_after_a_lost_node(cluster, small_corpus, undisturbed, tmp_path):
    """Under the deepspeed launcher. It ends with the losses of the undisturbed run, to the bit."""
    path = a_run(tmp_path, small_corpus)
    (job,) = submitted(path, "--requeue")
    until_steps(cluster, job, tmp_path, attempt=1)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the time is over
    until_steps(cluster, job, tmp_path, attempt=2)
    assert "SIGUSR1: saving and stopping" in said(tmp_path, job)
    cluster.kill_node("n2")
    killed = time.monotonic()
    until(lambda: "node n2 is lost: " in said(tmp_path, job), seconds=60)
    named = time.monotonic() - killed
    cluster.start_node("n2")
    until_steps(cluster, job, tmp_path, attempt=3)
    print(f"a killed node: named after {named:.1f} s, the next step after {time.monotonic() - killed:.1f} s")
    cluster.until(job, "COMPLETED", seconds=600)
    assert losses(path) == undisturbed
    assert status(tmp_path)["state"] == "finished"
    logs = tmp_path / "run/logs/attempt-0003"
    assert {file.name: file.read_text() for file in logs.glob("*.exit")} == {
        "rank-00000.exit": "0\n",
        "rank-00001.exit": "0\n",
    }
    print(*cluster.records(job), sep="\n")


def test_a_job_goes_on_at_once_on_the_nodes_that_are_left(cluster, small_corpus, undisturbed, tmp_path):
    """SLURM still waits for the step of the first attempt then, since a node of it doesn't answer."""
    path = a_run(tmp_path, small_corpus)
    (job,) = submitted(path, "--min-nodes", "1")
    until_steps(cluster, job, tmp_path, attempt=1)
    cluster.kill_node("n2")
    cluster.until(job, "COMPLETED", seconds=600)
    assert "going on with 1 node (n1), 1 rank" in said(tmp_path, job)
    # one rank adds gradients in another order than two, and 150 steps amplify that; other rows differ by percents
    assert losses(path) == {step: pytest.approx(loss, rel=1e-3) for step, loss in undisturbed.items()}
    cluster.start_node("n2")
    cluster.until_nodes_are("idle")


def test_a_chain_finishes_whatever_ends_its_jobs(cluster, small_corpus, undisturbed, tmp_path):
    """Ranks started by srun, which read staged corpora. The first job meets its time limit, the second is cancelled."""
    path = a_run(tmp_path, small_corpus, steps=1_000_000)
    options = ("--mode", "srun", "--chain", "3", "--time", "60", "--warn-seconds", "90")
    limited, cancelled, last = submitted(path, *options, stage=str(tmp_path / "local"))
    until_steps(cluster, limited, tmp_path, attempt=1)
    cluster.run("scontrol", "hold", last)
    elapsed = int(cluster.run("squeue", "-h", "-j", limited, "-o", "%M").split(":")[-2])
    cluster.run("scontrol", "update", f"JobId={limited}", f"TimeLimit={elapsed + 2}")
    cluster.until(limited, "FAILED")  # exit code 75
    assert "SIGUSR1: saving and stopping" in said(tmp_path, limited)
    until_steps(cluster, cancelled, tmp_path, attempt=2)
    cluster.run("scancel", cancelled)
    cluster.until(cancelled, "CANCELLED")
    assert status(tmp_path)["state"] == "stopped"
    step = status(tmp_path)["step"]
    assert isinstance(step, int)
    a_run(tmp_path, small_corpus, steps=step + 2)
    cluster.run("scontrol", "release", last)
    cluster.until(last, "COMPLETED")
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", step + 2)
    used = (tmp_path / "run/config.yaml").read_text()
    assert f"corpus: {tmp_path}/local/" in used
    assert str(small_corpus) not in used
    print(*cluster.records(limited), *cluster.records(cancelled), *cluster.records(last), sep="\n")


def inside(when: str, script: str) -> list[str]:
    """A container that runs `script` before commands that contain the word `when`."""
    return ["sh", "-c", f'case " $* " in *" {when} "*) {script};; esac; exec "$@"', "container"]


def test_a_job_goes_back_into_the_queue_if_its_warning_comes_before_the_ranks(cluster, small_corpus, tmp_path):
    """While the nodes copy corpora: the first time, that takes as long as the test."""
    path, copying = a_run(tmp_path, small_corpus, steps=2), tmp_path / "copying"
    slow = inside("stage", f"[ -e {copying} ] || {{ touch {copying}; exec sleep 3600; }}")
    (job,) = submitted(path, "--requeue", stage=str(tmp_path / "local"), container=slow)
    until(copying.exists)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: f"requeueing job {job}" in said(tmp_path, job), seconds=60)
    cluster.until(job, "COMPLETED", "FAILED", "CANCELLED")
    assert status(tmp_path) == {"state": "finished", "attempt": 1, "step": 2, "stop_file": False}
    assert "nothing was saved, and the same command starts the run again" in said(tmp_path, job)


def test_a_job_ends_with_the_doctors_findings(cluster, small_corpus, tmp_path):
    path = a_run(tmp_path, small_corpus)
    (job,) = submitted(path, "--doctor", container=inside("doctor-node", "echo no such image >&2; exit 3"))
    assert cluster.until(job, "FAILED", "COMPLETED") == "FAILED"
    assert "fault    node on n1, n2: srun: ended with exit code 3: " in said(tmp_path, job)
    assert "2 faults would stop a run" in said(tmp_path, job)
    assert not (tmp_path / "run/logs").exists()


RANKS = """
from os import environ
from pretrain.run.slurm import rank_environment
print(*(f"{name}={value}" for name, value in sorted(rank_environment(environ).items())))
"""


def test_tasks_of_srun_become_ranks(cluster):
    told = cluster.run("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-c", RANKS).splitlines()
    port = told[0].split("MASTER_PORT=")[1].split()[0]
    assert sorted(told) == [
        f"LOCAL_RANK={local} LOCAL_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} RANK={rank} WORLD_SIZE=4"
        for local, rank in ((0, 0), (0, 2), (1, 1), (1, 3))
    ]


def test_a_build_on_two_nodes_gives_the_same_bytes(cluster, small_corpus, tmp_path):
    for part in range(3):
        write_c4(tmp_path / f"c4-{part}.json.gz", records=60, skip=60 * part)
    (job,) = submitted(write_corpus_file(tmp_path / "corpus.yaml"))
    ended = cluster.until(job, "COMPLETED", "FAILED", "CANCELLED")
    output = (tmp_path / f"corpus.slurm/{job}.out").read_text()
    assert ended == "COMPLETED", output
    shards = "shards/train/shard-00000.tar"
    assert (tmp_path / "corpus" / shards).read_bytes() == (small_corpus / shards).read_bytes()
    ours = subprocess.run(["pgrep", "-f", f"raylet.*:{slurm.master_port(job)}"], capture_output=True, text=True).stdout
    assert ours == ""


STRANGE = "a 'b' \"c\"; touch $(touch {folder}/run) `touch {folder}/run` \\ #%j"


def test_names_and_paths_are_one_word_to_slurm_and_to_the_shell(cluster, small_corpus, tmp_path):
    """The head prints its arguments instead of training: a program of the same name is first on its path."""
    folder = tmp_path / 'it\'s a "path"; $(x) %j #y'
    path = a_run(folder, small_corpus)
    name = STRANGE.format(folder=tmp_path) + "\ntouch " + str(tmp_path / "run")
    done = run("launch", "slurm", path, f"run.name={json.dumps(name)}", "--dry-run")
    assert done.returncode == 0, done.stderr
    script = done.stdout.replace("exec ", 'exec printf "%s\\n" ')
    (folder / "run/slurm").mkdir(parents=True)
    (tmp_path / "script").write_text(script.replace("#SBATCH --gpus-per-node=1\n", ""))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script")
    cluster.until(job, "COMPLETED")
    words = said(folder, job).splitlines()
    assert str(path) in words
    assert f"run.name={json.dumps(name)}" in words
    assert not (tmp_path / "run").exists()
