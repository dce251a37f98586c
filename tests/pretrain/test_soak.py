"""Short forms of `python -m tests.soak_training`."""

import os
import shutil

import pytest

from tests.soak_training import soak


def test_a_killed_run_comes_to_the_same_bits(tmp_path):
    outcome = soak(tmp_path, change=False, kills=3, seed=2, seconds=60, steps=30)
    assert outcome.problems == []
    assert outcome.kills.total() > 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="a disk to fill takes root")
def test_a_killed_run_on_other_ranks_and_stages_takes_the_same_rows(tmp_path):
    outcome = soak(tmp_path, change=True, kills=3, seed=6, seconds=60, steps=30)
    assert outcome.problems == []
    assert outcome.kills.total() > 0
