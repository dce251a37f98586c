"""Every objective and packing through the whole pipeline: noise in the shards equals the loader's first epoch."""

import json

import numpy as np
import pytest
import webdataset

from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.verify import verify
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import TrainingBatches, validation_batches
from data_pipeline.loading.reader import Reader
from data_pipeline.loading.stream import Stream
from tests.conftest import write_c4, write_corpus_file
from tests.support.builds import built, trained
from tests.support.example_rows import assert_alike
from tests.support.in_process import done_here
from tests.support.slow import slow
from tests.support.tables import each

SPECIAL = ["<mask>", "<s>", "[R]", "[S]", "[X]", "[CLS]", "[SEP]"]
DENOISERS = [
    {"mode": "R", "denoiser": {"name": "span_corruption", "inputs_length": 32}},
    {"mode": "S", "denoiser": {"name": "prefix_lm", "length": 30, "noise_density": 0.25}, "rate": 2},
    {"mode": "X", "denoiser": {"name": "span_corruption", "inputs_length": 32, "noise_density": 0.5}},
]
WITHOUT_MODES = [
    {"denoiser": {"name": "span_corruption", "inputs_length": 64}},
    {"denoiser": {"name": "infilling", "length": 60, "whole_rate": 0.5}, "rate": 2},
]
OBJECTIVES = {
    "span_corruption": ({"name": "span_corruption", "inputs_length": 32}, "concatenate"),
    "rolled": ({"name": "span_corruption", "inputs_length": 32, "random_roll": True}, "concatenate"),
    "iid_denoising": ({"name": "iid_denoising", "inputs_length": 32}, "concatenate"),
    "prefix_lm": ({"name": "prefix_lm", "length": 32}, "concatenate"),
    "packed_prefix_lm": ({"name": "prefix_lm", "length": 32, "packed": True}, "concatenate"),
    "full_lm": ({"name": "full_lm", "length": 32}, "concatenate"),
    "ul2": ({"name": "ul2", "denoisers": DENOISERS}, "concatenate"),
    "infilling": ({"name": "infilling", "length": 32, "whole_rate": 0.5}, "concatenate"),
    "mixture_of_documents": ({"name": "ul2", "denoisers": WITHOUT_MODES}, "complete_documents"),
    "bart": ({"name": "denoising", "length": 64}, "complete_documents"),
    "causal_lm": ({"name": "causal_lm", "length": 32}, "concatenate"),
    "roberta": ({"name": "masked_lm", "length": 32}, "complete_documents"),
}


@pytest.fixture(scope="module")
def make(small_corpus, tmp_path_factory):
    """make(objective, packing, apply_at): builds a corpus of 60 pages with them."""
    folder = tmp_path_factory.mktemp("objectives")
    write_c4(folder / "c4.json.gz", records=60)
    tokenizer = trained(small_corpus, special_tokens=SPECIAL, sentinels=40)

    def corpus_of(objective, packing, apply_at, **changes):
        name = f"{objective['name']}-{len(list(folder.iterdir()))}"
        rows = {"objective": objective, "packing": packing, "apply_at": apply_at}
        settings = {"output": str(folder / name), "tokenizer": tokenizer, "rows": rows, **changes}
        return open_corpus(built(write_corpus_file(folder / f"{name}.yaml", **settings)))

    return corpus_of


FIRST = ("span_corruption", "packed_prefix_lm", "ul2", "bart", "roberta")


