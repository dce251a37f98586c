"""Jobs of a real SLURM of two nodes: their script, the doctor, ranks of srun, a build, and a run that loses a node."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.base.config_file import load
from launch.tools.doctor.checks import Finding
from pretrain.config import RunConfig
from pretrain.run import slurm, status
from tests.conftest import write_c4, write_corpus_file
from tests.launch.conftest import a_run, takes_slurm
from tests.support.builds import with_fault
from tests.support.in_process import done_here
from tests.support.runs import losses
from tests.support.slurm_cluster import NODES, said, submitted, until
from tests.support.steps import Planned, environment

pytestmark = takes_slurm


def test_a_job_ends_with_the_doctors_findings(cluster, small_corpus, tmp_path):
    path = a_run(tmp_path, small_corpus)
    no_agents = 'case " $* " in *" agent "*) echo no such image >&2; exit 3;; esac; exec "$@"'
    (job,) = submitted(path, "--doctor", container=["sh", "-c", no_agents, "container"])
    assert cluster.until(job, "FAILED", "COMPLETED") == "FAILED"
    for node in NODES:
        assert f"error    node on {node}: srun ended with exit code 3: " in said(tmp_path, job)
    assert "2 errors would stop a run" in said(tmp_path, job)
    assert not (tmp_path / "run/logs").exists()


STRANGE = "a 'b' \"c\"; touch $(touch {folder}/run) `touch {folder}/run` \\ #%j"


def test_names_and_paths_are_one_word_to_slurm_and_to_the_shell(cluster, small_corpus, tmp_path):
    """The script's last line prints the head's arguments instead of starting it."""
    folder = tmp_path / 'it\'s a "path"; $(x) %j #y'
    path = a_run(folder, small_corpus)
    name = STRANGE.format(folder=tmp_path) + "\ntouch " + str(tmp_path / "run")
    site = {"environment": {"STRANGE": name}, "modules": ["cuda/12"], "container": ["in it", "run"]}
    (tmp_path / "cluster.yaml").write_text(json.dumps(site))
    options = ("--cluster", tmp_path / "cluster.yaml", "--dry-run")
    printed = done_here("launch", "slurm", path, f"run.name={json.dumps(name)}", *options)
    script = printed.replace("module load", ": module load").replace("exec ", 'exec printf "%s\\n" "$STRANGE" ')
    (folder / "run/slurm").mkdir(parents=True)
    (tmp_path / "script").write_text(script.replace("#SBATCH --gpus-per-node=1\n", ""))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script")
    cluster.until(job, "COMPLETED")
    _, _, shown = said(folder, job).split("\n", 2)  # the job and the version come first
    assert shown.startswith(f"{name}\n")
    *_, command, head, copy = shown.splitlines()
    assert (command, json.loads(head)["container"]) == ("head", ["in it", "run"])
    assert copy == f"{folder}/run/slurm/{job}.yaml"
    assert load(copy, [], RunConfig).run.name == name
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_in_an_allocation_of_slurm_every_node_is_checked(cluster):
    """`test_a_job_ends_with_the_doctors_findings` checks nodes through srun, `test_hosts` has hosts reduce together."""
    allocation = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--quiet"]
    doctor = [Path(sys.executable).with_name("launch"), "doctor", "--json"]
    findings = [Finding(**one) for one in json.loads(cluster.run(*allocation, *doctor))]
    everywhere = {(check, node) for check in ("versions", "GPUs", "shared memory") for node in NODES}
    assert {(one.check, one.node) for one in findings} == {*everywhere, ("all-reduce", "")}
    assert findings[-1].found.startswith("2 ranks, ")


@pytest.mark.slow
def test_a_build_on_two_nodes_gives_the_same_bytes_though_ray_ends_on_each(
    cluster, small_corpus, tmp_path, monkeypatch
):
    """Its first unit waits until Ray has been killed on the second node, where it is started again, and then on the
    first, with which the job goes back into the queue."""
    for part in range(3):
        write_c4(tmp_path / f"c4-{part}.json.gz", records=60, skip=60 * part)
    held = tmp_path / "held"
    for name, value in with_fault("a lost node", "documents", "before the work", held).items():
        monkeypatch.setenv(name, value)
    (job,) = submitted(write_corpus_file(tmp_path / "corpus.yaml"), "--requeue")
    output = tmp_path / f"corpus.slurm/{job}.out"

    def wait(true: Callable[[], object]) -> None:
        while not true():
            assert cluster.state(job) not in ("FAILED", "COMPLETED", "CANCELLED"), output.read_text()
            time.sleep(0.1)

    for node, line in {"n2": "warning: node n2: ray: ended with ", "n1": f"requeueing job {job}"}.items():
        wait(lambda node=node: held.exists() and cluster.raylets(node))
        for raylet in cluster.raylets(node):
            raylet.kill()
        wait(lambda line=line: line in output.read_text())
    cluster.start_again(job, 1)
    ended = cluster.until(job, "COMPLETED", "FAILED", "CANCELLED")
    assert ended == "COMPLETED", output.read_text()
    shards = "shards/train/shard-00000.tar"
    assert (tmp_path / "corpus" / shards).read_bytes() == (small_corpus / shards).read_bytes()
    of_this_job = ["pgrep", "-f", f"raylet.*:{slurm.master_port(job)}"]
    while subprocess.run(of_this_job, stdout=subprocess.DEVNULL).returncode != 1:
        time.sleep(0.1)  # SLURM may say that a job has ended before it has ended the last of its processes


@pytest.mark.slow
def test_a_job_goes_on_by_itself_after_its_warning_and_after_a_lost_node(
    cluster, small_corpus, undisturbed, tmp_path, monkeypatch
):
    """It ends with the losses of the undisturbed run, to the bit."""
    first, second = tmp_path / "first", tmp_path / "second"
    planned = environment(Planned(0, 4, "hold", str(first)), Planned(0, 12, "hold", str(second), attempt=2))
    for name, value in planned.items():
        monkeypatch.setenv(name, value)
    path = a_run(tmp_path, small_corpus)
    (job,) = submitted(path, "--requeue")
    until(first.exists, cluster, job, tmp_path)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the time is over
    cluster.start_again(job, 1)
    until(second.exists, cluster, job, tmp_path)
    assert "SIGUSR1: saving and stopping" in said(tmp_path, job)
    cluster.kill_node("n2")
    until(lambda: "node n2 is lost: " in said(tmp_path, job), cluster, job, tmp_path)
    cluster.start_node("n2")
    cluster.start_again(job, 2)
    assert cluster.until(job, "COMPLETED", "FAILED") == "COMPLETED", said(tmp_path, job)
    assert losses(path) == undisturbed
    assert status.read(tmp_path / "run").state == "finished"
    assert [file.read_text() for file in (tmp_path / "run/logs/attempt-0003").glob("*.exit")] == ["0\n"] * 2


@pytest.mark.soak
def test_a_job_whose_ranks_deepspeeds_launcher_starts_has_the_same_losses(cluster, small_corpus, undisturbed, tmp_path):
    """It stops with exit code 75 on the way."""
    path = a_run(tmp_path, small_corpus)
    for options, state in ((["--stop-at-step", "20"], "FAILED"), ([], "COMPLETED")):
        (job,) = submitted(path, "--launcher", "deepspeed", *options, interface="lo")
        assert cluster.until(job, "COMPLETED", "FAILED") == state, said(tmp_path, job)
        if options:
            assert "ExitCode=75:0" in cluster.run("scontrol", "show", "job", job)
    assert losses(path) == undisturbed
    assert not (tmp_path / "run/logs").exists()
