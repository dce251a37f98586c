"""The masks of attention: the tensors of a batch that decide what each query sees become one mask for each layer."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from data_pipeline.foundation.config_file import Section
from pretrain.config.models import LocalAndGlobal
from pretrain.functional.attention import by_kernel
from pretrain.functional.attention_bias import Pattern, Window, labels, masked, toeplitz, visible
from pretrain.models.positions import Rotary


class AttentionInputs(NamedTuple):
    """The tensors of a batch that attention reads, by their names. None: no padding, one example a row, positions
    from 0.

    Masks (batch, length) are nonzero at real tokens. Segments keep the examples of a packed row apart. Positions count
    within an example; relative positions don't need them, since packing keeps distances inside an example.
    `prefix_mask` (batch, length) is nonzero at tokens that all tokens of their example may see, before them or after.
    """

    encoder_attention_mask: Tensor | None = None
    encoder_segment_ids: Tensor | None = None
    encoder_positions: Tensor | None = None
    decoder_segment_ids: Tensor | None = None
    decoder_positions: Tensor | None = None
    prefix_mask: Tensor | None = None


class AttentionMask(NamedTuple):
    """The bias of a layer's attention logits, which includes all masks, and its rotary positions.

    `bias` broadcasts to (batch, heads, queries, keys). `is_causal` instead of a bias hides the future only, and lets
    the fastest kernels run. `rotary` is for the positions of queries, and in self-attention of keys; `memory_rotary`
    for those of the states that cross-attention reads.
    """

    bias: Tensor | Pattern | None = None
    rotary: Rotary | None = None
    is_causal: bool = False
    memory_rotary: Rotary | None = None


def self_attention_mask(
    x: Tensor,
    keys: int,
    rotary: Rotary | None = None,
    *,
    causal: bool,
    window: Window | None = None,
    diagonals: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    prefix: Tensor | None = None,
) -> AttentionMask:
    """The mask of `x` (batch, queries, d_model), the last of `keys` tokens. The arguments are those of `logit_bias`."""
    queries = x.size(1)
    if causal and all(one is None for one in (window, diagonals, key_mask, segments, prefix)):
        if queries == 1:
            return AttentionMask(None, rotary)
        if queries == keys:
            return AttentionMask(None, rotary, is_causal=True)
    masks = {"key_mask": key_mask, "query_segments": segments, "key_segments": segments, "prefix": prefix}
    return AttentionMask(logit_bias(x, keys, diagonals, causal=causal and queries > 1, window=window, **masks), rotary)


def logit_bias(
    x: Tensor,
    keys: int,
    diagonals: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    key_mask: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    prefix: Tensor | None = None,
) -> Tensor | Pattern | None:
    """The `bias` of `Attention` for queries `x` (batch, queries, d_model), in the form that `attend` computes fastest.

    `diagonals` is the bias of a `Pattern`; the rest are the masks of `visible`. Made once for all layers of a stack
    that see the same. This project's kernels don't know prefixes.
    """
    queries = x.size(1)
    if queries > 1 and prefix is None and by_kernel(x):
        seen = labels(queries, key_mask, query_segments, key_segments)
        everything = diagonals is None and seen is None and window is None and not causal
        return None if everything else Pattern(diagonals, seen, causal, window)
    mask = visible(
        queries,
        keys,
        x.device,
        causal=causal,
        window=window,
        key_mask=key_mask,
        query_segments=query_segments,
        key_segments=key_segments,
        prefix=prefix,
    )
    return masked(None if diagonals is None else toeplitz(diagonals, keys), mask, x.dtype)


def cross_attention_mask(x: Tensor, states: Tensor, inputs: AttentionInputs) -> AttentionMask:
    """Hides padding and other examples' states from `x` (batch, length, d_model)."""
    return AttentionMask(
        logit_bias(
            x,
            states.size(1),
            key_mask=inputs.encoder_attention_mask,
            query_segments=inputs.decoder_segment_ids,
            key_segments=inputs.encoder_segment_ids,
        )
    )


class LayerMasks:
    """Layers that see the same share one mask: a stack has one or two kinds of layers, where the config says so.

    `window` maps the config's number of tokens to the keys that a query of this stack sees.
    """

    def __init__(self, config: Section, num_layers: int, window: Callable[[int], Window]):
        settings = config if isinstance(config, LocalAndGlobal) else LocalAndGlobal()
        kinds = [settings.kind(layer) for layer in range(num_layers)]
        distinct = list(dict.fromkeys(kinds))
        self._kinds = [distinct.index(kind) for kind in kinds]
        self._distinct = [(None if kind.window is None else window(kind.window), kind.rope_base) for kind in distinct]

    def for_layers(
        self, new_mask: Callable[[Window | None, float], AttentionMask], queries: int, keys: int
    ) -> list[AttentionMask]:
        """The mask of each layer. `new_mask` makes one for a window, None if that hides nothing, and a rotary base."""
        masks = [
            new_mask(None if window is None or window.hides_nothing(queries, keys) else window, base)
            for window, base in self._distinct
        ]
        return [masks[kind] for kind in self._kinds]

    def pairs(self, tokens: int, pairs: int) -> int:
        """The pairs of queries and keys that all layers compute, for `tokens` whose examples have `pairs` of them.

        A window leaves as many pairs for each token as it is wide. That ignores where examples begin and end.
        """
        widths = [None if window is None else window.before + window.after + 1 for window, _ in self._distinct]
        seen = [pairs if width is None else min(pairs, width * tokens) for width in widths]
        return sum(seen[kind] for kind in self._kinds)


def before_only(tokens: int) -> Window:
    """The window of `tokens` in a causal layer: the query's own and those before it."""
    return Window(tokens - 1)


def positions_from(start: int, length: int, device: torch.device, given: Tensor | None = None) -> Tensor:
    """Positions (length,) from `start` on, or the positions (batch, length) `given` for packed examples."""
    return torch.arange(start, start + length, device=device) if given is None else given


def real_positions(mask: Tensor) -> Tensor:
    """Positions (batch, length) that count only real tokens: [0, 0, 1, 1, 1] → [0, 0, 0, 1, 2]."""
    return (mask.bool().cumsum(dim=1) - 1).clamp(min=0)
