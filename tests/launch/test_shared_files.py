"""Runs on file systems as clusters have them: without file locks. Hosts that see files late: `test_slurm_chain`."""

import pytest

from data_pipeline.foundation.config_file import load
from launch.slurm_head import stage
from pretrain.config import RunConfig
from tests.conftest import run
from tests.launch.conftest import a_run, takes_fuse
from tests.launch.jobs import status
from tests.launch.shared_files import UNPROTECTED, mounted, warnings_in

pytestmark = takes_fuse


@pytest.mark.slow
def test_a_run_without_file_locks_warns_once_and_ends_well(small_corpus, tmp_path):
    with mounted(tmp_path, "--no-locks") as mount:
        path = a_run(mount.mountpoint, small_corpus, steps=4)
        stage(load(path, [], RunConfig), mount.mountpoint / "copies")
        done = run("launch", "local", path, "--ranks", "2")
        assert done.returncode == 0, done.stderr
        assert status(mount.mountpoint)["state"] == "finished"
        directory = mount.mountpoint / "run"
        assert warnings_in(done.stdout + done.stderr) == [
            f"warning: no file locks here (Function not implemented): {directory}: {UNPROTECTED}"
        ]


def test_the_mount_does_what_it_says(tmp_path):
    """Without this, tests on such mounts would show nothing."""
    with mounted(tmp_path, "--no-locks", "--cached", "1000000") as mount:
        file, other = mount.mountpoint / "file", mount.mountpoint / "other"
        file.write_text("one")
        seen = (file.stat().st_size, other.exists())
        (mount.directory / "other").touch()
        (mount.directory / "file").write_text("longer")
        assert (file.stat().st_size, other.exists()) == seen == (3, False)
        assert sorted(path.name for path in mount.mountpoint.iterdir()) == ["file", "other"]
