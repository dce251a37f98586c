"""Runs that several tests of launching share, a SLURM for them, and what tests need of a machine."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.support.runs import losses, run_file, train_ranks
from tests.support.slurm_cluster import Cluster


def takes(*programs: str, of: str, unless: str = "") -> pytest.MarkDecorator:
    """Skips tests without root, without one of the `programs` `of` Debian's packages, or for the reason `unless`."""
    absent = [name for name in programs if shutil.which(name) is None]
    missing = f"not installed: {', '.join(absent)} (apt-get install {of})" if absent else unless
    reason = "it takes root" if os.geteuid() else missing
    return pytest.mark.skipif(bool(reason), reason=reason)


_namespaces = subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
takes_slurm = takes("munged", "slurmctld", "slurmd", "sbatch", of="slurm-wlm munge")
takes_fuse = takes("fusermount3", of="fuse3", unless="" if Path("/dev/fuse").exists() else "no /dev/fuse here")
takes_hosts = takes(
    *("ip", "sshd", "ssh", "ssh-keygen"),
    of="iproute2 openssh-server",
    unless="" if _namespaces else "no network namespaces here",
)


def a_run(folder: Path, corpus: Path | str, steps: int = 40, **changes: object) -> Path:
    return run_file(folder, corpus, run={"max_steps": steps}, evaluation=[], **changes)


@pytest.fixture(scope="session")
def undisturbed(small_corpus) -> dict[int, float]:
    """The losses of `a_run` on two ranks of this machine."""

    def make(folder: Path) -> None:
        assert train_ranks(a_run(folder, small_corpus), 2) == [0, 0]

    return losses(made_once("undisturbed", make) / "run.yaml")


@pytest.fixture(scope="module")
def host() -> list[str]:
    """A command that starts each node's daemon; a module may have another."""
    return []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, host) -> Iterator[Cluster]:
    """A SLURM of two nodes, to which commands submit."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), host)
    try:
        cluster.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
            yield cluster
    finally:
        cluster.stop()
