"""BART's marks: which are learnt, and from which the decoder starts."""

import torch

from tests.pretrain.small_models import as_at_the_start, ids, made


def test_padding_learns_as_an_output_and_not_as_an_input():
    model = made("bart", pad_id=1, eos_id=2)
    model.encode(torch.tensor([[5, 1, 6]])).sum().backward()
    assert not model.embedding.weight.grad[1].any()
    assert model.embedding.weight.grad[5].any()
    assert not as_at_the_start("bart", pad_id=1, eos_id=2).embedding.weight[1].any()


def test_a_mark_that_pads_too_is_learnt():
    assert as_at_the_start("bart", pad_id=2, eos_id=2).embedding.weight[2].any()


def test_the_decoder_starts_from_the_end_mark():
    """As fairseq's prev_output_tokens: the target with its EOS moved to the front."""
    model, inputs, labels = made("bart", pad_id=1, eos_id=2), ids(1, 9), torch.tensor([[0, 7, 8, 9, 2]])
    given = model(inputs, labels, decoder_input_ids=torch.tensor([[2, 0, 7, 8, 9]]))["labels"]
    assert torch.equal(model(inputs, labels)["labels"], given)
