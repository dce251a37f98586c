"""The encoder-only model, compared with its paper's numbers: sizes, losses, next sentences."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from pretrain.models import EncoderOnlyConfig, build
from tests.pretrain.placed import placed
from tests.pretrain.small_models import as_at_the_start, ids, made
from tests.tables import each


def batch_of(rows=3, length=12, seed=0, **changes):
    """Every third token is predicted; the second text begins in the middle."""
    labels = ids(rows, length, seed=seed + 1)
    labels[:, torch.arange(length) % 3 != 1] = -100
    return {
        "encoder_input_ids": ids(rows, length, seed=seed),
        "labels": labels,
        "token_type_ids": (torch.arange(length) >= length // 2).long().expand(rows, length),
        "next_sentence_labels": torch.arange(rows) % 2,
        **changes,
    }


@pytest.fixture(scope="module")
def model(device):
    return placed(made("bert").float(), device)


@each("name, bare, whole", [("bert-base", 109_482_240, 110_106_428), ("bert-large", 335_141_888, 336_226_108)])
def test_parameters_are_those_of_transformers(name, bare, whole):
    """`bare` counts the pooler, but not the rest of the heads."""
    transformers = pytest.importorskip("transformers")
    config = EncoderOnlyConfig(**yaml.safe_load(Path(f"configs/models/{name}.yaml").read_text())["model"])
    theirs = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_attention_heads=config.num_heads,
        num_hidden_layers=config.num_layers,
    )
    with torch.device("meta"):
        model, reference = build(config), transformers.BertForPreTraining(theirs)
    heads = [*model.masked_lm.parameters(), model.lm_head.bias, *model.next_sentence.classifier.parameters()]
    assert model.num_parameters() == reference.num_parameters() == whole
    assert model.num_parameters() - sum(map(torch.numel, heads)) == reference.bert.num_parameters() == bare


def test_without_next_sentences_nothing_is_left_of_them():
    """As in RoBERTa, there are no pooler, classifier and token types."""
    d = 32
    difference = as_at_the_start("bert").num_parameters() - as_at_the_start("roberta").num_parameters()
    assert difference == (d * d + d) + (2 * d + 2) + 2 * d


@torch.no_grad()
def test_first_loss_of_next_sentences_is_that_of_a_uniform_guess():
    losses = as_at_the_start("bert", d_model=512, d_ff=2048)(**batch_of(8, 40))
    assert losses["next_sentence_labels"].mean().item() == pytest.approx(math.log(2), abs=0.3)


def test_the_loss_of_next_sentences_is_the_cross_entropy_of_its_logits():
    model, batch = made("bert"), batch_of()
    batch["next_sentence_labels"] = torch.tensor([1, 0, -100])
    states = model.encode(batch["encoder_input_ids"], token_type_ids=batch["token_type_ids"])
    losses = model(**batch)
    classes = torch.tensor([0, 1, -100])  # the first class is that of texts that follow, as in BERT's release
    expected = torch.nn.functional.cross_entropy(model.next_sentence(states), classes, reduction="none")
    torch.testing.assert_close(losses["next_sentence_labels"].double(), expected, rtol=0, atol=1e-4)


def test_logits_are_made_for_predicted_tokens_alone(model):
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, losses: seen.append(inputs[0].shape[:-1]))
    batch = batch_of()
    model(**batch)
    hook.remove()
    assert seen == [((batch["labels"] != -100).sum(),)]


def test_a_batch_without_a_predicted_token_costs_nothing(model):
    """A batch of damaged rows alone has no next sentences either, yet other ranks wait for its gradients."""
    losses = model(ids(3, 12), torch.full((3, 12), -100))
    assert {name: values.tolist() for name, values in losses.items()} == {
        "labels": [[0.0] * 12] * 3,
        "next_sentence_labels": [0.0] * 3,
    }
    model.zero_grad()
    sum(values.sum() for values in losses.values()).backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_the_z_loss_is_of_tokens_and_of_training_only():
    model, batch = made("bert", z_loss=0.1), batch_of()
    evaluated, trained = model(**batch), model.train()(**batch)
    counted = batch["labels"] != -100
    assert (trained["labels"][counted] > evaluated["labels"][counted]).all()
    assert torch.equal(trained["next_sentence_labels"], evaluated["next_sentence_labels"])
