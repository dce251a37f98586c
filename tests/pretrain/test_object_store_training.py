"""Training straight from a real S3 server: the losses of a local corpus to the bit, also when the store goes away."""

from pathlib import Path

import pytest

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.publish import publish
from tests.data_pipeline.object_store import serving
from tests.pretrain.runs import losses, run_file, train_ranks


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
            "cache": {"directory": str(cache), "wait_seconds": 1.0},
        },
        "batch": {"global_batch_size": 64, "micro_batch_size": 32},
        "evaluation": [],
    }


def test_a_store_that_goes_away_stops_the_run_saved_and_it_goes_on_to_the_same_losses(
    small_corpus, store, tmp_path, capfd
):
    url = "s3://bucket/corpus"
    publish(open_corpus(small_corpus), url)
    local = run_file(tmp_path / "local", small_corpus, **sections(small_corpus, tmp_path / "none", 0))
    remote = run_file(tmp_path / "remote", small_corpus, **sections(url, tmp_path / "cache", 2))
    assert train_ranks(local, 2) == [0, 0]
    store.calm()
    store.faults = True
    store.away_after = 9
    assert train_ranks(remote, 2) == [75, 75]
    told = capfd.readouterr().err
    assert "warning: s3://bucket/corpus/shards/train/" in told
    stopped = max(losses(remote))
    assert f"stopping after step {stopped}, which is saved" in told
    assert 0 < stopped < 8
    assert (remote.parent / f"run/checkpoints/step-{stopped:08d}/index.json").exists()
    store.calm()
    store.faults = True
    assert train_ranks(remote, 2) == [0, 0]
    assert losses(remote) == losses(local)
    assert len(losses(local)) == 8
