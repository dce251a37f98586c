"""The decoder-only and encoder-only models, compared with transformers' GPT-2 and BERT in both directions."""

import pytest
import torch

from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.byte_level_bpe import ByteLevelBPE
from pretrain.huggingface import export, load_state
from pretrain.models import DecoderOnlyConfig, EncoderOnlyConfig, build

transformers = pytest.importorskip("transformers")

SIZES = {"d_model": 48, "d_ff": 96, "num_heads": 4, "num_layers": 3}


@pytest.fixture(scope="module")
def tokenizer(byte_level_bpe):
    """GPT-2's ids and a mask token."""
    return Tokenizer(ByteLevelBPE.read(byte_level_bpe / "gpt2"), ["<mask>"])


def decoder(**changes):
    return DecoderOnlyConfig(**{**SIZES, "vocab_size": 500, "max_positions": 40, "dropout_rate": 0.1, **changes})


def encoder(**changes):
    return EncoderOnlyConfig(**{**SIZES, "vocab_size": 500, "max_positions": 40, "dropout_rate": 0.1, **changes})


def randomise(model):
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm.weight" in name.lower() or "ln_" in name), std=0.15)
    return model.eval()


def ids(*shape, seed=0, vocab_size=500):
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def padded_rows():
    """(ids, mask): rows of 30, 22 and 9 tokens."""
    mask = (torch.arange(30) < torch.tensor([30, 22, 9])[:, None]).long()
    return ids(3, 30), mask


def loaded(kind, directory):
    model, report = kind.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def gpt2(**changes):
    sizes = {"vocab_size": 500, "n_embd": 48, "n_inner": 96, "n_head": 4, "n_layer": 3, "n_positions": 40}
    special = {"bos_token_id": 499, "eos_token_id": 499}
    return randomise(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **special, **changes})))


def bert(kind, **changes):
    sizes = {"vocab_size": 500, "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 40}
    config = transformers.BertConfig(**{**sizes, "num_attention_heads": 4, "num_hidden_layers": 3, **changes})
    return randomise(kind(config))


def imported(reference, directory):
    reference.save_pretrained(directory)
    config, state = load_state(directory)
    model = build(config).eval()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
def test_logits_and_gradients_are_those_of_gpt2(activation, tmp_path):
    reference = gpt2(activation_function=activation)
    model = imported(reference, tmp_path)
    inputs, mask = padded_rows()
    labels = inputs.masked_fill(mask == 0, -100)
    expected = reference(input_ids=inputs, attention_mask=mask, labels=labels)
    found = model.decode(inputs, attention_mask=mask)
    assert expected.logits.std() > 0.5  # the comparison is not one of zeros
    assert (found - expected.logits)[mask.bool()].abs().max() < 1e-4
    shifted = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)
    loss = model(inputs, shifted, encoder_attention_mask=mask)["labels"].sum() / (shifted != -100).sum()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    loss.backward()
    expected.loss.backward()
    grad = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for ours, theirs in [
        (model.embedding.weight, grad["transformer.wte.weight"]),
        (model.decoder.positions.weight, grad["transformer.wpe.weight"]),
        (model.decoder.layers[0].attention.o.weight, grad["transformer.h.0.attn.c_proj.weight"].t()),
        (model.decoder.layers[1].feed_forward.wi.weight, grad["transformer.h.1.mlp.c_fc.weight"].t()),
        (model.decoder.layers[2].attention.k.weight, grad["transformer.h.2.attn.c_attn.weight"][:, 48:96].t()),
        (model.decoder.layers[2].attention.v.bias, grad["transformer.h.2.attn.c_attn.bias"][96:]),
        (model.decoder.layers[2].attention_norm.bias, grad["transformer.h.2.ln_1.bias"]),
        (model.decoder.final_norm.weight, grad["transformer.ln_f.weight"]),
    ]:
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-5)


def test_padding_before_a_prompt_is_gpt2s(tmp_path):
    """transformers' generate counts positions from the first real token; its forward needs them as an argument."""
    reference = gpt2()
    model = imported(reference, tmp_path)
    inputs, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = reference(input_ids=inputs, attention_mask=mask, position_ids=positions).logits
        found = model.decode(inputs, attention_mask=mask)
        assert (found - expected)[mask.bool()].abs().max() < 1e-4
        generated = reference.generate(
            inputs, attention_mask=mask, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0
        )
        cache, given = model.new_cache(), inputs
        tokens = inputs
        for _ in range(8):
            given = model.decode(given, cache, mask)[:, -1:].argmax(dim=-1)
            tokens, mask = torch.cat([tokens, given], dim=1), torch.cat([mask, torch.ones(2, 1).long()], dim=1)
    assert tokens.tolist() == generated.tolist()


