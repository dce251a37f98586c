"""One step of decoding in its fastest form: what the models' `decode` computes for one new token of each hypothesis.

Nothing that stays the same from token to token is computed again: matrices of one input are fused and packed once
(`packed_linear`), all hypotheses of an example share the keys and values of its input, the bias of each distance is
looked up once, and earlier tokens are never copied (`paged_cache`). The models' own code defines the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.generation.packed_linear import PackedLinear, can_pack, packed_linear, packed_linears
from pretrain.generation.paged_cache import PagedCache
from pretrain.models import DecoderOnlyConfig, outline
from pretrain.models.attention import Attention, KeysAndValues, KeyValueCache
from pretrain.models.attention_masks import AttentionInputs
from pretrain.models.bart import Bart, LogitsHead
from pretrain.models.decoder_only import DecoderOnly
from pretrain.models.encoder_decoder import EncoderDecoder
from pretrain.models.layers import FeedForward, GatedFeedForward, RMSNorm
from pretrain.models.model import Model
from pretrain.models.positions import Rotary, apply_rotary, rotary_embedding
from pretrain.models.t5 import T5
from pretrain.models.vanilla import Vanilla
from pretrain.models.visibility import masked

Part = Callable[[Tensor], Tensor]  # a norm or a sublayer, (hypotheses, d_model) → (hypotheses, d_model)


class Weights:
    """The weights of a decoder in the layout of decoding. They are a copy: a model that learns on needs a new one.

    `model`: the model that decodes, in fp32 if it came in bf16 to a CPU without products in bf16. PyTorch emulates
    these there, which takes four times as long as the same products in fp32.
    """

    def __init__(self, model: EncoderDecoder | DecoderOnly):
        first = model.embedding.weight
        if first.dtype == torch.bfloat16 and first.device.type == "cpu" and not can_pack(first.dtype):
            model = _in_fp32(model)
        self.model = model
        self.pre_norm = isinstance(model, T5 | DecoderOnly)
        decoder: Any = model.decoder
        self.layers = [_Layer.of(layer) for layer in decoder.layers]
        self.final_norm: Part = _norm(decoder.final_norm) if self.pre_norm else nn.Identity()
        head, rows = model.lm_head, model.config.vocab_size
        bias = head.final_logits_bias.to(head.weight.dtype)[:rows] if isinstance(head, LogitsHead) else None
        self._head = packed_linear(head.weight[:rows], bias)
        self._scales = isinstance(model, T5) and model.config.scale_outputs

    @staticmethod
    def of(model: Model) -> "Weights | None":
        """None for a model without this form, and where ZeRO-3 holds the weights: they come and go."""
        if isinstance(model, EncoderDecoder | DecoderOnly) and _has_this_form(model):
            return Weights(model) if all(weight.numel() for weight in model.parameters()) else None
        return None

    def logits(self, x: Tensor) -> Tensor:
        """States after the final norm (hypotheses, d_model) to (hypotheses, vocab_size); padding of the vocabulary has
        no logits."""
        return self._head(self.model.lm_head.scaled(x * x.size(-1) ** -0.5 if self._scales else x))

    def bias(self, distances: int) -> Tensor | None:
        """What the kind of positions adds to a logit, by the distance of the key: (heads, distances); None: nothing."""
        decoder: Any = self.model.decoder
        weight = self.model.embedding.weight
        if isinstance(self.model, T5):
            diagonals = decoder.diagonals(1, distances, weight)
        elif isinstance(self.model, DecoderOnly) and decoder.linear_bias is not None:
            diagonals = decoder.linear_bias(1, distances, weight.device, weight.dtype)
        else:
            return None
        return None if diagonals is None else diagonals.flip(-1)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Vectors (hypotheses, d_model) of `tokens` (hypotheses, 1) at `positions`, (1,) or (hypotheses, 1)."""
        decoder: Any = self.model.decoder
        embed = decoder.add_positions if self.pre_norm else decoder.inputs
        return embed(self.model.embedding(tokens), positions)[:, 0]


def _has_this_form(model: EncoderDecoder | DecoderOnly) -> bool:
    """Whether the model has nothing that this file leaves out."""
    if isinstance(model, EncoderDecoder):
        return isinstance(model, T5 | Vanilla | Bart)
    return all(getattr(model.config, name) == DecoderOnlyConfig.model_fields[name].default for name in UNSUPPORTED)


