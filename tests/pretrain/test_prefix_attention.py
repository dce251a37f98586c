"""A decoder whose inputs see one another: prefix LM without an encoder."""

import numpy as np
import pytest
import torch

from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.batches import as_batch
from data_pipeline.objectives.in_one_row import InOneRow
from data_pipeline.objectives.prefix_lm import PrefixLM
from data_pipeline.packing.examples import balanced
from pretrain.config.run_config import DataSection
from pretrain.generation.decoding import generate
from pretrain.generation.settings import GenerationSettings
from pretrain.generation.texts import padded
from pretrain.huggingface import hf_model_of
from pretrain.models import build, parse
from pretrain.models.attention import AttentionInputs
from tests.data_pipeline.example_rows import VOCABULARY, ragged_rows
from tests.tables import each

SIZES = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "init_std": 0.3}
ROTARY = {"positions": "rotary", "norm": "rms", "qk_norm": True, "activation": "swiglu", "biases": False}
LEARNED = {"positions": "learned", "max_positions": 128}


def model(prefix="bidirectional", **settings):
    torch.manual_seed(0)
    ids = {"vocab_size": VOCABULARY.size, "pad_id": VOCABULARY.pad, "eos_id": VOCABULARY.eos}
    return build(parse({"family": "decoder_only", **SIZES, **ids, "prefix_attention": prefix, **settings})).eval()


def examples(lengths=(30, 9, 17, 30)):
    rows, keys = ragged_rows([*lengths])
    return InOneRow(of=PrefixLM(length=30)).apply(rows, keys, VOCABULARY, {})


@each("settings", [ROTARY, LEARNED])
def test_losses_depend_on_every_token_of_the_prefix_and_on_no_later_one(settings):
    """The gradient of each loss with respect to the tokens' vectors says what it has seen."""
    subject = model(**settings)
    batch = as_batch(examples((30,)), VOCABULARY.pad)
    prefix = int(batch["prefix_mask"].sum())
    vectors = subject.embedding(batch["encoder_input_ids"]).detach().requires_grad_()
    states = subject.decoder(vectors, _inputs(batch))
    weights = torch.randn(states.size(-1))  # the sum of a layer norm's output has no gradient
    for place in range(vectors.size(1)):
        (seen,) = torch.autograd.grad(states[0, place] @ weights, vectors, retain_graph=True)
        found = seen[0].abs().sum(dim=1).gt(0).nonzero().flatten().tolist()
        assert found == [*range(max(place + 1, prefix))]


def _inputs(batch):
    return AttentionInputs(**{key: value for key, value in batch.items() if key not in ("encoder_input_ids", "labels")})


def test_a_causal_decoder_reads_the_same_rows_without_seeing_ahead():
    batch = as_batch(examples(), VOCABULARY.pad)
    causal, bidirectional = model("causal", **ROTARY), model(**ROTARY)
    without = {name: tensor for name, tensor in batch.items() if name != "prefix_mask"}
    assert torch.equal(causal(**batch)["labels"], causal(**without)["labels"])
    assert not torch.allclose(bidirectional(**batch)["labels"], causal(**batch)["labels"])


@each("settings", [ROTARY, LEARNED])
def test_packed_rows_give_the_same_losses(settings):
    subject, apart = model(**settings), examples()
    alone = subject(**as_batch(apart, VOCABULARY.pad))["labels"]
    packed = subject(**as_batch(balanced(apart, 2), VOCABULARY.pad))["labels"]
    losses = [np.sort(found[found != 0].detach().numpy()) for found in (alone, packed)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@each("plain", [True, False])
def test_generation_reads_a_prompt_as_training_reads_inputs(plain):
    """The likeliest tokens after prompts of different lengths are those that the loss of the whole row prefers."""
    subject = model(**ROTARY)
    prompts = [[5, 9, 11, 4, 1], [7, 8, 1]]
    ids, mask = padded(prompts, VOCABULARY.pad, left=True)
    settings = GenerationSettings(max_new_tokens=6)
    written = generate(subject, ids, mask, settings, stop_early=not plain).tolist()
    for prompt, row in zip(prompts, written, strict=True):
        for count, token in enumerate(row):
            whole = torch.tensor([[*prompt, *row[:count]]])
            seen = (torch.arange(whole.size(1)) < len(prompt)).long()[None]
            inputs = {"prefix_mask": seen}
            logits = subject.lm_head(subject.decoder(subject.embedding(whole), _inputs(inputs)))[0, -1]
            assert int(logits[: VOCABULARY.size].argmax()) == token
            if token == VOCABULARY.eos:
                break


def test_another_objective_in_the_row_starts_afresh(tmp_path):
    base, child = tmp_path / "base.yaml", tmp_path / "child.yaml"
    base.write_text("train: [{corpus: c}]\nobjective: {name: in_one_row, of: {name: prefix_lm, length: 30}}")
    child.write_text("extends: base.yaml\nobjective: {of: {name: text_to_text, targets_length: 9}}")
    objective = load(child, [], DataSection).objective
    assert (objective.of.name, objective.of.targets_length, objective.of.inputs_length) == ("text_to_text", 9, 512)


def test_an_export_names_it():
    for settings in (LEARNED, ROTARY):
        with pytest.raises(UserError, match="prefix_attention: bidirectional"):
            hf_model_of(model(**settings).config)
