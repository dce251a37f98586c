"""Run files."""

from pathlib import Path

import pytest

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from pretrain.config import RunConfig
from pretrain.models import FAMILIES
from tests.tables import each


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        """
run: {name: a, directory: a, max_steps: 1000}
model: {family: t5, d_model: 8, d_kv: 4, d_ff: 8, num_heads: 2, num_encoder_layers: 1, num_decoder_layers: 1}
data: {train: [{corpus: a}]}
batch: {global_batch_size: 8}
optimizer: {learning_rate: 1.0e-2}
"""
    )
    return lambda *overrides: load(path, overrides, RunConfig)


def test_a_key_of_a_family_is_named_as_in_the_file(config):
    """The suggested key is of the same family: T5 has no cross_attention_bias."""
    with pytest.raises(UserError, match=r"model\.num_head: unknown key; nearest valid key: model\.num_heads$"):
        config("model.num_head=3")
    with pytest.raises(UserError, match=r"model\.cross_attention_bias: unknown key") as error:
        config("model.cross_attention_bias=true")
    assert "nearest valid key: model.cross" not in str(error.value)


@each(
    "override, line",
    [
        ("model.d_ff=0", "model.d_ff: expected integer > 0, got 0 (width of the feed-forward layers)"),
        (
            "batch.micro_batch_size=x",  # one line, not one for each type that it may have
            "batch.micro_batch_size: expected integer > 0, auto or null, got 'x' (rows per forward pass on a rank)",
        ),
        (
            "deepspeed.train_batch_size=4",
            "deepspeed.train_batch_size: set batch.global_batch_size and batch.micro_batch_size instead",
        ),
        ("data.train=[]", "data.train: expected non-empty list of keys and values, got [] (the corpora to train on)"),
        ("faults.spikes=7", "faults.spikes: expected keys and values or null, got 7 (detection of loss spikes)"),
        ("optimizer.name=sgd", "optimizer.name: expected one of adamw, adamw_scale, adafactor, muon, got 'sgd'"),
        ("data.objective={length: 3}", "data.objective.name: missing"),
        ("evaluation=[{every_steps: 5}]", "evaluation.0.hook: missing"),
        (
            "data.objective={name: ul2, mode_tokens: {Q: '[Q]'}}",
            "data.objective.mode_tokens.Q: input should be 'R', 'S' or 'X', got 'Q' "
            "(the special token before the inputs for each mode; tokenizer.special_tokens must list them)",
        ),
    ],
)
def test_a_wrong_value_has_one_line_with_what_is_expected_and_what_the_key_means(config, override, line):
    with pytest.raises(UserError) as error:
        config(override)
    (found,) = str(error.value).splitlines()
    assert found.partition("run.yaml: ")[2] == line


def test_shipped_runs_for_gpus_choose_their_micro_batch():
    """Runs in bf16 are for GPUs, and what fits differs between them."""
    files = [*Path("configs/runs").glob("*.yaml"), *Path("configs/speedrun/gpu").glob("*.yaml")]
    runs = [load(path, [], RunConfig) for path in files if path.name != "experiment.yaml"]
    chosen = [run.batch.micro_batch_size for run in runs if run.precision == "bf16"]
    assert chosen == ["auto"] * 18


def test_every_shipped_run_file_is_valid_and_fits_its_corpus_file():
    """The kind and length of rows and the tokenizer's ids fit, as far as the corpus file determines them."""
    corpora = {}
    for path in Path("configs/corpora").glob("*.yaml"):
        corpus = load(path, [], CorpusConfig)
        corpora[corpus.output] = corpus
    files = sorted(Path("configs/runs").glob("*.yaml"))
    assert files
    for path in files:
        run = load(path, [], RunConfig)
        model = run.model
        for entry in run.data.train:
            corpus = corpora[entry.corpus]
            objective, tokenizer = corpus.rows.objective, corpus.tokenizer
            assert objective.name in FAMILIES[model.family].objectives, path
            assert model.longest_sequence is None or model.longest_sequence >= max(objective.shape), path
            if tokenizer.kind == "sentencepiece" and model.vocab_size is not None:
                ids = tokenizer.vocab_size + len(tokenizer.special_tokens) + tokenizer.sentinels
                assert (model.vocab_size, model.pad_id, model.eos_id) == (ids, 0, 1), path
