"""What a job of a real SLURM of two nodes consists of: its script, the doctor before a run, ranks of srun, a build."""

import json
import subprocess
import sys

import pytest

from pretrain.run import slurm
from tests.conftest import write_c4, write_corpus_file
from tests.in_process import run_here
from tests.launch import slurm_cluster
from tests.launch.conftest import a_run
from tests.launch.jobs import inside, said, submitted

pytestmark = pytest.mark.skipif(slurm_cluster.lacking() is not None, reason=str(slurm_cluster.lacking()))


def test_a_job_ends_with_the_doctors_findings(cluster, small_corpus, tmp_path):
    path = a_run(tmp_path, small_corpus)
    (job,) = submitted(path, "--doctor", container=inside("agent", "echo no such image >&2; exit 3"))
    assert cluster.until(job, "FAILED", "COMPLETED") == "FAILED"
    assert "fault    node on n1, n2: srun ended with exit code 3: " in said(tmp_path, job)
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


@pytest.mark.slow
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
    done = run_here("launch", "slurm", path, f"run.name={json.dumps(name)}", "--dry-run")
    assert done.returncode == 0, done.stderr
    script = done.stdout.replace("exec ", 'exec printf "%s\\n" ')
    (folder / "run/slurm").mkdir(parents=True)
    (tmp_path / "script").write_text(script.replace("#SBATCH --gpus-per-node=1\n", ""))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script")
    cluster.until(job, "COMPLETED")
    words = said(folder, job).splitlines()
    given = json.loads(next(word for word in words if word.startswith("{")))
    assert (given["path"], given["overrides"]) == (str(path), [f"run.name={json.dumps(name)}"])
    assert not (tmp_path / "run").exists()
