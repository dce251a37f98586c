"""The block-based double decoder (2026, arXiv 2605.18807).

Boundaries divide a row into blocks. The encoder is causal over the whole row. The decoder reads the same tokens: with
one softmax, each attends to the tokens of its own block up to itself, and to the encoder's states of earlier blocks. So
in generation the encoder reads a context once, and only decoder layers run for each token, until a block is full.

The first token's state is seen by all, as a sink. Positions are rotary, those of the row, in all attentions. Boundaries
are drawn for each training step; in evaluation they are at equal distances.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from data_pipeline.loading.prefetch import to_device
from double_decoder.settings import DoubleDecoderConfig
from pretrain.models.attention import (
    AttentionInputs,
    AttentionMask,
    KeysAndValues,
    KeyValueCache,
    positions_from,
    real_positions,
    self_attention_mask,
)
from pretrain.models.functional.attention_backends import Visibility, masked
from pretrain.models.layers import Dropout, Embedding, LayerConfig, LayerNorm
from pretrain.models.model import Head
from pretrain.models.positions import Rotary, rotary_embedding
from pretrain.models.stacks import CausalModel, EncoderLayer
from pretrain.models.state_dict_adapter import own_code
from pretrain.models.t5gemma2 import MergedLayer

_SHORTEST = 4  # tokens of a text that has blocks: boundaries are at 2 … length − 2


class RowLayout(NamedTuple):
    """Where tokens stand: their positions and blocks, each (1 or batch, length), and segments (batch, length)."""

    positions: Tensor
    blocks: Tensor
    segments: Tensor | None = None


def blocks_of(positions: Tensor, shares: Sequence[float], lengths: Tensor | int) -> Tensor:
    """The number of boundaries up to each position. `shares` of 0 … 1 give boundaries at 2 … length − 2.

    `positions` (…,) count from 0 in texts of `lengths` (…,) tokens.
    """
    lengths = lengths[..., None] if isinstance(lengths, Tensor) else lengths
    boundaries = 2 + (to_device(shares, positions.device) * (lengths - 3)).long()
    return ((positions[..., None] >= boundaries) & (lengths >= _SHORTEST)).sum(dim=-1)


def visible_in_blocks(row: RowLayout) -> tuple[Tensor, Tensor]:
    """The tokens and the states of the encoder that each query sees, (batch, 1, length, length) each.

    Of two examples in a row none sees the other.
    """
    queries, keys = row.blocks[:, None, :, None], row.blocks[:, None, None, :]
    length = row.blocks.size(1)
    causal = Visibility(causal=True, query_segments=row.segments, key_segments=row.segments)
    alike = causal.mask(length, length, keys.device)
    assert alike is not None
    first = row.positions[:, None, None, :] == 0
    return alike & (keys == queries), alike & ((keys < queries) | first)


class _Memory(KeyValueCache):
    """Keys and values of the encoder's states, which grow when a block closes."""

    def grow(self, new: KeysAndValues) -> None:
        super().update(lambda: new)

    def update(self, project: object) -> KeysAndValues:
        assert self.entries is not None
        return self.entries


