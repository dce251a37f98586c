"""A short form of `python -m tests.soak_build`."""

from tests.conftest import write_c4, write_corpus_file
from tests.soak_build import soak


def test_killed_builds_make_the_same_bytes(tmp_path):
    for part in range(3):
        write_c4(tmp_path / f"c4-{part}.json.gz", records=25, skip=25 * part)
    outcome = soak(write_corpus_file(tmp_path / "corpus.yaml"), kills=3, seed=1, seconds=10, pause=7)
    assert outcome.problems == []
    assert outcome.kills.total() > 0
    assert outcome.builds > 0
