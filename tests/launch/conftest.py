"""Runs that several tests of launching share, and a SLURM for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.launch.slurm_cluster import Cluster
from tests.pretrain.runs import losses, run_file, train_ranks

STEPS = 100


def a_run(folder: Path, corpus: Path, steps: int = STEPS) -> Path:
    settings = {"name": "test", "directory": str(folder / "run"), "max_steps": steps, "cpu_threads": 1}
    return run_file(folder, corpus, run=settings, evaluation=[])


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
