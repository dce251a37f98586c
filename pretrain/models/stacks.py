"""Layers, stacks of them, and the encoder-decoder that two stacks make: what the families have in common."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from pretrain.config.model_config import LocalAndGlobal, ModelConfig, Rotation
from pretrain.models.attention import (
    Attention,
    AttentionInputs,
    AttentionMask,
    KeysAndValues,
    KeyValueCache,
    MemoryCache,
    positions_from,
    self_attention_mask,
)
from pretrain.models.functional.attention_backends import Visibility, Window, logit_bias
from pretrain.models.layers import (
    Dropout,
    Embedding,
    FeedForward,
    Layer,
    LayerConfig,
    grad_barrier,
    joined_linear,
)
from pretrain.models.model import Head, HeadLoss, Losses, Model, shift_right
from pretrain.models.positions import LearnedPositions, Rotary, linear_bias, rotary_embedding, sinusoids

Caches = list[tuple[KeyValueCache, KeyValueCache]]  # (self-attention, cross-attention) of each decoder layer


class ResidualLayer(Layer):
    """Sublayers by name, each with its norms: x + after(sublayer(before(x))), or post-norm, norm(x + sublayer(x))."""

    def __init__(self, settings: LayerConfig, **sublayers: nn.Module):
        super().__init__()
        self.post_norm = settings.post_norm
        for name, sublayer in sublayers.items():
            if self.post_norm:
                self.add_module(name, sublayer)
            self.add_module(f"{name}_norm", settings.new_norm())
            if not self.post_norm:
                self.add_module(name, sublayer)
                self.add_module(f"{name}_norm_after", settings.new_norm() if settings.norm_after else nn.Identity())
        self.dropout = Dropout(settings.dropout_rate)

    def add(self, name: str, x: Tensor, *inputs: Any, **options: Any) -> Tensor:
        """The sum of `x` (batch, length, d_model) and the output of the sublayer `name`."""
        sublayer, norm = getattr(self, name), getattr(self, f"{name}_norm")
        if self.post_norm:
            return norm(x + self.dropout(sublayer(x, *inputs, **options)))
        after = getattr(self, f"{name}_norm_after")
        return x + self.dropout(after(sublayer(norm(x), *inputs, **options)))


class EncoderLayer(ResidualLayer):
    """Self-attention, called `name`, and a feed-forward layer: also a layer of decoders without cross-attention."""

    def __init__(self, settings: LayerConfig, name: str = "self_attention"):
        super().__init__(settings, **{name: Attention(settings), "feed_forward": FeedForward(settings)})
        self.attention_name = name

    def run(self, x: Tensor, mask: AttentionMask, cache: KeyValueCache | None = None) -> Tensor:
        x = self.add(self.attention_name, x, mask=mask, cache=cache)
        return self.add("feed_forward", x)


class DecoderLayer(ResidualLayer):
    """Self-attention, cross-attention to states of width `memory_width`, and a feed-forward layer."""

    cross_attention: Attention

    def __init__(self, settings: LayerConfig, memory_width: int | None = None):
        super().__init__(
            settings,
            self_attention=Attention(settings),
            cross_attention=Attention(settings, memory_width),
            feed_forward=FeedForward(settings),
        )

    def run(
        self,
        x: Tensor,
        memory: Tensor | KeysAndValues,
        mask: AttentionMask,
        cross_mask: AttentionMask,
        cache: tuple[KeyValueCache, KeyValueCache] | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        x = self.add("self_attention", x, mask=mask, cache=self_cache)
        x = self.add("cross_attention", x, memory, mask=cross_mask, cache=cross_cache)
        return self.add("feed_forward", x)


def before_only(tokens: int) -> Window:
    """The window of `tokens` in a causal layer: the query's own and those before it."""
    return Window(tokens - 1)