@pytest.mark.parametrize("kind", ["BertForPreTraining", "BertForMaskedLM"])
def test_logits_losses_and_gradients_are_those_of_bert(kind, tmp_path):
    reference = bert(getattr(transformers, kind))
    model = imported(reference, tmp_path)
    assert model.config.next_sentence == (kind == "BertForPreTraining")
    inputs, mask = padded_rows()
    types = (torch.arange(30) > 5).long().expand(3, 30)
    labels = ids(3, 30, seed=2).masked_fill((mask == 0) | (torch.arange(30) % 4 != 1), -100)
    follows = torch.tensor([1, 0, 1])
    targets = {"labels": labels}
    batch = {"encoder_input_ids": inputs, "encoder_attention_mask": mask, "token_type_ids": types, "labels": labels}
    if model.config.next_sentence:
        targets["next_sentence_label"] = 1 - follows  # transformers': 0 where the second text follows
        batch["next_sentence_labels"] = follows
    expected = reference(input_ids=inputs, attention_mask=mask, token_type_ids=types, **targets)
    states = model.encode(inputs, mask, types)
    logits = expected.prediction_logits if model.config.next_sentence else expected.logits
    assert logits.std() > 0.5
    assert (model.masked_lm_logits(states) - logits)[mask.bool()].abs().max() < 1e-4
    losses = model(**batch)
    loss = losses["labels"].sum() / (labels != -100).sum()
    if model.config.next_sentence:
        assert (model.next_sentence(states) - expected.seq_relationship_logits).abs().max() < 1e-4
        loss = loss + losses["next_sentence_labels"].mean()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-4)
    loss.backward()
    expected.loss.backward()
    grad = {name: parameter.grad for name, parameter in reference.named_parameters()}
    layer = model.encoder.layers[1]
    pairs = [
        (model.embedding.weight, "bert.embeddings.word_embeddings.weight"),
        (model.encoder.token_types.weight, "bert.embeddings.token_type_embeddings.weight"),
        (model.encoder.embedding_norm.bias, "bert.embeddings.LayerNorm.bias"),
        (layer.attention.q.weight, "bert.encoder.layer.1.attention.self.query.weight"),
        (layer.attention_norm.weight, "bert.encoder.layer.1.attention.output.LayerNorm.weight"),
        (layer.feed_forward.wo.weight, "bert.encoder.layer.1.output.dense.weight"),
        (model.masked_lm.transform.weight, "cls.predictions.transform.dense.weight"),
        (model.lm_head.bias, "cls.predictions.bias"),
    ]
    if model.config.next_sentence:
        pairs.append((model.next_sentence.pooler.weight, "bert.pooler.dense.weight"))
    for ours, theirs in pairs:
        assert grad[theirs].abs().max() > 1e-4
        expected_gradient = grad[theirs].clone()
        if theirs.endswith("word_embeddings.weight"):  # transformers ignores the gradient of padding's row as an input
            ours.grad[0] = expected_gradient[0] = 0
        torch.testing.assert_close(ours.grad, expected_gradient, rtol=1e-4, atol=1e-5)


def rewritten(directory, rename):
    """Rewrites the saved weights: those that `rename` names, under their new names."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def test_names_in_which_gpt2_and_bert_were_published_are_known(tmp_path):
    """gpt2 has the names of the bare model; bert-base-uncased calls the weights of norms gamma and beta."""
    gpt2().save_pretrained(tmp_path / "gpt2")
    _, expected = load_state(tmp_path / "gpt2")
    rewritten(tmp_path / "gpt2", lambda name: name.removeprefix("transformer."))
    _, found = load_state(tmp_path / "gpt2")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    bert(transformers.BertForPreTraining).save_pretrained(tmp_path / "bert")
    _, expected = load_state(tmp_path / "bert")
    greek = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for today, then in greek.items():
        rewritten(tmp_path / "bert", lambda name, today=today, then=then: name.replace(today, then))
    _, found = load_state(tmp_path / "bert")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_our_models_cannot_be_is_refused(tokenizer, tmp_path):
    gpt2(scale_attn_by_inverse_layer_idx=True).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="scale_attn_by_inverse_layer_idx is True"):
        load_state(tmp_path / "gpt2")
    gpt2().save_pretrained(tmp_path / "lost")
    rewritten(tmp_path / "lost", lambda name: name.replace("h.1.mlp.c_fc.bias", "h.1.mlp.c_fd.bias"))
    with pytest.raises(UserError, match=r"transformer\.h\.1\.mlp\.c_fc\.bias is missing; .*c_fd\.bias is not of the"):
        load_state(tmp_path / "lost")
    model = build(decoder(positions="rotary", max_positions=None, vocab_size=tokenizer.size))
    with pytest.raises(UserError, match="no GPT-2 with positions: rotary"):
        export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
    model = build(decoder(subtract_positions="without_norm", vocab_size=tokenizer.size))
    with pytest.raises(UserError, match="no GPT-2 with subtract_positions: without_norm"):
        export(model.state_dict(), model.config, tokenizer, tmp_path / "out")
