"""BART: its start, its marks and its rates of dropout."""

import pytest
import torch

from pretrain.models import BartConfig, build

PAD, EOS = 1, 2


def tiny(**changes):
    sizes = {"vocab_size": 500, "pad_id": PAD, "eos_id": EOS, "d_model": 64, "d_ff": 96, "num_heads": 4}
    return BartConfig(**{**sizes, "num_encoder_layers": 2, "num_decoder_layers": 3, "max_positions": 200, **changes})


def ids(*shape, seed=0, vocab_size=500):
    return torch.randint(4, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def randomise(model):
    """Draws weights large enough for each of them to matter."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        std = 0.1 if "norm" in name or parameter.dim() > 1 else 0.05
        torch.nn.init.normal_(parameter, mean=float("norm" in name and name.endswith("weight")), std=std)
    return model


def test_weights_at_the_start():
    """Matrices are drawn from N(0, 0.02²); biases and the row for padding are zero."""
    torch.manual_seed(0)
    model = build(tiny(vocab_size=2000, d_model=256, d_ff=512))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert parameter.unique().tolist() == [float("norm" in name and name.endswith("weight"))], name
    assert not model.embedding.weight[PAD].any()
    assert model.embedding.weight[EOS].all()
    assert model.lm_head.weight is model.embedding.weight
    assert model.encoder.inputs.positions.weight.shape == (202, 256)


def test_padding_learns_as_an_output_and_not_as_an_input():
    model = randomise(build(tiny())).eval()
    states = model.encode(torch.tensor([[5, PAD, 6]]))
    states.sum().backward()
    assert not model.embedding.weight.grad[PAD].any()
    assert model.embedding.weight.grad[5].any()


def test_a_mark_that_pads_too_is_learnt():
    model = build(tiny(pad_id=2, eos_id=2))
    assert model.embedding.weight[2].any()


def test_the_decoder_starts_from_the_end_mark():
    """As fairseq's prev_output_tokens: the target with its EOS moved to the front."""
    model, inputs, labels = randomise(build(tiny())).eval(), ids(1, 9), torch.tensor([[0, 7, 8, 9, EOS]])
    given = model(inputs, labels, decoder_input_ids=torch.tensor([[EOS, 0, 7, 8, 9]]))["labels"]
    assert torch.equal(model(inputs, labels)["labels"], given)
    assert model.config.decoder_start_id == EOS


def test_dropout_belongs_to_training_and_each_rate_counts():
    batch = ids(2, 5), ids(2, 4)
    for rates in ({"dropout_rate": 0.2}, {"attention_dropout_rate": 0.2}, {"activation_dropout_rate": 0.2}):
        model = randomise(build(tiny(**{"dropout_rate": 0.0, **rates})))
        evaluated = model.eval()(*batch)["labels"]
        assert not torch.equal(evaluated, model.train()(*batch)["labels"])
