"""The memory that units ask for, compared with what they take."""

import pytest

from checks import memory


@pytest.mark.slow
def test_units_take_no_more_memory_than_they_ask_for(tmp_path):
    """Also those with a classifier, n-grams of evaluation sets, or text that is all duplicates."""
    found = {(corpus, stage): sizes for corpus, stage, *sizes in memory.growths(tmp_path, 8_000_000)}
    assert {stage for stage, (asked, _) in found.items() if asked > memory.NOISE} >= {
        ("lines", "documents"),
        ("lines", "evaluation-sets"),
        ("lines", "deduplicated"),
        ("substrings", "substrings-keys"),
        ("substrings", "deduplicated"),
    }
    assert [stage for stage, (asked, taken) in found.items() if taken > asked + memory.NOISE] == []
