"""Losses and gradients of the decoder-only and encoder-only models are those of transformers' GPT-2 and BERT.

test_exports.py and test_import_saved.py compare their logits and texts in both directions.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from pretrain.huggingface import export, load_state
from pretrain.models import DecoderOnlyConfig, build
from tests.pretrain.exported import pairs_of_gradients, randomise
from tests.tables import each

transformers = pytest.importorskip("transformers")

ACTIVATIONS = ["gelu_new", "gelu", "relu"]


def gpt2(**changes):
    sizes = {"vocab_size": 500, "n_embd": 48, "n_inner": 96, "n_head": 4, "n_layer": 3, "n_positions": 40}
    special = {"bos_token_id": 499, "eos_token_id": 499}
    return randomise(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **special, **changes})))


def bert(kind):
    sizes = {"vocab_size": 500, "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 40}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, num_hidden_layers=3)
    return randomise(getattr(transformers, kind)(config))


def imported(reference, directory):
    reference.save_pretrained(directory)
    config, state = load_state(directory)
    model = build(config).eval()
    model.load_state_dict(state)
    return model


def ids(*shape, seed=0):
    return torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(seed))


MASK = (torch.arange(30) < torch.tensor([30, 22, 9])[:, None]).long()


def assert_gradients_are_those_of(reference, model):
    """Keys' biases have none: softmax cancels them."""
    pairs = pairs_of_gradients(model, reference)
    assert len(pairs) > 35
    for name, (found, expected) in pairs.items():
        if not name.endswith("key.bias"):
            assert expected.abs().max() > 1e-4, name
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


@each("activation", ACTIVATIONS)
def test_losses_and_gradients_are_those_of_gpt2(activation, tmp_path):
    reference = gpt2(activation_function=activation)
    model = imported(reference, tmp_path)
    inputs = ids(3, 30)
    labels = inputs.masked_fill(MASK == 0, -100)
    expected = reference(input_ids=inputs, attention_mask=MASK, labels=labels).loss
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    loss = model(inputs, shifted, encoder_attention_mask=MASK)["labels"].sum() / (shifted != -100).sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    loss.backward()
    expected.backward()
    assert_gradients_are_those_of(reference, model)


@each("kind", ["BertForPreTraining", "BertForMaskedLM"])
def test_losses_and_gradients_are_those_of_bert(kind, tmp_path):
    """With token types, which no text of test_exports.py has."""
    reference = bert(kind)
    model = imported(reference, tmp_path)
    assert model.config.next_sentence == (kind == "BertForPreTraining")
    inputs = ids(3, 30)
    types = (torch.arange(30) > 5).long().expand(3, 30)
    labels = ids(3, 30, seed=2).masked_fill((MASK == 0) | (torch.arange(30) % 4 != 1), -100)
    follows = torch.tensor([1, 0, 1])
    targets, batch = {"labels": labels}, {"labels": labels}
    if model.config.next_sentence:
        targets["next_sentence_label"] = 1 - follows  # transformers': 0 where the second text follows
        batch["next_sentence_labels"] = follows
    expected = reference(input_ids=inputs, attention_mask=MASK, token_type_ids=types, **targets)
    states = model.encode(inputs, MASK, types)
    logits = expected.prediction_logits if model.config.next_sentence else expected.logits
    assert logits.std() > 0.5
    assert (model.masked_lm_logits(states) - logits)[MASK.bool()].abs().max() < 1e-4
    losses = model(encoder_input_ids=inputs, encoder_attention_mask=MASK, token_type_ids=types, **batch)
    loss = losses["labels"].sum() / (labels != -100).sum()
    if model.config.next_sentence:
        assert (model.next_sentence(states) - expected.seq_relationship_logits).abs().max() < 1e-4
        loss = loss + losses["next_sentence_labels"].mean()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-4)
    loss.backward()
    expected.loss.backward()
    theirs = (
        reference.bert.embeddings.word_embeddings.weight
    )  # transformers gives padding's row no gradient as an input
    theirs.grad[0] = model.embedding.weight.grad[0] = 0
    assert_gradients_are_those_of(reference, model)


def rewritten(directory, rename):
    """Rewrites the saved weights: those that `rename` names, under their new names."""
    path = directory / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def greek(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


@each("kind, rename", [("gpt2", lambda name: name.removeprefix("transformer.")), ("BertForPreTraining", greek)])
def test_names_in_which_gpt2_and_bert_were_published_are_known(kind, rename, tmp_path):
    """gpt2 has the names of the bare model; bert-base-uncased calls the weights of norms gamma and beta."""
    (gpt2() if kind == "gpt2" else bert(kind)).save_pretrained(tmp_path)
    _, expected = load_state(tmp_path)
    rewritten(tmp_path, rename)
    _, found = load_state(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_gpt2_has_not_is_refused(byte_level_bpe, tmp_path):
    tokenizer = Tokenizer(ByteLevelBPE.read(byte_level_bpe / "gpt2"), ["<mask>"])
    sizes = {"d_model": 48, "d_ff": 96, "num_heads": 4, "num_layers": 1, "vocab_size": tokenizer.size}
    for changes in (
        {"positions": "rotary", "max_positions": None},
        {"subtract_positions": "without_norm", "max_positions": 40},
    ):
        model = build(DecoderOnlyConfig(**sizes, **changes))
        (key, value), *_ = changes.items()
        with pytest.raises(UserError, match=f"no GPT-2 with {key}: {value}"):
            export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
