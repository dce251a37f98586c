"""What `launch slurm` writes and refuses, on machines without SLURM too."""

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.base import packages
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import duration
from launch import slurm_head
from launch.slurm import ClusterConfig, Job, batch_script
from launch.slurm_head import HeadJob
from launch.tools.forecast import seconds_of
from pretrain.config import RunConfig
from pretrain.device_speed import GPUS
from pretrain.run import status
from pretrain.run.slurm import cpus_per_node, rank_environment, tasks_per_node
from pretrain.tools.plan import Plan, resolve_rows
from tests.support.in_process import done_here, refused_here, run_here
from tests.support.runs import run_file
from tests.support.tables import each

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"


def job(path: Path, cluster: ClusterConfig | None = None, overrides: tuple[str, ...] = (), **of_head: Any) -> Job:
    head = HeadJob(per_node=8, **of_head)
    return Job(path, [*overrides], True, head, nodes=4, cluster=cluster or ClusterConfig())


def options(script: str) -> set[str]:
    """Those that sbatch heeds, which are above the first command."""
    above = itertools.takewhile(lambda line: line.startswith("#"), script.splitlines())
    return {line.removeprefix("#SBATCH ") for line in above if line.startswith("#SBATCH ")}


def test_the_script_can_be_seen_while_the_run_trains(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus)
    (tmp_path / "run").mkdir()
    with status.lock(tmp_path / "run"):
        seen, written = (run_here("launch", "slurm", path, *option) for option in (["--dry-run"], []))
    assert (seen.returncode, seen.stdout.splitlines()[0]) == (0, "#!/bin/bash")
    assert (written.returncode, "is already training here" in written.stderr) == (2, True)
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["lock"]


def test_the_script_says_what_slurm_is_to_know(small_corpus, tmp_path):
    path = run_file(tmp_path, small_corpus)
    cluster = ClusterConfig(partition="gpu", time="2:00:00", sbatch=["--mem=0"])
    asked = job(path, cluster, requeue=True)
    assert options(batch_script(asked, "t5", tmp_path / "slurm")) == {
        "--job-name=t5",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--time=2:00:00",
        f"--output={tmp_path}/slurm/%j.out",
        "--open-mode=append",
        "--signal=B:USR1@300",
        "--exclusive",
        "--requeue",
        "--mem=0",
    }
    others = options(batch_script(job(path, min_nodes=2), "t5", tmp_path / "slurm"))
    assert {"--nodes=4", "--no-kill", "--no-requeue"} <= others
    shared = ClusterConfig(
        exclusive=False, gres="gpu:a100:4", mem="200G", cpus_per_task=32, constraint="a100&ib", mail_type="END,FAIL"
    )
    found = options(batch_script(job(path, shared), "t5", tmp_path / "slurm"))
    asked_for = {"--gres=gpu:a100:4", "--mem=200G", "--cpus-per-task=32", '--constraint="a100&ib"'}
    assert {*asked_for, "--mail-type=END,FAIL"} <= found
    assert not [one for one in found if one.startswith(("--exclusive", "--gpus-per-node"))]


def test_a_partition_and_an_account_of_the_command_go_before_the_cluster_files(small_corpus, tmp_path):
    path, cluster = run_file(tmp_path, small_corpus), tmp_path / "cluster.yaml"
    cluster.write_text("{partition: gpu, account: lab, qos: long}")
    one = ("launch", "slurm", path, "--dry-run", "--cluster", cluster)
    asked = options(done_here(*one, "--partition", "debug"))
    assert {"--partition=debug", "--account=lab", "--qos=long"} <= asked
    assert "--account=other lab".replace(" ", "-") in options(done_here(*one, "--account", "other-lab"))


