"""Runs on file systems as clusters have them: without file locks, and with hosts that see each other's files late."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.foundation.config_file import load
from launch import corpus_staging
from pretrain.config import RunConfig
from pretrain.run.metrics_file import read_metrics
from tests.conftest import run
from tests.launch import shared_files, slurm_cluster
from tests.launch.conftest import a_run
from tests.launch.jobs import said, status, submitted, until_steps
from tests.launch.shared_files import Mount
from tests.launch.slurm_cluster import Cluster

SECONDS = 10  # for which a host believes what it has seen
UNPROTECTED = "nothing prevents a second run in this directory; make sure that only one trains there"
pytestmark = pytest.mark.skipif(shared_files.lacking() is not None, reason=str(shared_files.lacking()))
needs_slurm = pytest.mark.skipif(slurm_cluster.lacking() is not None, reason=str(slurm_cluster.lacking()))


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Mount]:
    for name in ("files", "mounted"):
        (folder / name).mkdir()
    with Mount(folder / "files", folder / "mounted", *options) as mount:
        yield mount


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


@pytest.mark.slow
def test_a_run_without_file_locks_warns_once_and_ends_well(small_corpus, tmp_path):
    with mounted(tmp_path, "--no-locks") as mount:
        path = a_run(mount.mountpoint, small_corpus, steps=4)
        corpus_staging.stage(load(path, [], RunConfig), mount.mountpoint / "copies")
        done = run("launch", "local", path, "--ranks", "2")
        assert done.returncode == 0, done.stderr
        assert status(mount.mountpoint)["state"] == "finished"
        directory = mount.mountpoint / "run"
        assert warnings_in(done.stdout + done.stderr) == [
            f"warning: no file locks here (Function not implemented): {directory}: {UNPROTECTED}"
        ]


@pytest.fixture
def cluster_of_hosts(tmp_path, monkeypatch) -> Iterator[tuple[Cluster, Mount]]:
    """Two nodes and this machine, each with its own view of a file system without locks."""
    with mounted(tmp_path, "--no-locks", "--cached", str(SECONDS)) as mount:
        (tmp_path / "slurm").mkdir()
        cluster = Cluster(tmp_path / "slurm", mount.host())
        try:
            cluster.start()
            monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
            yield cluster, mount
        finally:
            cluster.stop()


@pytest.mark.slow
@needs_slurm
def test_hosts_that_see_files_late_train_stop_save_and_resume(cluster_of_hosts, small_corpus):
    """Through SLURM; a rank on each host. No save waits until rank 0's host sees what the other rank has written."""
    cluster, mount = cluster_of_hosts
    folder = mount.mountpoint
    path = a_run(folder, small_corpus, steps=1_000_000)
    (first,) = submitted(path)
    until_steps(cluster, first, mount.directory, attempt=1)
    (folder / "run/stop").touch()
    asked = time.monotonic()
    cluster.until(first, "FAILED", "COMPLETED")
    assert time.monotonic() - asked < 2 * SECONDS + 30
    directory = mount.directory
    assert f"warning: no file locks here (Function not implemented): {folder}/run: {UNPROTECTED}" in warnings_in(
        said(directory, first)
    )
    now = status(directory)
    assert (now["state"], now["stop_file"]) == ("stopped", True)
    step = now["step"]
    assert isinstance(step, int)
    time.sleep(SECONDS)  # so that all hosts read the new run file
    a_run(folder, small_corpus, steps=step + 3)
    (second,) = submitted(path)
    assert cluster.until(second, "COMPLETED", "FAILED") == "COMPLETED", said(directory, second)
    assert status(directory)["step"] == step + 3
    logged = [row.step for row in read_metrics(directory / "run") if "train/loss" in row.metrics]
    assert logged == list(range(1, step + 4))
    took = [row.metrics["checkpoint/write_seconds"] for row in read_metrics(directory / "run") if is_save(row.metrics)]
    assert max(took) < SECONDS / 2


def is_save(metrics: dict[str, float]) -> bool:
    return "checkpoint/write_seconds" in metrics


def test_the_mount_does_what_it_says(tmp_path):
    """Without this, the tests above would show nothing."""
    with mounted(tmp_path, "--no-locks", "--cached", "3") as mount:
        file, other = mount.mountpoint / "file", mount.mountpoint / "other"
        file.write_text("one")
        assert (file.stat().st_size, other.exists()) == (3, False)
        (mount.directory / "other").touch()
        (mount.directory / "file").write_text("longer")
        assert not other.exists()
        assert file.stat().st_size == 3
        assert sorted(path.name for path in mount.mountpoint.iterdir()) == ["file", "other"]
        time.sleep(3.1)
        assert other.exists()
        assert json.dumps(file.read_text()) == '"longer"'