class Stack(nn.Module):
    """The input of the first layer, the layers, a final norm, dropout. Post-norm layers need no final norm.

    The input is token vectors, times √d_model if the config scales them, and dropout. The config sets the positional
    encoding; the default is rotary in self-attention. Learned positions are the embedding `positions`.

    - `layers` are drawn one by one, after the positions.
    - `window` maps the config's number of tokens to the keys that a query of this stack sees.
    - `kinds` has each layer's window, None if it sees all keys, and rotation. A stack has one kind of layers, or
      two: local and global ones.
    """

    causal: ClassVar[bool]
    sinusoids_scale = 1.0

    def __init__(
        self,
        config: ModelConfig,
        settings: LayerConfig,
        layers: Iterable[nn.Module],
        window: Callable[[int], Window] = before_only,
    ):
        super().__init__()
        self.num_heads = settings.heads.num_heads
        self.d_kv = settings.heads.d_kv
        self.widening = config.widening
        self.scale_embedding = getattr(config, "scale_embedding", False)
        self.position_kind = getattr(config, "positions", "rotary")
        self.positions: LearnedPositions | None = None
        self.new_positions(config)
        self.layers = nn.ModuleList(layers)
        spans = config if isinstance(config, LocalAndGlobal) else LocalAndGlobal()
        kinds = map(spans.window_and_rotation, range(len(self.layers)))
        self.kinds = [(None if tokens is None else window(tokens), rotation) for tokens, rotation in kinds]
        self.post_norm = settings.post_norm
        self.final_norm = nn.Identity() if self.post_norm else settings.new_norm()
        self.dropout = Dropout(settings.dropout_rate)

    def new_positions(self, config: Any) -> None:
        """Makes the modules of a family's learned positions, before the layers are drawn."""

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer, for token vectors `x` at `positions`, (length,) or (batch, length)."""
        if self.scale_embedding:
            x = x * x.new_full((), (x.size(-1) / self.widening) ** 0.5)  # rounded to the dtype of `x`
        if self.position_kind == "sinusoidal":
            x = x + self.sinusoids_scale * sinusoids(positions, x.size(-1), x.dtype)
        return self.dropout(x if self.positions is None else x + self.positions(positions))

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        """The positions' bias of self-attention logits for the last `queries` of `keys`, (heads, queries + keys − 1).
        The bias of query i and key j is at queries − 1 − i + j. None: no bias."""
        return linear_bias(self.num_heads, not self.causal, queries, keys, x) if self.position_kind == "alibi" else None

    def masks(self, x: Tensor, keys: int, positions: Tensor, seen: Visibility) -> list[AttentionMask]:
        """The mask of each layer for `x` (batch, queries, d_model), the last of `keys` tokens, which stands at
        `positions`. `seen`: which of these each query sees in layers without a window."""

        def new_mask(window: Window | None, rotation: Rotation) -> AttentionMask:
            rotates = self.position_kind == "rotary"
            rotary = rotary_embedding(positions, self.d_kv, x.dtype, *rotation) if rotates else None
            diagonals = self.diagonals(x.size(1), keys, x)
            return self_attention_mask(x, keys, seen._replace(window=window), rotary, diagonals)

        return self.of_layers(new_mask, x.size(1), keys)

    def of_layers(
        self, new_mask: Callable[[Window | None, Rotation], AttentionMask], queries: int, keys: int
    ) -> list[AttentionMask]:
        """The mask of each layer, made once for all layers of a kind by `new_mask(window, rotation)`. A window that
        hides nothing is None."""
        masks = {}
        for window, rotation in dict.fromkeys(self.kinds):
            hides = window is not None and window.hides_some(queries, keys, self.causal)
            masks[window, rotation] = new_mask(window if hides else None, rotation)
        return [masks[kind] for kind in self.kinds]

    def pairs(self, tokens: int, pairs: int) -> int:
        """The pairs of queries and keys that all layers compute, for `tokens` whose examples have `pairs` of them.

        A window leaves as many pairs for each token as it is wide. That ignores where examples begin and end.
        """
        widths = [None if window is None else window.before + window.after + 1 for window, _ in self.kinds]
        return sum(pairs if width is None else min(pairs, width * tokens) for width in widths)

    def finished(self, x: Tensor, positions: Tensor) -> Tensor:
        """The stack's output, from the output of its last layer."""
        return x if self.post_norm else self.dropout(self.final_norm(x))