@each(
    "expected_hours, time, said",
    [
        (1.5, "2:00:00", "forecast: 1 h 30 min (run.expected_hours); the job's time limit is 2:00:00"),
        (1.5, "0", "forecast: 1 h 30 min (run.expected_hours); the job's time limit is 0"),
        (1.5, None, "forecast: 1 h 30 min (run.expected_hours); the job's time limit is the partition's"),
        (
            50,
            "1-00",
            "forecast: 2.1 days (run.expected_hours); the job's time limit is 1-00, so that it takes 3 jobs: give "
            "--requeue, or --chain 3",
        ),
        (None, "2:00:00", None),  # no GPU is named
    ],
)
def test_the_forecast_of_a_run_is_beside_the_jobs_limit(small_corpus, tmp_path, expected_hours, time, said):
    path = run_file(tmp_path, small_corpus, run={"expected_hours": expected_hours})
    printed = done_here("launch", "slurm", path, *(["--time", time] if time else [])).splitlines()
    assert printed[:-1] == ([said] if said else [])


def test_the_forecast_for_the_clusters_gpu_is_the_plans(small_corpus, tmp_path):
    path, cluster = run_file(tmp_path, small_corpus), tmp_path / "cluster.yaml"
    cluster.write_text("{gpu: h100-sxm, time: '60'}")
    config, row, _ = resolve_rows(load(path, [], RunConfig), path)
    hours = Plan(config, row, "h100-sxm", GPUS["h100-sxm"], 1, 0.31, 0.0).own.hours
    line = done_here("launch", "slurm", path, "--cluster", cluster).splitlines()[0]
    assert line == f"forecast: {duration(3600 * hours)} (1 × h100-sxm at 31% MFU); the job's time limit is 60"
    cluster.write_text("{gpu: h100}")
    assert "gpu: expected one of a100-40gb, " in refused_here(2, "launch", "slurm", path, "--cluster", cluster)
    cluster.write_text("{time: 12h}")
    refused = refused_here(2, "launch", "slurm", path, "--cluster", cluster)
    assert "time: expected days-hours:minutes:seconds, hours:minutes:seconds or minutes, got '12h'" in refused


