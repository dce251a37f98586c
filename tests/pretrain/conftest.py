"""Fixtures that several tests of training share."""

from pathlib import Path

import pytest

from tests.pretrain.checkpoint_runs import OPTIMIZERS, trained


@pytest.fixture(scope="session")
def whole(small_corpus, tmp_path_factory) -> Path:
    """Uninterrupted runs of one rank at stage 1, one with each optimizer."""
    folder = tmp_path_factory.mktemp("whole")
    assert trained(1, folder, small_corpus, 1, None) == [[0] * len(OPTIMIZERS)]
    return folder