class _Tokens(KeyValueCache):
    """The ids of a block, which the encoder hasn't read yet, (batch, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: Tensor | None = None

    def append(self, ids: Tensor) -> None:
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], dim=1)

    def select(self, rows: Tensor) -> None:
        if self.ids is not None:
            self.ids = self.ids.index_select(0, rows)


class DoubleDecoderCache:
    """The state of generation: of `length` tokens the encoder has read `encoded`; the block begins at `start`."""

    def __init__(self, encoder_layers: int, decoder_layers: int):
        self.encoder = [KeyValueCache() for _ in range(encoder_layers)]
        self.own = [KeyValueCache() for _ in range(decoder_layers)]
        self.across = [_Memory() for _ in range(decoder_layers)]
        self.unread = _Tokens()
        self.length = self.encoded = self.start = 0

    def __iter__(self) -> Iterator[KeyValueCache]:
        yield from (*self.encoder, *self.own, *self.across, self.unread)


class Layers(nn.Module):
    """Layers, and a norm of their output."""

    def __init__(self, layers: Iterable[nn.Module], final_norm: nn.Module):
        super().__init__()
        self.layers, self.final_norm = nn.ModuleList(layers), final_norm

    def forward(self, x: Tensor, *inputs: Any, caches: Sequence[Any] | None = None) -> Tensor:
        """Maps embeddings (batch, length, d_model) to states of the same shape. With the layers' `caches`, `x` follows
        what is in them."""
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, *inputs, cache)
        return self.final_norm(x)


class DoubleDecoder(CausalModel):
    """Two stacks that read the same tokens, with one matrix for embedding and output."""

    config: DoubleDecoderConfig

    def __init__(self, config: DoubleDecoderConfig):
        super().__init__()
        self.config = config
        rows, std = config.padded_vocab_size, config.init_std
        self.embedding = Embedding(rows, config.d_model, std)
        self.dropout = Dropout(config.dropout_rate)
        encoder, decoder = (
            LayerConfig.of(config, branches=2 * depth, norm="rms")
            for depth in (config.num_encoder_layers, config.num_decoder_layers)
        )
        self.encoder = Layers(
            (EncoderLayer(encoder, "attention") for _ in range(config.num_encoder_layers)),
            LayerNorm(config.d_model, config.layer_norm_epsilon),
        )
        self.decoder = Layers((MergedLayer(decoder) for _ in range(config.num_decoder_layers)), decoder.new_norm())
        self.lm_head = Head(config.d_model, rows, std, multiplier=config.logits_multiplier)
        self.lm_head.weight = self.embedding.weight  # shared: each module uses it only in its own forward
        count = (config.least_boundaries + config.most_boundaries) // 2
        self._even = [(number + 1) / (count + 1) for number in range(count)]
        self._drawn = self._even

    def begin_step(self, seed: int, step: int) -> None:
        """Draws the boundaries of a training step, as shares of a text's length."""
        draws = random.Random(f"{seed}/boundaries/{step}")
        count = draws.randint(self.config.least_boundaries, self.config.most_boundaries)
        self._drawn = sorted(draws.random() for _ in range(count))

    def states(self, ids: Tensor, inputs: AttentionInputs) -> Tensor:
        """Each example of a packed row has boundaries of its own."""
        given = inputs.encoder_attention_mask, inputs.encoder_segment_ids, inputs.encoder_positions
        return self._of_row(ids, self.row(ids, *given))

    def row(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        boundaries: Tensor | None = None,
    ) -> RowLayout:
        """Where the tokens `ids` (batch, length) stand. `boundaries` (batch, boundaries): positions at which blocks
        begin, instead of those of the step."""
        length, device = ids.size(1), ids.device
        if positions is None:
            positions = positions_from(0, length, device)[None] if mask is None else real_positions(mask)
        segments = mask if segments is None else segments
        if boundaries is not None:
            return RowLayout(positions, (positions[..., None] >= boundaries[:, None, :]).sum(dim=-1), segments)
        lengths = length if segments is None else (segments[:, :, None] == segments[:, None, :]).sum(dim=-1)
        return RowLayout(
            positions, blocks_of(positions, self._drawn if self.training else self._even, lengths), segments
        )

    def _of_row(self, ids: Tensor, row: RowLayout) -> Tensor:
        x = self.dropout(self.embedding(ids))
        rotary = self._rotary(row.positions, x)
        seen = Visibility(causal=True, query_segments=row.segments, key_segments=row.segments)
        mask = self_attention_mask(x, ids.size(1), seen, rotary)
        bias = masked(None, torch.cat(visible_in_blocks(row), dim=-1), x.dtype)
        return self.decoder(x, self.encoder(x, mask), AttentionMask(bias, rotary, memory_rotary=rotary))

    def _rotary(self, positions: Tensor, x: Tensor) -> Rotary:
        return rotary_embedding(positions, self.config.d_kv, x.dtype, self.config.rope_base)

    def decode(
        self,
        input_ids: Tensor,
        cache: DoubleDecoderCache | None = None,
        attention_mask: Tensor | None = None,
        boundaries: Tensor | None = None,
    ) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size). `boundaries` (batch,
        boundaries) are positions at which blocks begin, by default those of the step.

        With a cache, ids follow its tokens, and `attention_mask` (batch, past length + length) covers both. Prompts are
        padded on the left. A prompt's last token begins a block, the only one of the prompt whose logits (batch, 1, …)
        are returned; the encoder reads all others, and each later block of `block_length` tokens once it is full.
        """
        if cache is None:
            row = self.row(input_ids, attention_mask, boundaries=boundaries)
            return self.lm_head(self._of_row(input_ids, row))
        if cache.length and input_ids.size(1) > 1:
            firsts = range(input_ids.size(1))
            masks = [None if attention_mask is None else attention_mask[:, : cache.length + i + 1] for i in firsts]
            one_by_one = zip(input_ids.split(1, dim=1), masks, strict=True)
            return torch.cat([self.decode(ids, cache, mask) for ids, mask in one_by_one], dim=1)
        return self.lm_head(self._next(input_ids, cache, attention_mask))

    def _next(self, ids: Tensor, cache: DoubleDecoderCache, mask: Tensor | None) -> Tensor:
        """The decoder's state (batch, 1, d_model) of the last of `ids`: a prompt, or a token after it."""
        total = cache.length + ids.size(1)
        positions = positions_from(0, total, ids.device)[None] if mask is None else real_positions(mask)
        if cache.length == 0:
            self._read(ids, cache, positions, mask)
            cache.start = total - 1
        else:
            if cache.length - cache.start == self.config.block_length:
                assert cache.unread.ids is not None or cache.encoded == cache.length
                if cache.unread.ids is not None:
                    self._read(cache.unread.ids, cache, positions, mask)
                cache.unread.ids, cache.start = None, cache.length
                cache.own = [KeyValueCache() for _ in cache.own]
            cache.unread.append(ids)
        cache.length = total
        x = self.dropout(self.embedding(ids[:, -1:]))
        indices = torch.arange(cache.encoded, device=ids.device)
        across = (indices < cache.start) | (positions[:, : cache.encoded] == 0)
        if mask is not None:
            across = across & mask[:, : cache.encoded].bool()
        own = across.new_ones(len(across), total - cache.start)
        bias = masked(None, torch.cat([own, across], dim=-1)[:, None, None], x.dtype)
        # instead of states, their keys and values are in the cache
        caches = list(zip(cache.own, cache.across, strict=True))
        return self.decoder(x, x, AttentionMask(bias, self._rotary(positions[:, -1:], x)), caches=caches)

    def _read(self, ids: Tensor, cache: DoubleDecoderCache, positions: Tensor, mask: Tensor | None) -> None:
        """Encodes `ids`, which follow those that the encoder has read, for all layers of the decoder."""
        first, cache.encoded = cache.encoded, cache.encoded + ids.size(1)
        x = self.dropout(self.embedding(ids))
        rotary = self._rotary(positions[:, first : cache.encoded], x)
        key_mask = None if mask is None else mask[:, : cache.encoded]
        encoder_mask = self_attention_mask(x, cache.encoded, Visibility(causal=True, key_mask=key_mask), rotary)
        states = self.encoder(x, encoder_mask, caches=cache.encoder)
        for layer, memory in zip(self.decoder.layers, cache.across, strict=True):
            memory.grow(cast("MergedLayer", layer).self_attention.keys_and_values(states, rotary))

    def new_cache(self) -> DoubleDecoderCache:
        """An empty cache for `decode`."""
        return DoubleDecoderCache(self.config.num_encoder_layers, self.config.num_decoder_layers)


HF_MODELS = (
    own_code(
        DoubleDecoderConfig,
        Path(__file__).with_name("modeling_double_decoder.py"),
        "double_decoder",
        "AutoModelForCausalLM",
        "DoubleDecoderForCausalLM",
        fixed={"tie_word_embeddings": True},
    ),
)
