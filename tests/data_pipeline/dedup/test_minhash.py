"""Clusters of near-duplicates."""

import numpy as np
import pytest

from data_pipeline.base.errors import FailedError
from data_pipeline.dedup import minhash


def test_clusters_that_the_memory_does_not_suffice_for_are_refused(monkeypatch):
    monkeypatch.setattr(minhash, "available_memory", lambda: 160_000 - 8000 - 500 * 16 - 1)
    pairs = np.arange(1000, dtype=np.uint64).reshape(-1, 2)
    few = minhash.Clusters()
    few.join(pairs[1:])
    assert len(few.members()[0]) == 998
    clusters = minhash.Clusters()
    clusters.join(pairs)
    told = "the clusters of 1,000 documents take 144.0 kB more memory, and 144.0 kB are free; raise dedup.minhash.rows"
    with pytest.raises(FailedError, match=told):
        clusters.members()
