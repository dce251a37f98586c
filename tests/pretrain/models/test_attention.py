"""Attention by its definition: the soft cap, and which keys a query sees."""

import torch

from pretrain.models.functional.attention_backends import Visibility, eager
from tests.support.tables import each


@each("causal, cap", [(False, 0.7), (True, 0.7), (True, None)])
def test_eager_attention_is_the_softmax_of_capped_logits(causal, cap):
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 3, 9, 4, dtype=torch.float64)
    bias = None if causal else torch.randn(3, 9, 9, dtype=torch.float64)
    logits = 2.0 * queries @ keys.mT
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    logits = logits + (0.0 if bias is None else bias)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    logits = logits.masked_fill(hidden, -torch.inf) if causal else logits
    found = eager(queries, keys, values, bias, causal, 2.0, 0.0, cap)
    torch.testing.assert_close(found, torch.softmax(logits, dim=-1) @ values)


@each("masking", ["padding", "segments"])
def test_a_query_that_would_see_no_key_sees_all_and_the_others_see_theirs(masking):
    """Kernels that compute a softmax twice give a wrong gradient for a query without keys."""
    alone = torch.tensor([[0, 0, 0]])
    seen = torch.tensor([[1, 1, 0]])
    if masking == "padding":
        visible = Visibility(key_mask=torch.cat([alone, seen]))
        expected = torch.tensor([[[0, 0, 0]] * 2, [[1, 1, 0]] * 2], dtype=torch.bool)
    else:
        visible = Visibility(query_segments=torch.tensor([[2, 1]]), key_segments=seen)
        expected = torch.tensor([[[0, 0, 0], [1, 1, 0]]], dtype=torch.bool)
    empty = ~expected.any(dim=-1, keepdim=True)
    assert empty.any()
    assert not empty.all()
    device = torch.device("cpu")
    assert torch.equal(visible.mask(2, 3, device, allow_empty=True)[:, 0].expand_as(expected), expected)
    assert torch.equal(visible.mask(2, 3, device)[:, 0].expand_as(expected), expected | empty)
