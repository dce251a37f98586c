"""The stacks of today's encoder-decoders: an encoder and a decoder of the layers in `blocks`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.models.attention_masks import Sight, Sights, before_only, bias_or_causal
from pretrain.models.blocks import Block, DecoderLayer, EncoderLayer
from pretrain.models.config.modern import ModernConfig
from pretrain.models.config.t5gemma import Gemma
from pretrain.models.encoder_decoder import Caches, bias_of_cross_attention
from pretrain.models.layers import Dropout, times_root
from pretrain.models.masks import Window
from pretrain.models.positions import LearnedPositions, Rotation, positions_from, rotation

StacksConfig = Gemma | ModernConfig


class Stack(nn.Module):
    """Dropout, the layers, a final norm, dropout; rotary positions from 0 in self-attention.

    `window` as in `Sights`. `scale_embedding`: embeddings are multiplied by √d_model, with muP by that of the base.
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
        self.sights = Sights(config, len(layers), window)
        self.layers = nn.ModuleList(layers)
        self.final_norm = block.new_norm()
        self.dropout = Dropout(block.dropout_rate)

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer."""
        x = times_root(x, self.widening) if self.scale_embedding else x
        return self.dropout(x if self.positions is None else x + self.positions(positions))

    def turn(self, positions: Tensor, base: float, dtype: torch.dtype) -> Rotation | None:
        """The rotation of self-attention; None with learned positions."""
        return rotation(positions, self.d_kv, dtype, base) if self.positions is None else None


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

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape."""
        length = x.size(1)
        positions = positions_from(0, length, x.device, positions)
        x = self.placed(x, positions)

        def see(window: Window | None, base: float) -> Sight:
            masks = {"key_mask": attention_mask, "segments": segments}
            bias, _ = bias_or_causal(x, length, causal=False, window=window, **masks)
            return Sight(bias, self.turn(positions, base, x.dtype))

        sights = self.sights.of_layers(see, length, length)
        for i, layer in enumerate(self.layers):
            x = layer(x, sights[i])
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
        self,
        x: Tensor,
        encoder_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        cache: Caches | None = None,
        segments: Tensor | None = None,
        encoder_segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries = x.size(1)
        held = cache[0][0].length if cache else 0
        keys = held + queries
        positions = positions_from(held, queries, x.device, positions)
        x = self.placed(x, positions)
        cross = Sight(bias_of_cross_attention(x, encoder_states, encoder_attention_mask, segments, encoder_segments))
        if self.cross_base is not None:
            inputs = encoder_states.size(1)
            of_inputs = positions_from(0, inputs, x.device, places_in_segments(encoder_segments))
            positions = positions + ends_of_inputs(inputs, encoder_attention_mask, segments, encoder_segments)
            turn, turn_of_inputs = (rotation(at, self.d_kv, x.dtype, self.cross_base) for at in (positions, of_inputs))
            cross = cross._replace(rotation=turn, memory_rotation=turn_of_inputs)

        def see(window: Window | None, base: float) -> Sight:
            bias, causal = bias_or_causal(x, keys, causal=True, window=window, segments=segments)
            return Sight(bias, self.turn(positions, base, x.dtype), causal)

        sights = self.sights.of_layers(see, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, sights[i], cross, cache[i] if cache else None)
        return self.dropout(self.final_norm(x))


def places_in_segments(segments: Tensor | None) -> Tensor | None:
    """The place of each token in its segment, both (batch, length): [1, 1, 2, 2, 2] → [0, 1, 0, 1, 2]."""
    if segments is None:
        return None
    places = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - places.where(begins, 0).cummax(dim=1).values


def ends_of_inputs(
    inputs: int, mask: Tensor | None, segments: Tensor | None, input_segments: Tensor | None
) -> Tensor | int:
    """The position after the last one of a target's input, broadcasting to (batch, targets).

    `inputs` is the number of columns, of which `mask` (batch, inputs) hides padding.
    """
    if segments is not None and input_segments is not None:
        return (segments[:, :, None] == input_segments[:, None, :]).sum(dim=-1)
    if mask is not None:
        return ((mask != 0) * torch.arange(1, inputs + 1, device=mask.device)).amax(dim=1, keepdim=True)
    return inputs
