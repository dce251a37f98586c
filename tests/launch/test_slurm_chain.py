"""Runs under a real SLURM of two nodes that outlast their jobs: time limits, cancelled jobs, early warnings."""

import pytest

from tests.launch import slurm_cluster
from tests.launch.conftest import a_run
from tests.launch.jobs import inside, said, status, submitted, until, until_steps

pytestmark = pytest.mark.skipif(slurm_cluster.lacking() is not None, reason=str(slurm_cluster.lacking()))


@pytest.mark.slow
def test_a_chain_finishes_whatever_ends_its_jobs(cluster, small_corpus, undisturbed, tmp_path):
    """Ranks started by srun, which read staged corpora. The first job meets its time limit, the second is cancelled."""
    path = a_run(tmp_path, small_corpus, steps=1_000_000)
    options = ("--mode", "srun", "--chain", "3", "--time", "60", "--warn-seconds", "120")
    limited, cancelled, last = submitted(path, *options, stage=str(tmp_path / "local"))
    until_steps(cluster, limited, tmp_path, attempt=1)
    cluster.run("scontrol", "hold", last)
    elapsed = int(cluster.run("squeue", "-h", "-j", limited, "-o", "%M").split(":")[-2])
    with cluster.suspended_ranks():  # SLURM looks at times every 30 s
        cluster.run("scontrol", "update", f"JobId={limited}", f"TimeLimit={elapsed + 2}")
        until(lambda: "SIGUSR1: saving and stopping" in said(tmp_path, limited), seconds=60)
    cluster.until(limited, "FAILED")  # exit code 75
    until_steps(cluster, cancelled, tmp_path, attempt=2)
    cluster.run("scancel", cancelled)
    cluster.until(cancelled, "CANCELLED")  # said at once, while the ranks still save
    until(lambda: status(tmp_path)["state"] == "stopped")
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


@pytest.mark.slow
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
