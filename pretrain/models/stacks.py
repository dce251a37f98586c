"""The stacks of encoder-decoders: an encoder and a decoder of the layers in `blocks`."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pretrain.config.models import ModelConfig, ModernConfig, StackConfig, T5Gemma2Config, T5GemmaConfig
from pretrain.models.attention import KeyValueCache
from pretrain.models.attention_masks import (
    AttentionInputs,
    AttentionMask,
    LayerMasks,
    before_only,
    cross_attention_mask,
    self_attention_mask,
)
from pretrain.models.blocks import Block, DecoderLayer, EncoderLayer
from pretrain.models.encoder_decoder import Caches, length_of
from pretrain.models.layers import Dropout, times_root
from pretrain.models.positions import LearnedPositions, Rotary, positions_from, rotary_embedding
from pretrain.models.visibility import Window

GatedConfig = T5GemmaConfig | T5Gemma2Config | ModernConfig


def block_of(config: GatedConfig, stack: StackConfig, branches: int = 1) -> Block:
    """The layers of a stack in T5Gemma, T5Gemma 2 and `modern`. `branches`: the residual branches of the stack, if the
    matrices that end them start smaller for it."""
    std = config.hidden_std(config.init_std)
    return Block(
        stack,
        config.activation,
        config.norm,
        config.layer_norm_epsilon,
        norm_after=config.norm_after,
        qk_norm=config.qk_norm,
        biases=config.biases,
        attention_softcap=config.attention_softcap,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        activation_dropout_rate=config.dropout_rate,
        std=std,
        out_std=std * branches**-0.5,
    )


class Stack(nn.Module):
    """The input of the first layer, the layers, a final norm, dropout. Post-norm layers need no final norm.

    `layers` are drawn one by one. `window` as in `LayerMasks`. `inputs` maps token vectors (batch, length, d_model) and
    positions to the input of the first layer; None: token vectors, times √d_model if the config scales them, and
    dropout. Then positions are rotary in self-attention, unless the config has a table of learned ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: Block,
        layers: Iterable[nn.Module],
        window: Callable[[int], Window] = before_only,
        inputs: nn.Module | None = None,
    ):
        super().__init__()
        self.d_kv, self.widening = block.heads.d_kv, config.widening
        self.scale_embedding = getattr(config, "scale_embedding", False)
        self.inputs = inputs
        self.positions: LearnedPositions | None = None
        self.new_positions(config)
        self.layers = nn.ModuleList(layers)
        self.layer_masks = LayerMasks(config, len(self.layers), window)
        self.final_norm = nn.Identity() if block.post_norm else block.new_norm()
        self.dropout = Dropout(0.0 if block.post_norm else block.dropout_rate)
        if isinstance(config, ModernConfig) and config.max_positions is not None:
            self.positions = LearnedPositions(config.max_positions, block.heads.d_model, config.init_std)

    def new_positions(self, config: Any) -> None:
        """Makes what a family's positions need, before the layers are drawn."""

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer, for token vectors `x` at `positions`, (length,) or (batch, length)."""
        if self.inputs is not None:
            return self.inputs(x, positions)
        x = times_root(x, self.widening) if self.scale_embedding else x
        return self.dropout(x if self.positions is None else x + self.positions(positions))

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        """The positions' bias of self-attention logits, for the last `queries` of `keys`, as in `Pattern`."""
        return None

    def rotary(self, positions: Tensor, base: float, dtype: torch.dtype) -> Rotary | None:
        """The rotations of self-attention; None with other positions."""
        return rotary_embedding(positions, self.d_kv, dtype, base) if self.inputs is self.positions is None else None

    def finished(self, x: Tensor, positions: Tensor) -> Tensor:
        """The stack's output, for that of its last layer."""
        return self.dropout(self.final_norm(x))


