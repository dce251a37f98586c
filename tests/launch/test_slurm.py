"""Runs under a real SLURM of two nodes that lose one of them: signals, requeueing, fewer nodes."""

import time

import pytest

from tests.launch import slurm_cluster
from tests.launch.conftest import a_run
from tests.launch.jobs import said, status, submitted, until, until_steps
from tests.pretrain.runs import losses

pytestmark = pytest.mark.skipif(slurm_cluster.lacking() is not None, reason=str(slurm_cluster.lacking()))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_job_goes_on_at_once_on_the_nodes_that_are_left(cluster, small_corpus, undisturbed, tmp_path):
    """SLURM still waits for the step of the first attempt then, since a node of it doesn't answer."""
    path = a_run(tmp_path, small_corpus)
    (job,) = submitted(path, "--min-nodes", "1")
    until_steps(cluster, job, tmp_path, attempt=1)
    cluster.kill_node("n2")
    until(lambda: status(tmp_path)["state"] == "finished")
    assert "going on with 1 node (n1), 1 rank" in said(tmp_path, job)
    # one rank adds gradients in another order than two: 6e-7 after 150 steps; other rows differ by percents
    assert losses(path) == {step: pytest.approx(loss, rel=1e-5) for step, loss in undisturbed.items()}
    cluster.start_node("n2")
    cluster.until(job, "COMPLETED")
