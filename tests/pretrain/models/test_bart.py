"""BART's row of padding."""

import torch

from tests.support.small_models import as_at_the_start, made


def test_padding_learns_as_an_output_and_not_as_an_input():
    model = made("bart", pad_id=1, eos_id=2)
    model.encode(torch.tensor([[5, 1, 6]])).sum().backward()
    assert not model.embedding.weight.grad[1].any()
    assert model.embedding.weight.grad[5].any()
    assert not as_at_the_start("bart", pad_id=1, eos_id=2).embedding.weight[1].any()
    assert as_at_the_start("bart", pad_id=2, eos_id=2).embedding.weight[2].any()  # a mark that pads too is learnt
