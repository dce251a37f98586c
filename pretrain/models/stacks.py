"""The stacks of today's encoder-decoders: an encoder and a decoder of the layers in `blocks`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.models.attention_masks import (
    AttentionInputs,
    AttentionMask,
    LayerMasks,
    before_only,
    cross_attention_mask,
    self_attention_mask,
)
from pretrain.models.blocks import Block, DecoderLayer, EncoderLayer
from pretrain.models.config.modern import ModernConfig
from pretrain.models.config.t5gemma import Gemma
from pretrain.models.encoder_decoder import Caches, length_of
from pretrain.models.layers import Dropout, times_root
from pretrain.models.positions import LearnedPositions, Rotary, positions_from, rotary_embedding
from pretrain.models.visibility import Window

StacksConfig = Gemma | ModernConfig


class Stack(nn.Module):
    """Dropout, the layers, a final norm, dropout; rotary positions from 0 in self-attention.

    `window` as in `LayerMasks`. `scale_embedding`: embeddings are multiplied by √d_model, with muP by that of the base.
    `max_positions`: that many learned positions replace the rotary ones.
    """

    def __init__(
        self,
        config: StacksConfig,
        block: Block,
        layers: list[nn.Module],
        window: Callable[[int], Window],
        scale_embedding: bool,
        max_positions: int | None = None,
    ):
        super().__init__()
        self.d_kv, self.scale_embedding, self.widening = block.heads.d_kv, scale_embedding, config.widening
        width, std = block.heads.d_model, config.init_std
        self.positions = LearnedPositions(max_positions, width, std) if max_positions else None
        self.layer_masks = LayerMasks(config, len(layers), window)
        self.layers = nn.ModuleList(layers)
        self.final_norm = block.new_norm()
        self.dropout = Dropout(block.dropout_rate)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer."""
        x = times_root(x, self.widening) if self.scale_embedding else x
        return self.dropout(x if self.positions is None else x + self.positions(positions))

    def rotary(self, positions: Tensor, base: float, dtype: torch.dtype) -> Rotary | None:
        """That of self-attention; None with learned positions."""
        return rotary_embedding(positions, self.d_kv, dtype, base) if self.positions is None else None


class Encoder(Stack):
    """Every layer sees both directions."""

    def __init__(
        self,
        config: StacksConfig,
        block: Block,
        num_layers: int,
        window: Callable[[int], Window],
        scale_embedding: bool = False,
        max_positions: int | None = None,
    ):
        layers: list[nn.Module] = [EncoderLayer(block) for _ in range(num_layers)]
        super().__init__(config, block, layers, window, scale_embedding, max_positions)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape."""
        length = x.size(1)
        positions = positions_from(0, length, x.device, inputs.encoder_positions)
        x = self.add_positions(x, positions)

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            return self_attention_mask(
                x,
                length,
                self.rotary(positions, base, x.dtype),
                causal=False,
                window=window,
                key_mask=inputs.encoder_attention_mask,
                segments=inputs.encoder_segment_ids,
            )

        masks = self.layer_masks.for_layers(new_mask, length, length)
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i])
        return self.dropout(self.final_norm(x))


class Decoder(Stack):
    """Self-attention is causal. Cross-attention sees the whole input, of width `memory_width`.

    `cross_rotation`: cross-attention has rotary positions too, and those of targets go on where the input's end.
    """

    def __init__(
        self,
        config: StacksConfig,
        block: Block,
        num_layers: int,
        memory_width: int,
        scale_embedding: bool = False,
        max_positions: int | None = None,
        cross_rotation: bool = False,
    ):
        layers: list[nn.Module] = [DecoderLayer(block, memory_width) for _ in range(num_layers)]
        super().__init__(config, block, layers, before_only, scale_embedding, max_positions)
        self.cross_base = config.rope_base if cross_rotation else None

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries, past_length = x.size(1), length_of(cache)
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.decoder_positions)
        x = self.add_positions(x, positions)
        cross_mask = cross_attention_mask(x, encoder_states, inputs)
        if self.cross_base is not None:
            length = encoder_states.size(1)
            input_positions = positions_from(0, length, x.device, positions_in_segments(inputs.encoder_segment_ids))
            positions = positions + ends_of_inputs(length, inputs)
            rotary, memory_rotary = (
                rotary_embedding(one, self.d_kv, x.dtype, self.cross_base) for one in (positions, input_positions)
            )
            cross_mask = cross_mask._replace(rotary=rotary, memory_rotary=memory_rotary)

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            rotary, segments = self.rotary(positions, base, x.dtype), inputs.decoder_segment_ids
            return self_attention_mask(x, keys, rotary, causal=True, window=window, segments=segments)

        masks = self.layer_masks.for_layers(new_mask, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, masks[i], cross_mask, cache[i] if cache else None)
        return self.dropout(self.final_norm(x))


def positions_in_segments(segments: Tensor | None) -> Tensor | None:
    """The position of each token in its segment, both (batch, length): [1, 1, 2, 2, 2] → [0, 1, 0, 1, 2]."""
    if segments is None:
        return None
    columns = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return columns - columns.where(begins, 0).cummax(dim=1).values


def ends_of_inputs(length: int, inputs: AttentionInputs) -> Tensor | int:
    """The position after the last one of a target's input, of `length` columns; broadcasts to (batch, targets)."""
    segments, input_segments = inputs.decoder_segment_ids, inputs.encoder_segment_ids
    mask = inputs.encoder_attention_mask
    if segments is not None and input_segments is not None:
        return (segments[:, :, None] == input_segments[:, None, :]).sum(dim=-1)
    if mask is not None:
        return ((mask != 0) * torch.arange(1, length + 1, device=mask.device)).amax(dim=1, keepdim=True)
    return length
