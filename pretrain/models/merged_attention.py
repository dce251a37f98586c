"""T5Gemma 2's attention to the targets so far and to the encoder's states, under one softmax (Zhang et al. 2025).

In the order of keys, the targets come first.
"""

import torch
from torch import Tensor

from pretrain.models.attention import Attention, KeysAndValues, KeyValueCache, attend
from pretrain.models.attention_masks import AttentionInputs, AttentionMask
from pretrain.models.layers import one_use
from pretrain.models.visibility import Window, masked, visible


class MergedAttention(Attention):
    """Attention to the targets so far and to the encoder's states at once."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        states: Tensor,
        mask: AttentionMask,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        """`x` (batch, queries, d_model) attends to itself and to `states` (batch, inputs, d_model).

        The mask's bias is that of `merged_bias`. With a cache, `x` are new tokens only.
        """
        x, states = one_use(x), one_use(states)
        queries = self.queries(x, mask.rotary)

        def project() -> KeysAndValues:
            return self.keys_and_values(x, mask.rotary)

        def project_memory() -> KeysAndValues:
            return self.keys_and_values(states, mask.memory_rotary)

        own = project() if cache is None else cache[0].update(project)
        memory = project_memory() if cache is None else cache[1].update(project_memory)
        keys, values = (torch.cat(both, dim=2) for both in zip(own, memory, strict=True))
        dropout = self.dropout_rate if self.training else 0.0
        return self.output(attend(queries, keys, values, mask.bias, False, self.scale, dropout))


def _side_by_side(own: Tensor, theirs: Tensor, targets: int, inputs: int) -> Tensor:
    """(rows, 1, queries, targets + inputs) from two that broadcast to each part's keys."""
    rows, queries = max(own.size(0), theirs.size(0)), own.size(2)
    return torch.cat([own.expand(rows, 1, queries, targets), theirs.expand(rows, 1, queries, inputs)], dim=-1)


def merged_bias(x: Tensor, keys: int, length: int, window: Window | None, inputs: AttentionInputs) -> Tensor:
    """The bias of merged attention to `keys` targets and `length` inputs, for `x` (batch, queries, d_model).

    It broadcasts to (batch, heads, queries, keys + length). A query always sees its own token, so one without any
    input sees no padding instead.
    """
    queries, segments, memory_segments = x.size(1), inputs.decoder_segment_ids, inputs.encoder_segment_ids
    targets = visible(
        queries, keys, x.device, causal=True, window=window, query_segments=segments, key_segments=segments
    )
    memory = visible(
        queries,
        length,
        x.device,
        key_mask=inputs.encoder_attention_mask,
        query_segments=segments,
        key_segments=memory_segments,
        allow_empty=True,
    )
    assert targets is not None
    if memory is None:
        memory = targets.new_ones(1, 1, 1, 1)
    bias = masked(None, _side_by_side(targets, memory, keys, length), x.dtype)
    assert bias is not None
    return bias
