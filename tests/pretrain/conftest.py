"""Fixtures that several tests of training share."""

from pathlib import Path

import pytest

from tests.conftest import made_once
from tests.pretrain.checkpoint_runs import OPTIMIZERS, trained


@pytest.fixture(scope="session")
def whole(small_corpus, tmp_path_factory) -> Path:
    """Uninterrupted runs of one rank at stage 1, one with each optimizer."""

    def make(folder: Path) -> None:
        assert trained(1, folder, small_corpus, 1, None) == [[0] * len(OPTIMIZERS)]

    return made_once(tmp_path_factory, "whole", make)