@each("name", [*FIRST, *slow(*(name for name in OBJECTIVES if name not in FIRST))])
def test_noise_in_the_shards_is_that_of_the_loaders_first_epoch(make, name):
    objective, packing = OBJECTIVES[name]
    at_load, at_build = make(objective, packing, "load"), make(objective, packing, "build")
    assert verify(at_load) == verify(at_build) == []
    for split in ("train", "validation"):
        ids = np.arange(at_load.rows(split))
        assert at_build.rows(split) == len(ids) > 0
        loaded, stored = Reader(at_load, split), Reader(at_build, split)
        first = loaded.examples(ids, 0)
        assert_alike(first, stored.examples(ids, 0))
        assert_alike(loaded.examples(ids[::-1], 0), stored.examples(ids[::-1], 0))
        inputs, targets = at_load.objective.shape
        assert first.inputs.lengths.max() <= inputs
        assert first.targets.lengths.max() <= targets
        again = loaded.examples(ids, 1)
        drawn = name not in ("full_lm", "causal_lm")  # these objectives draw nothing
        assert drawn != np.array_equal(again.inputs.values, first.inputs.values)
    batches = TrainingBatches(Stream([at_load], [1.0], seed=0, lanes=4), BatchLayout(0, 1, 8, 1))
    batch = next(batches.loader(1, 0))[0]
    size = at_load.tokenizer.size
    assert 0 <= batch["encoder_input_ids"].min() <= batch["encoder_input_ids"].max() < size
    assert (batch["labels"] != IGNORE_INDEX).any(dim=1).all()
    assert batch["labels"].max() < size
    held_out = [batch["labels"] for batch in validation_batches(at_load, BatchLayout(0, 1, 8, 1))]
    assert sum(int((labels != IGNORE_INDEX).any(dim=1).sum()) for labels in held_out) == at_load.rows("validation")
    shown = done_here("data-pipeline", "show", at_load.directory, "-n", "1")
    assert "inputs" in shown


def test_the_denoiser_that_a_row_was_cut_for_is_stored_with_it(make):
    corpus = make(*OBJECTIVES["ul2"], "load")
    (shard, *_) = corpus.manifest.splits["train"].shards
    for sample in webdataset.WebDataset(str(corpus.directory / shard.name), shardshuffle=False).decode():
        lengths = np.diff(sample["row_offsets.npy"])
        assert sample["denoiser.npy"].shape == lengths.shape
        assert (lengths == corpus.objective.raw_lengths[sample["denoiser.npy"]]).all()


def test_pairs_are_packed_with_segments_and_positions(make, tmp_path):
    """Each pair is whole in one row; labels and positions restart in each segment."""
    pairs = [(f"input number {number} of some", f"target {number}") for number in range(120)]
    lines = (json.dumps({"inputs": source, "targets": target}) + "\n" for source, target in pairs)
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    sources = [{"format": "pairs", "path": str(tmp_path / "pairs.jsonl"), "language": "en"}]
    objective = {"name": "text_to_text", "inputs_length": 64, "targets_length": 32}
    corpus = make(objective, "examples", "build", sources=sources)
    tokenizer, found = corpus.tokenizer, []
    for split in ("train", "validation"):
        examples = Reader(corpus, split).examples(np.arange(corpus.rows(split)), 0)
        sides = ((examples.inputs, examples.input_segments), (examples.targets, examples.target_segments))
        for row in range(corpus.rows(split)):
            found += [
                tuple(tokenizer.decode(ids.values[row][own[row] == segment]) for ids, own in sides)
                for segment in range(1, int(examples.input_segments[row].max()) + 1)
            ]
    assert sorted(found) == sorted(pairs)
    assert corpus.rows("train") < 60  # several to a row
    shard = str(corpus.directory / "shards/train/shard-00000.tar")
    members = next(iter(webdataset.WebDataset(shard, shardshuffle=False)))
    names = [f"{side}{array}.npy" for side in ("input", "target") for array in ("s", "_offsets", "_segments")]
    assert members.keys() >= set(names)
    batch = next(TrainingBatches(Stream([corpus], [1.0], 0, 4), BatchLayout(0, 1, 8, 1)).loader(1, 0))[0]
    for side in ("encoder", "decoder"):
        segments, positions = batch[f"{side}_segment_ids"], batch[f"{side}_positions"]
        for row in range(8):
            for segment in range(1, int(segments[row].max()) + 1):
                own = positions[row][segments[row] == segment]
                assert own.tolist() == list(range(len(own)))
    at_load, at_build = (make(objective, "complete_documents", at, sources=sources) for at in ("load", "build"))
    ids = np.arange(at_load.rows("train"))
    assert len(ids) > 100  # one to a row
    assert_alike(*(Reader(corpus, "train").examples(ids, 0) for corpus in (at_load, at_build)))