# Settings of DecoderOnlyConfig that must have their defaults.
UNSUPPORTED = (
    "num_key_value_heads",
    "sliding_window",
    "rope_base",
    "norm_after",
    "qk_norm",
    "attention_softcap",
    "output_softcap",
)


def _in_fp32(model: EncoderDecoder | DecoderOnly) -> Any:
    copy = outline(model.config)  # draws nothing
    copy.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()}, assign=True)
    return copy.eval()


@dataclass(frozen=True)
class _Layer:
    norms: tuple[Part, ...]
    attention: Attention
    qkv: PackedLinear
    out: PackedLinear
    across: "_Across | None"
    feed_forward: Part

    @staticmethod
    def of(layer: Any) -> "_Layer":
        across = getattr(layer, "cross_attention", None)
        attention = layer.attention if across is None else layer.self_attention
        norms = (
            (layer.attention_norm, layer.feed_forward_norm)
            if across is None
            else (layer.self_attention_norm, layer.cross_attention_norm, layer.feed_forward_norm)
        )
        return _Layer(
            tuple(map(_norm, norms)),
            attention,
            packed_linears([attention.q, attention.k, attention.v]),
            packed_linears([attention.o]),
            None if across is None else _Across(across, packed_linears([across.q]), packed_linears([across.o])),
            _feed_forward(layer.feed_forward),
        )


@dataclass(frozen=True)
class _Across:
    attention: Attention
    q: PackedLinear
    out: PackedLinear

    def memory(self, states: Tensor) -> KeysAndValues:
        """Keys and values (examples, heads, length, d_kv) of `states` (examples, length, d_model)."""
        keys, values = (
            part(states).unflatten(-1, (-1, self.attention.d_kv)).transpose(1, 2).contiguous()
            for part in (self.attention.k, self.attention.v)
        )
        return keys, values


def _norm(module: nn.Module) -> Part:
    """The norm, with RMSNorm in four operations instead of eight: x / √(mean x² + ε) = x √d / √(|x|² + d ε).

    Not in bf16, which would round |x|.
    """
    if not isinstance(module, RMSNorm):
        return module
    weight = module.gains.detach()
    if weight.device.type != "cpu" or weight.dtype == torch.bfloat16:
        return module
    least = weight.new_tensor((weight.numel() * module.epsilon) ** 0.5)
    gains = weight * weight.numel() ** 0.5
    return lambda x: (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(least)).mul_(gains)


def _feed_forward(module: FeedForward | GatedFeedForward) -> Part:
    out = packed_linears([module.wo])
    if isinstance(module, FeedForward):
        wi, activation = packed_linears([module.wi]), module.activation
        return lambda x: out(activation(wi(x)))
    both, activation = packed_linears([module.wi_0, module.wi_1]), module.activation

    def gated(x: Tensor) -> Tensor:
        gate, values = both(x).chunk(2, dim=-1)
        return out(activation(gate).mul_(values))

    return gated


