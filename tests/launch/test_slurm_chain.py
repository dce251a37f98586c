"""Runs under a real SLURM of two nodes that outlast their jobs: time limits, cancelled jobs, warnings.

Each node, and this machine, has a view of its own of a file system without locks, as clusters have them.
"""

from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest

from pretrain.run import status
from pretrain.run.metrics_file import read_metrics
from tests.launch.conftest import a_run, takes_fuse, takes_slurm
from tests.support.shared_files import UNPROTECTED, Mount, mounted, warnings_in
from tests.support.slurm_cluster import said, submitted, until, until_steps

pytestmark = [pytest.mark.slow, takes_slurm, takes_fuse]


@pytest.fixture(scope="module")
def mount(tmp_path_factory) -> Iterator[Mount]:
    """What a host has once seen of a file, it believes for ever, whatever others do to it."""
    with mounted(tmp_path_factory.mktemp("views"), "no-locks cached") as mount:
        yield mount


@pytest.fixture(scope="module")
def host(mount) -> list[str]:
    return mount.host()


def test_a_chain_finishes_whatever_ends_its_jobs(cluster, small_corpus, tmp_path):
    """Ranks read a corpus through a cache on the node's disk. The first job meets its time limit, the second is
    cancelled. The last one would train by its own copy of the run file; another, by the new one, takes its place."""
    corpus, cache = f"file://{small_corpus}", f"data.cache.directory={tmp_path}/local"
    path = a_run(tmp_path, corpus, steps=1_000_000)
    options = ("--chain", "3", "--time", "120", "--warn-seconds", "3600")
    limited, cancelled, last = submitted(path, cache, *options)
    until_steps(cluster, limited, tmp_path, attempt=1)
    cluster.run("scontrol", "hold", last)
    with cluster.suspended_ranks():  # SLURM looks at times every 30 s
        cluster.run("scontrol", "update", f"JobId={limited}", "TimeLimit=59")  # minutes
        until(lambda: "SIGUSR1: saving and stopping" in said(tmp_path, limited), cluster, limited, tmp_path)
    cluster.until(limited, "FAILED")  # exit code 75
    until_steps(cluster, cancelled, tmp_path, attempt=2)
    cluster.run("scancel", cancelled)  # SLURM says at once that it is cancelled, while the ranks still save
    cluster.until_over(cancelled)
    stopped = status.read(tmp_path / "run")
    assert stopped.state == "stopped"
    cluster.run("scancel", last)
    a_run(tmp_path, corpus, steps=stopped.step + 2)
    (another,) = submitted(path, cache)
    cluster.until(another, "COMPLETED")
    finished = status.read(tmp_path / "run")
    assert (finished.state, finished.step) == ("finished", stopped.step + 2)
    cached = {path.name for path in (tmp_path / "local/blocks").glob("??/*")}
    assert cached
    assert cached <= {*pq.read_table(small_corpus / "blocks.parquet")["sha256"].to_pylist()}


@pytest.mark.soak
def test_hosts_that_see_files_late_train_stop_save_and_resume(cluster, mount, small_corpus):
    """A rank on each host. No save waits until rank 0's host sees what the other rank has written."""
    folder, directory = mount.mountpoint, mount.directory
    path = a_run(folder, small_corpus, steps=1_000_000)
    (first,) = submitted(path)
    until_steps(cluster, first, directory, attempt=1)
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    cluster.until(first, "FAILED", "COMPLETED")
    unprotected = f"warning: no file locks here (Function not implemented): {folder}/run: {UNPROTECTED}"
    assert unprotected in warnings_in(said(directory, first))
    stopped = status.read(directory / "run")
    assert stopped.state == "stopped"
    (second,) = submitted(path, f"run.max_steps={stopped.step + 3}")
    assert cluster.until(second, "COMPLETED", "FAILED") == "COMPLETED", said(directory, second)
    assert status.read(directory / "run").step == stopped.step + 3
    logged = [row.step for row in read_metrics(directory / "run") if "train/loss" in row.metrics]
    assert logged == list(range(1, stopped.step + 4))
