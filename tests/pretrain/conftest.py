"""Fixtures that several tests of training share."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.tracking.store import creating_alone
from tests.conftest import made_once
from tests.pretrain.checkpoint_runs import OPTIMIZERS, trained


@pytest.fixture(scope="session")
def whole(small_corpus, tmp_path_factory) -> Path:
    """Uninterrupted runs of one rank at stage 1, one with each optimizer."""

    def make(folder: Path) -> None:
        assert trained(1, folder, small_corpus, 1, None) == [[0] * len(OPTIMIZERS)]

    return made_once(tmp_path_factory, "whole", make)


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory) -> Callable[[Path], str]:
    """Puts MLflow's database without runs into a folder, and returns its URI: creating the tables takes seconds."""

    def make(folder: Path) -> None:
        with creating_alone(f"sqlite:///{folder}/mlflow.db"):
            pass

    database = made_once(tmp_path_factory, "mlflow", make) / "mlflow.db"

    def put(folder: Path) -> str:
        shutil.copy(database, folder)
        return f"sqlite:///{folder}/mlflow.db"

    return put
