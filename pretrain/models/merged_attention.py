"""T5Gemma 2's attention to the targets so far and to the encoder's states, under one softmax (Zhang et al. 2025).

In the order of keys, the targets come first.
"""

import torch
from torch import Tensor

from pretrain.kernels.labels import labels
from pretrain.models.attention import (
    Attention,
    KeysAndValues,
    KeyValueCache,
    attend,
    flash_with_sums,
    for_each_head,
    takes_pattern,
)
from pretrain.models.attention_masks import AttentionInputs, AttentionMask
from pretrain.models.layers import one_use
from pretrain.models.logit_bias import MergedPattern, Pattern, by_kernel
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
        bias, dropout = mask.bias, self.dropout_rate if self.training else 0.0
        if isinstance(bias, MergedPattern):
            if takes_pattern(queries):
                return self.output(_by_kernel(queries, own, memory, bias, self.scale, dropout))
            bias = _matrix(bias, queries, own[0].size(2), memory[0].size(2))
        keys, values = (torch.cat(both, dim=2) for both in zip(own, memory, strict=True))
        return self.output(attend(queries, keys, values, bias, False, self.scale, dropout))


def _by_kernel(
    queries: Tensor,
    own: KeysAndValues,
    memory: KeysAndValues,
    pattern: MergedPattern,
    scale: float,
    dropout: float,
) -> Tensor:
    """Each part is attended to alone, and then counts by its share of the sum of all exponentials."""
    (found, sums), (other, its_sums) = (
        flash_with_sums(queries, (for_each_head(queries, keys), for_each_head(queries, values)), seen, scale, dropout)
        for (keys, values), seen in zip((own, memory), pattern, strict=True)
    )
    its_sums = its_sums.masked_fill(its_sums.isposinf(), float("-inf"))  # of queries that see no input
    both = torch.logaddexp2(sums, its_sums)
    mixed = torch.exp2(sums - both)[..., None] * found + torch.exp2(its_sums - both)[..., None] * other
    return mixed.to(queries.dtype)


def _matrix(pattern: MergedPattern, queries: Tensor, targets: int, inputs: int) -> Tensor:
    """The bias that means the same, broadcasting to (batch, heads, queries, targets + inputs)."""
    length, dtype, device = queries.size(2), queries.dtype, queries.device
    own = pattern.targets.matrix(length, targets, dtype, device)
    theirs = pattern.inputs.matrix(length, inputs, dtype, device)
    assert own is not None
    return _side_by_side(own, own.new_zeros(1, 1, 1, 1) if theirs is None else theirs, targets, inputs)


def _side_by_side(own: Tensor, theirs: Tensor, targets: int, inputs: int) -> Tensor:
    """(rows, 1, queries, targets + inputs) from two that broadcast to each part's keys."""
    rows, queries = max(own.size(0), theirs.size(0)), own.size(2)
    return torch.cat([own.expand(rows, 1, queries, targets), theirs.expand(rows, 1, queries, inputs)], dim=-1)


def merged_bias(
    x: Tensor, keys: int, length: int, window: Window | None, inputs: AttentionInputs
) -> Tensor | MergedPattern:
    """The bias of merged attention to `keys` targets and `length` inputs, for `x` (batch, queries, d_model).

    A matrix broadcasts to (batch, heads, queries, keys + length). A query always sees its own token, so one without any
    input sees no padding instead.
    """
    queries, segments, memory_segments = x.size(1), inputs.decoder_segment_ids, inputs.encoder_segment_ids
    key_mask = inputs.encoder_attention_mask
    if queries > 1 and by_kernel(x):
        return MergedPattern(
            Pattern(None, labels(queries, None, segments, segments), causal=True, window=window),
            Pattern(None, labels(queries, key_mask, segments, memory_segments), causal=False),
        )
    targets = visible(
        queries, keys, x.device, causal=True, window=window, query_segments=segments, key_segments=segments
    )
    memory = visible(
        queries,
        length,
        x.device,
        key_mask=key_mask,
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