class Encoder(Stack):
    """Self-attention in both directions, or `causal`; it is called `name` in a layer."""

    causal = False

    def __init__(
        self,
        config: ModelConfig,
        settings: LayerConfig,
        num_layers: int,
        window: Callable[[int], Window] = before_only,
        name: str = "self_attention",
    ):
        super().__init__(config, settings, (EncoderLayer(settings, name) for _ in range(num_layers)), window)

    def forward(
        self, x: Tensor, inputs: AttentionInputs = AttentionInputs(), cache: list[KeyValueCache] | None = None
    ) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape. With a cache, `x` follows it.

        The attention mask (batch, past length + length) covers the cached tokens too.
        """
        queries, past_length = x.size(1), cache[0].length if cache else 0
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.encoder_positions)
        x = self.add_positions(x, positions)
        seen = Visibility(
            self.causal,
            key_mask=inputs.encoder_attention_mask,
            query_segments=inputs.encoder_segment_ids,
            key_segments=inputs.encoder_segment_ids,
            prefix=inputs.prefix_mask if self.causal and queries == keys else None,
        )
        masks = self.masks(x, keys, positions, seen)
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i], cache[i] if cache else None)
        return self.finished(x, positions)


class Decoder(Stack):
    """Self-attention is causal. Cross-attention sees the whole input, of width `memory_width`, without positions.

    `joins_memories`: one product makes the keys and values of all layers, where that is faster.
    """

    causal = True
    joins_memories = False

    def __init__(self, config: ModelConfig, settings: LayerConfig, num_layers: int, memory_width: int | None = None):
        super().__init__(config, settings, (DecoderLayer(settings, memory_width) for _ in range(num_layers)))

    def forward(
        self, x: Tensor, encoder_states: Tensor, inputs: AttentionInputs, cache: Caches | None = None
    ) -> Tensor:
        """Maps token vectors (batch, length, d_model) to states of the same shape. With a cache, `x` follows it."""
        queries, past_length = x.size(1), cache[0][0].length if cache else 0
        keys = past_length + queries
        positions = positions_from(past_length, queries, x.device, inputs.decoder_positions)
        x = self.add_positions(x, positions)
        positions, rotary, memory_rotary = self.cross_positions(positions, encoder_states, inputs)
        own = inputs.decoder_segment_ids
        memory_seen = Visibility(
            key_mask=inputs.encoder_attention_mask, query_segments=own, key_segments=inputs.encoder_segment_ids
        )
        bias = logit_bias(x, encoder_states.size(1), memory_seen)
        cross_mask = AttentionMask(bias, rotary, memory_rotary=memory_rotary)
        masks = self.masks(x, keys, positions, Visibility(self.causal, query_segments=own, key_segments=own))
        memories = None if cache else self.memories(encoder_states, memory_rotary)
        for i, layer in enumerate(self.layers):
            memory = encoder_states if memories is None else memories[i]
            x = layer(x, memory, masks[i], cross_mask, cache[i] if cache else None)
        return self.finished(x, positions)

    def memories(self, states: Tensor, rotary: Rotary | None) -> list[KeysAndValues] | None:
        """The keys and values that each layer's cross-attention makes of `states`; None where each makes its own."""
        attentions = [cast(DecoderLayer, layer).cross_attention for layer in self.layers]
        matrices = [matrix for one in attentions for matrix in (one.k, one.v)]
        joined = joined_linear(grad_barrier(states), *matrices, fused=self.joins_memories)
        if joined is None:
            return None
        products = iter(joined.split([one.out_features for one in matrices], dim=-1))
        return [one.of_products(next(products), next(products), rotary) for one in attentions]

    def cross_positions(
        self, positions: Tensor, encoder_states: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Rotary | None, Rotary | None]:
        """The positions that rotate the targets at `positions`, and the rotations of cross-attention's queries and
        keys. None: no rotation."""
        return positions, None, None


