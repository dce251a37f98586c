"""BERT: logits of predicted tokens alone, and its settings."""

import pytest
import torch

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from pretrain.config.models import EncoderOnlyConfig
from tests.support.small_models import MODELS, ids, made, placed


def batch_of_bert():
    """Every third token is predicted; the second half has another type."""
    labels = ids(3, 12, seed=1)
    labels[:, torch.arange(12) % 3 != 1] = -100
    return {
        "encoder_input_ids": ids(3, 12),
        "labels": labels,
        "token_type_ids": (torch.arange(12) >= 6).long().expand(3, 12),
    }


@pytest.fixture(scope="module")
def bert(device):
    return placed(made("bert").float(), device)


def test_logits_are_made_for_predicted_tokens_alone(bert):
    seen = []
    hook = bert.lm_head.register_forward_hook(lambda module, inputs, losses: seen.append(inputs[0].shape[:-1]))
    batch = batch_of_bert()
    bert(**batch)
    hook.remove()
    assert seen == [((batch["labels"] != -100).sum(),)]


def test_a_batch_without_a_predicted_token_costs_nothing(bert):
    """A batch of damaged rows alone has no loss, yet other ranks wait for its gradients."""
    losses = bert(ids(3, 12), torch.full((3, 12), -100))
    assert {name: values.tolist() for name, values in losses.items()} == {"labels": [[0.0] * 12] * 3}
    bert.zero_grad()
    losses["labels"].sum().backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in bert.parameters())


def test_the_z_loss_is_of_training_only():
    model, batch = made("bert", z_loss=0.1), batch_of_bert()
    evaluated, trained = model(**batch), model.train()(**batch)
    counted = batch["labels"] != -100
    assert (trained["labels"][counted] > evaluated["labels"][counted]).all()


def test_the_key_next_sentence_of_earlier_run_files_is_refused_unless_it_is_off():
    settings = {"vocab_size": 96, **MODELS["bert"]}
    off = check({**settings, "next_sentence": False}, EncoderOnlyConfig, "a")
    assert off == check(settings, EncoderOnlyConfig, "a")
    with pytest.raises(UserError, match=r"^a: next_sentence: gone; leave it out: an encoder learns from masked tokens"):
        check({**settings, "next_sentence": True}, EncoderOnlyConfig, "a")
