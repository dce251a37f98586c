"""Training straight from a real S3 server: the losses of a local corpus to the bit, also when the store goes away."""

from pathlib import Path

import pytest

from data_pipeline.corpus import open_corpus
from data_pipeline.tools.publish import publish
from tests.data_pipeline.object_store import serving
from tests.pretrain.runs import losses, run_file, train


@pytest.fixture(scope="module")
def store():
    with pytest.MonkeyPatch.context() as patch:
        yield from serving(patch)


def sections(corpus: str | Path, cache: Path, workers: int) -> dict[str, object]:
    return {
        "data": {
            "train": [{"corpus": str(corpus)}],
            "lanes": 1,  # so that a run meets new blocks until its end
            "workers": workers,
            "prefetch": 1,
            "cache": {"directory": str(cache), "wait_seconds": 10.0},
        },
        "batch": {"global_batch_size": 64, "micro_batch_size": 32},
        "evaluation": [],
    }


@pytest.mark.slow
def test_a_store_that_goes_away_stops_the_run_saved_and_it_goes_on_to_the_same_losses(small_corpus, store, tmp_path):
    url = "s3://bucket/corpus"
    publish(open_corpus(small_corpus), url)
    local = run_file(tmp_path / "local", small_corpus, **sections(small_corpus, tmp_path / "none", 0))
    remote = run_file(tmp_path / "remote", small_corpus, **sections(url, tmp_path / "cache", 2))
    assert train(local, 1).returncode == 0
    store.calm()
    store.blocks_left = 6  # of 8 or more, each read by one worker or by both
    done = train(remote, 1)
    assert done.returncode == 75, done.stderr
    stopped = max(losses(remote))
    assert 0 < stopped < 8
    assert f"warning: {url}/shards/train/" in done.stderr
    assert f"run the same command again later; stopping after step {stopped}, which is saved" in done.stderr
    assert "Traceback" not in done.stderr
    store.calm()
    store.faults = True
    done = train(remote, 1, "data.cache.wait_seconds=120")
    assert done.returncode == 0, done.stderr
    assert store.busy
    assert store.broken
    assert losses(remote) == losses(local)
    assert len(losses(local)) == 8