class Encoder(Stack):
    """Self-attention in both directions, or `causal`. `name`: that of the attention in a layer."""

    causal: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        block: Block,
        num_layers: int,
        window: Callable[[int], Window] = before_only,
        inputs: nn.Module | None = None,
        name: str = "self_attention",
    ):
        super().__init__(config, block, (EncoderLayer(block, name) for _ in range(num_layers)), window, inputs)

    def given_positions(self, inputs: AttentionInputs, past_length: int) -> Tensor | None:
        """The positions (batch, length) of tokens after `past_length` others; None: they follow one another."""
        return inputs.encoder_positions

    def prefix(self, inputs: AttentionInputs) -> Tensor | None:
        """(batch, length) Nonzero at tokens that a causal stack sees before it comes to them; None: there are none."""
        return None

    def forward(
        self, x: Tensor, inputs: AttentionInputs = AttentionInputs(), cache: list[KeyValueCache] | None = None
    ) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape. With a cache, `x` follows it.

        The attention mask (batch, past length + length) covers the cached tokens too.
        """
        queries, past_length = x.size(1), cache[0].length if cache else 0
        keys, given = past_length + queries, self.given_positions(inputs, past_length)
        positions = positions_from(past_length, queries, x.device, given)
        x = self.add_positions(x, positions)

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            return self_attention_mask(
                x,
                keys,
                self.rotary(positions, base, x.dtype),
                causal=self.causal,
                window=window,
                diagonals=self.diagonals(queries, keys, x),
                key_mask=inputs.encoder_attention_mask,
                segments=inputs.encoder_segment_ids,
                prefix=self.prefix(inputs) if queries == keys else None,
            )

        masks = self.layer_masks.for_layers(new_mask, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i], cache[i] if cache else None)
        return self.finished(x, positions)


class Decoder(Stack):
    """Self-attention is causal. Cross-attention sees the whole input, of width `memory_width`.

    Cross-attention has no positions, unless the config says `cross_rotation`: then they are rotary, and those of
    targets go on where the input's end.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: Block,
        num_layers: int,
        memory_width: int | None = None,
        inputs: nn.Module | None = None,
    ):
        layers = (DecoderLayer(block, memory_width) for _ in range(num_layers))
        super().__init__(config, block, layers, inputs=inputs)
        self.cross_base: float | None = None
        if isinstance(config, ModernConfig) and config.cross_rotation:
            self.cross_base = config.rope_base

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries, past_length = x.size(1), length_of(cache)
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.decoder_positions)
        x = self.add_positions(x, positions)
        positions = self.after_inputs(positions, encoder_states, inputs)
        cross_mask = cross_attention_mask(x, encoder_states, inputs)
        cross_mask = self.with_cross_rotation(cross_mask, positions, encoder_states, inputs)

        def new_mask(window: Window | None, base: float) -> AttentionMask:
            return self_attention_mask(
                x,
                keys,
                self.rotary(positions, base, x.dtype),
                causal=True,
                window=window,
                diagonals=self.diagonals(queries, keys, x),
                segments=inputs.decoder_segment_ids,
            )

        masks = self.layer_masks.for_layers(new_mask, queries, keys)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoder_states, masks[i], cross_mask, cache[i] if cache else None)
        return self.finished(x, positions)

    def after_inputs(self, positions: Tensor, encoder_states: Tensor, inputs: AttentionInputs) -> Tensor:
        """The positions by which targets are rotated."""
        return positions if self.cross_base is None else positions + ends_of_inputs(encoder_states.size(1), inputs)

    def with_cross_rotation(
        self, mask: AttentionMask, positions: Tensor, encoder_states: Tensor, inputs: AttentionInputs
    ) -> AttentionMask:
        """The mask of cross-attention with its rotary positions, if it has any; `positions` as from `after_inputs`."""
        if self.cross_base is None:
            return mask
        given = positions_in_segments(inputs.encoder_segment_ids)
        input_positions = positions_from(0, encoder_states.size(1), encoder_states.device, given)
        rotary, memory_rotary = (
            rotary_embedding(one, self.d_kv, encoder_states.dtype, self.cross_base)
            for one in (positions, input_positions)
        )
        return mask._replace(rotary=rotary, memory_rotary=memory_rotary)


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