class Incremental:
    """The state of a decoder for a batch of examples, each with the same number of hypotheses, at first one.

    `memory`: an encoder's states (examples, length, d_model), of which `memory_mask` hides padding.
    """

    def __init__(
        self, weights: Weights, examples: int, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ):
        attention, like = weights.layers[0].attention, weights.model.embedding.weight
        self.weights, self.d_kv = weights, attention.d_kv
        heads = attention.q.out_features // self.d_kv
        self.cache = PagedCache(len(weights.layers), examples, heads, self.d_kv, like.dtype, like.device)
        self.position = 0  # of the next token, counting padding before a prompt
        self.padding: Tensor | None = None  # (examples, 1): tokens of padding before a prompt
        self.by_distance = weights.bias(256)
        self.memory: list[KeysAndValues] = []
        self.memory_bias: Tensor | None = None
        if memory is not None:
            self.memory = [layer.across.memory(memory) for layer in weights.layers if layer.across]
            self.memory_bias = masked(
                None, None if memory_mask is None else memory_mask[:, None, None].bool(), memory.dtype
            )
        self.bias: Tensor | None = None
        self.rotary: Rotary | None = None
        self.parts: list[tuple[Part, Part]] = []  # a norm and its sublayer
        for number, layer in enumerate(weights.layers):
            sublayers: list[Part] = [partial(self._attend, number, layer)]
            if layer.across is not None:
                sublayers.append(partial(self._attend_across, number, layer.across))
            self.parts += zip(layer.norms, [*sublayers, layer.feed_forward], strict=True)

    def read(self, prompts: Tensor, mask: Tensor | None) -> Tensor:
        """Reads the prompts (examples, length) of a decoder without an encoder; returns the next token's logits."""
        model: Any = self.weights.model
        caches: list[KeyValueCache] = model.new_cache()
        states = model.decoder(model.embedding(prompts), AttentionInputs(mask), caches)
        self.cache.fill(torch.stack([torch.stack(cache.entries) for cache in caches if cache.entries]), mask)
        self.position = prompts.size(1)
        self.padding = None if mask is None else (mask == 0).sum(dim=1, keepdim=True)
        return self.weights.logits(states[:, -1])

    def step(self, tokens: Tensor) -> Tensor:
        """Appends `tokens` (hypotheses, 1); returns the logits (hypotheses, vocab_size) of the next ones."""
        weights = self.weights
        self.cache.append(self.position)
        positions = torch.tensor([self.position], device=tokens.device)
        example_positions = positions if self.padding is None else positions - self.padding
        width = self.cache.seen.size(1)
        x = weights.embed(
            tokens, example_positions if self.padding is None else example_positions.repeat_interleave(width, dim=0)
        )
        self.bias = self._bias(x.dtype)
        if getattr(weights.model.config, "positions", None) == "rotary":
            self.rotary = rotary_embedding(example_positions, self.d_kv, x.dtype)
        self.position += 1
        for norm, part in self.parts:
            x = x + part(norm(x)) if weights.pre_norm else norm(x + part(x))
        return weights.logits(weights.final_norm(x))

    def branch(self, origin: Tensor) -> None:
        """Hypothesis j of an example goes on from hypothesis `origin[example, j]` of it."""
        self.cache.branch(origin)

    def keep(self, examples: Tensor) -> None:
        """Drops all other examples."""
        self.cache.keep(examples)
        self.memory = [(keys[examples], values[examples]) for keys, values in self.memory]
        self.memory_bias = None if self.memory_bias is None else self.memory_bias[examples]
        self.padding = None if self.padding is None else self.padding[examples]

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to the logits of self-attention; broadcasts to (examples, heads, width, used)."""
        cache, distances = self.cache, self.by_distance
        if distances is not None and self.position >= distances.size(1):
            distances = self.by_distance = self.weights.bias(2 * distances.size(1))
        if cache.all_seen:
            return None if distances is None else distances[:, : cache.used].flip(-1)[None, :, None]
        bias = None
        if distances is not None:
            bias = distances[:, self.position - cache.positions].transpose(0, 1)[:, :, None]
        return masked(bias, cache.seen[:, None], dtype)

    def _attend(self, number: int, layer: _Layer, x: Tensor) -> Tensor:
        examples, width = self.cache.seen.shape[:2]
        new = layer.qkv(x).view(examples, width, 3, -1, self.d_kv).permute(2, 0, 3, 1, 4)
        queries, new = new[0], new[1:]
        if self.rotary is not None:
            queries, new = apply_rotary(queries, self.rotary), torch.stack([apply_rotary(new[0], self.rotary), new[1]])
        keys, values = self.cache.write(number, new)
        return layer.out(_joint(queries, keys, values, self.bias, layer.attention.scale))

    def _attend_across(self, number: int, across: _Across, x: Tensor) -> Tensor:
        keys, values = self.memory[number]
        queries = across.q(x).view(keys.size(0), -1, keys.size(1), self.d_kv).transpose(1, 2)
        return across.out(_joint(queries, keys, values, self.memory_bias, across.attention.scale))


def _joint(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of all hypotheses of an example in one product; returns (hypotheses, heads · d_kv).

    PyTorch's kernel is the fastest form where queries are few, in bf16 too.
    """
    context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
    return context.transpose(1, 2).reshape(queries.size(0) * queries.size(2), -1)
