"""A short form of `python -m tests.soak_build`."""

from tests.soak_build import soak


def test_killed_builds_make_the_same_bytes(tmp_path):
    outcome = soak(tmp_path, kills=3, seed=1, seconds=40)
    assert outcome.problems == []
    assert outcome.kills.total() > 0
    assert outcome.builds > 0