class EncoderDecoder(Model):
    """`forward` returns the loss of every target token; `encode` and `decode` are its two halves.

    `encoder` and `decoder` map token vectors to states, and each has its `layers`. `decoder_embedding` is the decoder's
    matrix, unless `embedding` serves both. `tied`: the decoder's embedding is also the output matrix.
    """

    decoder_reads_targets = True

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        encoder: nn.Module,
        decoder: nn.Module,
        lm_head: Head,
        tied: bool,
        decoder_embedding: Embedding | None = None,
    ):
        super().__init__()
        self.config = config
        self.start_id = config.decoder_start_id
        self.embedding = embedding
        self.encoder = encoder
        self.decoder = decoder
        self.lm_head = lm_head
        self.decoder_embedding = decoder_embedding
        if tied:
            # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
            self.lm_head.weight = (decoder_embedding or embedding).weight

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        *,
        decoder_input_ids: Tensor | None = None,
        target_indices: Tensor | None = None,
        loss: HeadLoss | None = None,
        **attention: Tensor,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, target_length), fp32; 0 where the label is -100}.

        `encoder_input_ids` (batch, input_length). `decoder_input_ids` are by default the labels shifted one to the
        right. Padding after the targets needs no mask: the decoder is causal. `attention`: the tensors of
        `AttentionInputs`. Label smoothing and z-loss apply in training only. `target_indices`: the indices of the
        labels that count, among all labels. `loss`: instead of cross-entropy.
        """
        inputs = AttentionInputs(**attention)
        if decoder_input_ids is None:
            decoder_input_ids = shift_right(labels, self.start_id, inputs.decoder_segment_ids, self.config.pad_id)
        x, targets = self.embedded(encoder_input_ids, decoder_input_ids)
        x = self.decoder(targets, self.encoder(x, inputs), inputs)
        return {"labels": self.lm_head(self.before_head(x), labels, self.config, target_indices, loss)}

    def embedded(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors of both kinds of ids. Two look-ups in one matrix would make one more gradient of its whole size,
        and add the two."""
        if self.decoder_embedding is not None:
            return self.embedding(inputs), self.decoder_embedding(targets)
        ids = torch.cat([inputs.flatten(), targets.flatten()])
        vectors = self.embedding(ids).split([inputs.numel(), targets.numel()])
        return vectors[0].view(*inputs.shape, -1), vectors[1].view(*targets.shape, -1)

    def encode(self, encoder_input_ids: Tensor, encoder_attention_mask: Tensor | None = None) -> Tensor:
        """Maps ids (batch, input_length) to states (batch, input_length, d_model)."""
        return self.encoder(self.embedding(encoder_input_ids), AttentionInputs(encoder_attention_mask))

    def decode(
        self,
        decoder_input_ids: Tensor,
        encoder_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        cache: Caches | None = None,
    ) -> Tensor:
        """Maps ids (batch, target_length) to logits (batch, target_length, padded_vocab_size)."""
        x = (self.decoder_embedding or self.embedding)(decoder_input_ids)
        x = self.decoder(x, encoder_states, AttentionInputs(encoder_attention_mask), cache)
        return self.lm_head(self.before_head(x))

    def new_cache(self) -> Caches:
        """An empty cache for `decode`."""
        return [(KeyValueCache(), MemoryCache()) for _ in cast(nn.ModuleList, self.decoder.layers)]


class CausalModel(Model):
    """A model that predicts the next token of a row. `forward` returns the loss of every label, `decode` logits."""

    lm_head: Head

    def states(self, ids: Tensor, inputs: AttentionInputs) -> Tensor:
        """Maps ids (batch, length) to what the output matrix takes, (batch, length, d_model)."""
        raise NotImplementedError

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        *,
        target_indices: Tensor | None = None,
        **attention: Tensor,
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label (batch, length), fp32; 0 where the label is -100}.

        labels[t] is the token after encoder_input_ids[t]. Labels share segments and positions with the inputs. The
        z-loss applies in training only. `target_indices` are the indices of the labels that count, `attention` the
        tensors of `AttentionInputs`.
        """
        states = self.states(encoder_input_ids, AttentionInputs(**attention))
        return {"labels": self.lm_head(states, labels, self.config, target_indices)}
