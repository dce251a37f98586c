"""The positions of the modern T5."""

import torch

from pretrain.models.attention import AttentionInputs
from pretrain.models.modern import ends_of_inputs
from tests.support.exported import randomise
from tests.support.small_models import as_at_the_start, ids


def test_targets_stand_after_the_last_token_of_their_input():
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert ends_of_inputs(4, AttentionInputs(mask)).tolist() == [[3], [4], [0]]


def turned(x, first, base=1e4):
    """Rotary positions of x (heads, length, width) from `first` on, as products of complex numbers in fp64."""
    one, other = x.double().chunk(2, dim=-1)
    width = one.size(-1)
    angles = (first + torch.arange(x.size(1), dtype=torch.float64))[:, None] * base ** (-torch.arange(width) / width)
    found = torch.complex(one, other) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([found.real, found.imag], dim=-1)


@torch.no_grad()
def test_positions_of_cross_attention_go_on_where_those_of_the_input_end():
    """Against the formula: 7 inputs stand at 0 … 6, and the 5 targets at 7 … 11."""
    model = randomise(as_at_the_start("modern", qk_norm=False)).double()
    attention = model.decoder.layers[0].cross_attention
    seen = {}
    attention.o.register_forward_pre_hook(lambda _, given: seen.update(context=given[0]))
    attention.q.register_forward_hook(lambda _, given, out: seen.update(queries=out))
    states = model.encode(ids(1, 7))
    model.decode(ids(1, 5, seed=1), states)
    queries, keys, values = (
        one[0].unflatten(-1, (-1, 8)).transpose(0, 1)
        for one in (seen["queries"], attention.k(states), attention.v(states))
    )
    keys, values = (one.repeat_interleave(2, dim=0) for one in (keys, values))
    weights = (turned(queries, 7) @ turned(keys, 0).mT / 8**0.5).softmax(dim=-1)
    expected = (weights @ values).transpose(0, 1).flatten(1)
    torch.testing.assert_close(seen["context"][0], expected, rtol=0, atol=1e-5)