@each(
    "limit, seconds",
    [
        *(("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("1-12", 129_600), ("1-12:30", 131_400)),
        *(("2-00:00:05", 172_805), *((unlimited, float("inf")) for unlimited in ("UNLIMITED", "0", "0:00"))),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(limit, seconds):
    """man sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, and with seconds.

    Zero is no limit.
    """
    assert seconds_of(limit) == seconds


def begun(script: str, folder: Path) -> list[str]:
    """What a job of `script` prints before it becomes the head of the run."""
    before, _, _ = script.partition("exec ")
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]"}
    done = subprocess.run(
        ["bash", "-c", before], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_a_jobs_log_begins_with_its_nodes_and_the_version(small_corpus, tmp_path):
    script = batch_script(job(run_file(tmp_path, small_corpus)), "t5", tmp_path)
    first, second = begun(script, tmp_path)
    assert re.fullmatch(r"job 7, start 0, \d{4}-\S+, nodes node\[1-4\]", first), first
    assert second.startswith(f"{packages.PACKAGE} {packages.package_version()}")
    assert packages.code_version() in second


def test_a_job_trains_by_the_run_file_as_it_was_when_it_was_submitted(small_corpus, tmp_path):
    """Whatever becomes of the run file, and of a file that it extends."""
    run_file(tmp_path / "base", small_corpus)
    path = tmp_path / "run.yaml"
    path.write_text("extends: base/run.yaml\nrun: {name: \"it's 'mine' $(x) END_OF_FILE\"}\n")
    asked = job(path, overrides=("run.max_steps=77", "data.train.0.weight=2"))
    before, script = load(path, asked.overrides, RunConfig), batch_script(asked, "t5", tmp_path)
    path.write_text("run: {max_steps: 1}\n")
    (tmp_path / "base/run.yaml").unlink()
    begun(script, tmp_path)
    assert load(tmp_path / "7.yaml", [], RunConfig) == before
    assert (tmp_path / "7.yaml").stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.glob("7*")] == ["7.yaml"]


def test_the_heads_command_says_what_the_job_is(small_corpus, tmp_path):
    cluster = ClusterConfig(srun=["--mpi=pmix"], container=["apptainer", "exec", "my image.sif"])
    path = run_file(tmp_path, small_corpus)
    asked = job(path, cluster, requeue=True, min_nodes=3, srun=cluster.srun, container=cluster.container)
    _, _, command = batch_script(asked, "t5", tmp_path).partition("\nexec ")
    *launch, told, copy = shlex.split(command)
    assert (launch[-4:], copy) == (["-P", "-m", "launch", "head"], "$copy")
    assert json.loads(told) == {
        **{"per_node": 8, "min_nodes": 3, "requeue": True, "srun": ["--mpi=pmix"], "launcher": "agent"},
        "container": ["apptainer", "exec", "my image.sif"],
    }


SCONTROL = """#!/bin/sh
case $2 in hostnames) echo n1; echo n2 ;; *) echo NodeAddr=10.0.0.1 ;; esac
"""
SRUN = """#!/bin/sh
echo "$@" > {folder}/asked
kill -USR1 $PPID
until [ -e {folder}/run/stop ]; do sleep 0.05; done
exit 75
"""

SAVES = """#!/bin/sh
echo '{{"state": "stopped", "attempt": 1, "step": 3, "stop_file": {by_file}}}' > {folder}/run/status.json
exit 75
"""


def in_allocation(folder: Path, patch: pytest.MonkeyPatch, srun: str) -> None:
    """A job of two nodes, with a script in place of srun: `test_slurm` has a real one."""
    for name, script in (("srun", srun), ("scontrol", SCONTROL)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    patch.setenv("PATH", str(folder), prepend=os.pathsep)
    patch.setenv("SLURM_JOB_ID", "4711")
    patch.setenv("SLURM_JOB_NODELIST", "n[1-2]")


def test_slurms_warning_stops_the_ranks_that_deepspeeds_launcher_has_started(small_corpus, tmp_path, monkeypatch):
    path = run_file(tmp_path, small_corpus)
    in_allocation(tmp_path, monkeypatch, SRUN.format(folder=tmp_path))
    assert slurm_head.head(path, HeadJob(per_node=2, launcher="deepspeed", container=["in-it"])) == 75
    assert path.with_suffix(".hosts").read_text() == "n1 slots=2\nn2 slots=2\n"
    asked = (tmp_path / "asked").read_text()
    once_a_node = "--ntasks-per-node=1 --ntasks=2 --overlap --cpu-bind=none in-it sh -c "
    meeting = "--no_ssh --master_addr=10.0.0.1 --master_port=24711 "
    assert [words in asked for words in (once_a_node, '--node_rank "$SLURM_NODEID"', meeting)] == [True] * 3
    assert asked.endswith(f" -u -m pretrain train {path}\n")


@each("by_file, requeued", [("false", True), ("true", False)])
def test_deepspeeds_launcher_stops_after_the_hours_of_the_run_and_the_job_is_requeued(
    small_corpus, tmp_path, monkeypatch, capfd, by_file, requeued
):
    """Not if the user has created RUN/stop."""
    path = run_file(tmp_path, small_corpus)
    (tmp_path / "run").mkdir()
    in_allocation(tmp_path, monkeypatch, SAVES.format(folder=tmp_path, by_file=by_file))
    monkeypatch.setattr(slurm_head, "_SECONDS_TO_BE_REQUEUED", 0.0)
    assert slurm_head.head(path, HeadJob(per_node=2, launcher="deepspeed", requeue=True)) == 75
    assert ("requeueing job 4711" in capfd.readouterr().err) == requeued


def test_a_warning_while_the_run_of_deepspeeds_launcher_is_checked_starts_nothing(
    small_corpus, tmp_path, monkeypatch, capfd
):
    """It would otherwise end the head, and SLURM wouldn't requeue the job."""
    path, checked = run_file(tmp_path, small_corpus), slurm_head.preflight

    def warned(*given: Any, **options: Any) -> object:
        os.kill(os.getpid(), signal.SIGUSR1)
        return checked(*given, **options)

    in_allocation(tmp_path, monkeypatch, f"#!/bin/sh\ntouch {tmp_path}/started\n")
    monkeypatch.setattr(slurm_head, "preflight", warned)
    monkeypatch.setattr(slurm_head, "_SECONDS_TO_BE_REQUEUED", 0.0)
    assert slurm_head.head(path, HeadJob(per_node=2, launcher="deepspeed", requeue=True)) == 75
    assert "stopped before this attempt started any rank" in (said := capfd.readouterr().err)
    assert "requeueing job 4711" in said
    assert not (tmp_path / "started").exists()


SBATCH = """#!/bin/sh
echo "$@" >> {folder}/asked
number=$(wc -l < {folder}/asked)
[ $number -le {most} ] || {{ echo 'sbatch: error: Job violates accounting policy' >&2; exit 1; }}
echo $number
"""


def with_sbatch(folder: Path, patch: pytest.MonkeyPatch, most: int) -> None:
    """A script in place of sbatch, which numbers the jobs and refuses those above `most`."""
    (folder / "bin").mkdir()
    (folder / "bin/sbatch").write_text(SBATCH.format(folder=folder, most=most))
    (folder / "bin/sbatch").chmod(0o755)
    patch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)


def test_a_chain_that_slurm_refuses_in_the_middle_names_the_jobs_that_wait(small_corpus, tmp_path, monkeypatch):
    with_sbatch(tmp_path, monkeypatch, most=2)
    options = ("--nodes", "2", "--gpus-per-node", "1", "--chain", "4", "--submit")
    done = run_here("launch", "slurm", run_file(tmp_path, small_corpus), *options)
    refused = "error: sbatch: sbatch: error: Job violates accounting policy"
    said = f"{refused}; already submitted: 1, 2; to cancel: scancel 1 2\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_chain_waits_for_its_own_jobs_alone(small_corpus, tmp_path, monkeypatch):
    """Another run may have the same name."""
    path = run_file(tmp_path, small_corpus)
    with_sbatch(tmp_path, monkeypatch, most=3)
    options = ("--nodes", "2", "--gpus-per-node", "1", "--chain", "3", "--submit")
    done = run_here("launch", "slurm", path, *options)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0,
        f"submitted jobs 1, 2, 3: {tmp_path}/run/slurm/job.sbatch",
    )
    waits = [line.partition(" ")[2].rpartition(" ")[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert waits == ["", "--dependency=afterany:1", "--dependency=afterany:2"]
    assert "dependency" not in (tmp_path / "run/slurm/job.sbatch").read_text()
    gone = run_here("launch", "slurm", path, "data.train.0.corpus=gone", "--submit")
    assert gone.returncode == 2
    assert re.fullmatch(r"error: gone/manifest.json: no such file; [^\n]+\n", gone.stderr)  # no warning before it


@each("login, mode", [("me:secret@", 0o700), ("", 0o755)])
def test_a_script_with_a_password_is_for_its_owner_alone(small_corpus, tmp_path, login, mode):
    path, override = run_file(tmp_path, small_corpus), f"tracking.mlflow.uri=http://{login}host"
    done_here("launch", "slurm", path, override, "--nodes", "2", "--gpus-per-node", "1")
    script = tmp_path / "run/slurm/job.sbatch"
    assert f"uri: {override.partition('=')[2]}\n" in script.read_text()
    assert script.stat().st_mode & 0o777 == mode


def test_a_path_that_slurm_cannot_take_is_refused(small_corpus, tmp_path):
    with pytest.raises(UserError, match=r"output: .* SLURM takes no control characters here"):
        batch_script(job(run_file(tmp_path, small_corpus)), "t5", tmp_path / "a\nb")


def test_the_shipped_cluster_files_are_valid_and_every_key_is_explained():
    for cluster in CLUSTERS.glob("*.yaml"):
        assert load(cluster, [], ClusterConfig)
    page = (CLUSTERS.parents[1] / "docs/reference/clusters.md").read_text()
    assert [key for key in ClusterConfig.model_fields if f"`{key}`" not in page] == []


def test_the_shipped_cluster_files_ask_for_all_memory_of_a_node(small_corpus, tmp_path):
    """An exclusive job gets all CPUs and GPUs of its nodes, but only as much memory as it asks for (man sbatch)."""
    path = run_file(tmp_path, small_corpus)
    for cluster in CLUSTERS.glob("*.yaml"):
        found = options(batch_script(job(path, load(cluster, [], ClusterConfig)), "t5", tmp_path / "slurm"))
        assert {"--exclusive", "--mem=0"} <= found, cluster


def test_what_cannot_work_is_refused_before_anything_is_written(small_corpus, tmp_path, monkeypatch):
    path, a100 = run_file(tmp_path, small_corpus), CLUSTERS / "a100-80gb.yaml"
    refused = {
        ("--gpus-per-node", "16"): "--gpus-per-node: 16, but a node of this cluster has 8 (gpus_per_node)",
        ("--nodes", "3"): "batch.global_batch_size: 16 rows can't be divided evenly among 24 ranks",
        ("--min-nodes", "3", "--nodes", "2"): "--min-nodes: 3 is more than --nodes 2",
        ("--dry-run", "--submit"): "--submit: not with --dry-run, which only prints the script",
        ("--time", "an hour"): (
            "--time: 'an hour'; expected days-hours:minutes:seconds, hours:minutes:seconds or minutes"
        ),
    }
    for arguments, reason in refused.items():
        done = run_here("launch", "slurm", path, "--cluster", a100, *arguments)
        assert (done.returncode, done.stderr) == (2, f"error: {reason}\n")
    done = run_here("launch", "slurm", "configs:corpora/quickstart.yaml", "--doctor")
    assert (done.returncode, done.stderr.startswith("error: --doctor: ")) == (2, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_here("launch", "slurm", path, "--submit")
    assert done.stderr.startswith("error: sbatch is not on the PATH; ")
    assert not (tmp_path / "run").exists()


TASK = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "MASTER_ADDR": "n1",
}


def test_each_node_has_the_cpus_that_slurm_gives_it():
    given = {"SLURM_CPUS_ON_NODE": "64", "SLURM_JOB_CPUS_PER_NODE": "64(x3),128(x2),8"}
    assert cpus_per_node(given) == [64, 64, 64, 128, 128, 8]
    assert cpus_per_node({}) == []


def test_a_task_of_srun_is_a_rank():
    assert rank_environment(TASK) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "23456",  # 20000 + 123456 mod 10000
    }
    assert tasks_per_node(TASK) == [2, 2, 1]


def test_a_task_needs_no_scontrol_if_the_masters_address_is_given(monkeypatch):
    """As in a container without SLURM's commands."""
    monkeypatch.setenv("PATH", "")
    assert rank_environment(TASK)["MASTER_ADDR"] == "n1"
    with pytest.raises(UserError, match="scontrol is not on the PATH"):
        rank_environment({**TASK, "MASTER_ADDR": ""})


def test_a_process_that_would_train_alone_among_others_is_refused(small_corpus, tmp_path, monkeypatch):
    """In the batch script itself SLURM_PROCID is 0, though srun has started nothing."""
    batch = {name: value for name, value in TASK.items() if "STEP" not in name}
    for name, value in batch.items():
        monkeypatch.setenv(name, value)
    done = run_here("pretrain", "train", run_file(tmp_path, small_corpus))
    assert done.returncode == 2
    assert done.stderr.startswith("error: SLURM_NTASKS is 5, but srun has not started this process")
    assert rank_environment({}) == rank_environment({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == {}
