"""The autoregressive encoder-decoder: Yan, "Auto-regressive Encoder-Decoder Transformer" (2024).

Encoder and decoder read the same tokens, and both are causal. The decoder's input is a linear map of the encoder's
output; the decoder also attends to the encoder's output, and predicts the next token. Two parts are optional: the
position embedding of the predicted token is subtracted before the output layer, and an auxiliary loss pulls the
encoder's output towards an aggregate of the embeddings so far. Pre-norm, GELU, tied embedding and output.

Unlike in the author's code, attention has no dropout in evaluation.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.config.model_config import Heads
from pretrain.config.models import AutoregressiveConfig, EmbeddingLossConfig
from pretrain.models import meta_model
from pretrain.models.attention import Attention, AttentionInputs, AttentionMask, KeyValueCache, positions_from
from pretrain.models.functional.arithmetic import at_least_fp32
from pretrain.models.functional.attention_backends import Pattern, Visibility, logit_bias
from pretrain.models.layers import Dropout, Embedding, FeedForward, LayerConfig, LayerNorm, Linear, grad_barrier
from pretrain.models.model import Head, Losses, Model
from pretrain.models.positions import LearnedPositions, rotary_embedding
from pretrain.models.stacks import EncoderLayer, ResidualLayer
from pretrain.models.state_dict_adapter import Json, State, own_code, vocabulary

# A tuple for each layer, the encoder's layers first: the cache of self-attention and, in the decoder, that of
# cross-attention. All caches have the same length.
Cache = list[tuple[KeyValueCache, ...]]
TEMPERATURE = 0.1  # of the contrastive score


def _layer_config(config: AutoregressiveConfig, num_layers: int) -> LayerConfig:
    """The settings of a stack's layers. `num_layers` scales the std of matrices that end a residual branch (in the
    author's code encoder and decoder are equally deep)."""
    widths = Heads(d_model=config.d_model, d_ff=config.d_ff or 4 * config.d_model, num_heads=config.num_heads)
    kind = {"activation": "gelu", "norm": "layer", "layer_norm_epsilon": 1e-5, "biases": config.bias}
    return LayerConfig.of(config, widths, 2 * num_layers, **kind)


class AutoregressiveLayer(ResidualLayer):
    """A decoder layer. Each has a norm for the encoder's output, since the encoder has no final norm."""

    def __init__(self, config: AutoregressiveConfig):
        layer = _layer_config(config, config.num_decoder_layers)
        heads = layer.heads.model_copy(update={"num_heads": config.cross_heads})
        biases = config.bias if config.cross_attention_bias is None else config.cross_attention_bias
        super().__init__(
            layer,
            self_attention=Attention(layer),
            cross_attention=Attention(replace(layer, heads=heads, biases=biases)),
            feed_forward=FeedForward(layer),
        )
        self.encoder_norm = layer.new_norm()
        self.cross_attention_first = config.order == "alternate"

    def run(
        self,
        x: Tensor,
        encoder_out: Tensor,
        mask: AttentionMask,
        cross_mask: AttentionMask,
        cache: tuple[KeyValueCache, ...] | None = None,
    ) -> Tensor:
        self_cache, cross_cache = cache or (None, None)
        memory = self.encoder_norm(encoder_out)
        if self.cross_attention_first:
            x = self.add("cross_attention", x, memory, mask=cross_mask, cache=cross_cache)
        x = self.add("self_attention", x, mask=mask, cache=self_cache)
        if not self.cross_attention_first:
            x = self.add("cross_attention", x, memory, mask=cross_mask, cache=cross_cache)
        return self.add("feed_forward", x)


class Bridge(nn.Module):
    """The decoder's input: a linear map of the encoder's output."""

    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        self.norm = LayerNorm(config.d_model, bias=config.bias) if config.bridge_norm else nn.Identity()
        self.linear = Linear(config.d_model, config.d_model, config.hidden_std(config.init_std), config.bias)

    def forward(self, encoder_out: Tensor) -> Tensor:
        return self.linear(self.norm(encoder_out))


class RunningMean(nn.Module):
    """The mean of the embeddings that a position attends to."""

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Means of `x` (batch, length, d_model), of its shape. `seen` (batch, length, length): True where a query
        attends to a key."""
        # a matmul: with differences of cumulative sums, rounding would leak from one example of a row into the next
        weights = seen.to(x.dtype)
        return (weights / weights.sum(dim=-1, keepdim=True)) @ x


class CausalConvolution(nn.Embedding):
    """A depthwise convolution: row k of the table has the weights of the embedding k tokens back. Embeddings that a
    position doesn't attend to count as zeros."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1 / self.num_embeddings)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        """Weighted sums of `x`; shapes as in `RunningMean`."""
        kernel = self.weight.to(x.dtype)
        out = x * kernel[0]
        for back in range(1, min(len(kernel), x.size(1))):
            shown = seen.diagonal(-back, dim1=-2, dim2=-1)[..., None]
            out = out + F.pad(x[:, :-back] * shown * kernel[back], (0, 0, back, 0))
        return out


class PositionMatrix(nn.Embedding):
    """A matmul with a triangular matrix: row t of the table has the weights of the positions up to t."""

    def reset_parameters(self) -> None:
        lengths = torch.arange(1, self.num_embeddings + 1, device=self.weight.device)
        with torch.no_grad():
            self.weight.copy_((1 / lengths)[:, None])

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        """Weighted sums of `x`; shapes as in `RunningMean`. A position is the number of earlier tokens attended to."""
        positions = seen.sum(dim=-1) - 1
        columns = positions[:, None].expand_as(seen)
        weights = super().forward(positions).to(x.dtype).gather(-1, columns)
        return weights.masked_fill(~seen, 0.0) @ x


class EmbeddingLoss(nn.Module):
    """The distance, at each position, between the encoder's output and an aggregate of the embeddings so far.

    Learned norms have biases, even in a model without biases.
    """

    def __init__(self, config: EmbeddingLossConfig, d_model: int, max_positions: int | None):
        super().__init__()
        self.config = config
        learned = config.learned_norms
        on_embedding = config.embedding_norm != "none"
        self.embedding_norm = LayerNorm(d_model, bias=learned, gains=learned) if on_embedding else nn.Identity()
        self.encoder_norm = LayerNorm(d_model, bias=learned, gains=learned) if config.encoder_norm else nn.Identity()
        self.aggregation: nn.Module = RunningMean()
        if config.aggregation == "convolution":
            assert config.kernel_size is not None, "checked with the config"
            self.aggregation = CausalConvolution(config.kernel_size, d_model)
        elif config.aggregation == "matrix":
            assert max_positions is not None, "checked with the config"
            self.aggregation = PositionMatrix(max_positions, max_positions)

    def forward(self, embeddings: Tensor, encoder_out: Tensor, segments: Tensor | None) -> Tensor:
        """Distances (batch, length) in at least fp32, without the coefficient; `embeddings` and `encoder_out` are
        (batch, length, d_model)."""
        if self.config.detach == "embedding":
            embeddings = embeddings.detach()
        elif self.config.detach == "encoder_out":
            encoder_out = encoder_out.detach()
        length = embeddings.size(1)
        causal = Visibility(causal=True, query_segments=segments, key_segments=segments)
        seen = causal.mask(length, length, embeddings.device)
        assert seen is not None
        seen = seen[:, 0]
        if self.config.embedding_norm == "before_mean":
            embeddings = self.embedding_norm(embeddings)
        aggregate = self.aggregation(_precise(embeddings), seen).to(embeddings.dtype)
        if self.config.embedding_norm == "after_mean":
            aggregate = self.embedding_norm(aggregate)
        return disaffinity(self.config.kind, _precise(aggregate), _precise(self.encoder_norm(encoder_out)), seen)


def disaffinity(kind: str, aggregate: Tensor, output: Tensor, seen: Tensor) -> Tensor:
    """The distance (batch, length) of two tensors (batch, length, d_model). `seen` (batch, length, length): True where
    a query attends to a key."""
    if kind == "mse":
        return (aggregate - output).square().mean(dim=-1)
    if kind == "l1":
        return (aggregate - output).abs().mean(dim=-1)
    if kind == "kl":
        expected, found = aggregate.log_softmax(dim=-1), output.log_softmax(dim=-1)
        return F.kl_div(found, expected, reduction="none", log_target=True).sum(dim=-1)
    if kind == "contrastive":
        logits = F.normalize(aggregate, dim=-1) @ F.normalize(output, dim=-1).mT / TEMPERATURE
        return -logits.masked_fill(~seen, -torch.inf).log_softmax(dim=-1).diagonal(dim1=-2, dim2=-1)
    similarity = (F.cosine_similarity(aggregate, output, dim=-1) + 1) / 2
    return 1 - similarity if kind == "cosine" else -similarity.log()


def _precise(x: Tensor) -> Tensor:
    return x.to(at_least_fp32(x))


class Autoregressive(Model):
    """`forward` returns the loss of each token given those before it; `decode` returns logits, optionally cached."""

    config: AutoregressiveConfig

    def __init__(self, config: AutoregressiveConfig):
        super().__init__()
        self.config = config
        rows, d_model = config.padded_vocab_size, config.d_model
        self.embedding = Embedding(rows, d_model, config.init_std)
        self.position_embedding: LearnedPositions | None = None
        if config.position_rows:
            self.position_embedding = LearnedPositions(config.position_rows, d_model, config.init_std)
        self.dropout = Dropout(config.dropout_rate)
        layer = _layer_config(config, config.num_encoder_layers)
        self.encoder = nn.ModuleList(EncoderLayer(layer) for _ in range(config.num_encoder_layers))
        self.bridge = Bridge(config)
        self.decoder = nn.ModuleList(AutoregressiveLayer(config) for _ in range(config.num_decoder_layers))
        self.final_norm = layer.new_norm()
        self.subtracted_norm = layer.new_norm() if config.subtract_positions == "with_norm" else nn.Identity()
        self.lm_head = Head(d_model, rows, config.init_std, multiplier=config.logits_multiplier)
        # Two modules share this parameter, and each uses it only in its own forward, where ZeRO-3 gathers it.
        self.lm_head.weight = self.embedding.weight
        self.embedding_loss: EmbeddingLoss | None = None
        if config.embedding_loss is not None:
            self.embedding_loss = EmbeddingLoss(config.embedding_loss, d_model, config.max_positions)

    def forward(
        self, encoder_input_ids: Tensor, labels: Tensor, *, target_indices: Tensor | None = None, **attention: Tensor
    ) -> Losses:
        """Returns {"labels": cross-entropy of each label, "embedding_loss": in training, times its coefficient}.

        Both are (batch, length), fp32, 0 where the label is -100. `encoder_input_ids` (batch, length): the labels
        shifted right by one, so the decoder's segments and positions are ignored. The encoder's mask and segments apply
        everywhere, also to the aggregate of embeddings. `target_indices`: the indices of the labels that aren't
        ignored. `attention`: the tensors of `AttentionInputs`.
        """
        inputs = AttentionInputs(**attention)
        segments = inputs.encoder_attention_mask if inputs.encoder_segment_ids is None else inputs.encoder_segment_ids
        embeddings, encoder_out, x = self._run(encoder_input_ids, segments, inputs.encoder_positions, None)
        losses = {"labels": self.lm_head(x, labels, self.config, target_indices)}
        if self.embedding_loss is not None and self.training:
            distances = self.embedding_loss(embeddings, encoder_out, segments)
            scaled = self.embedding_loss.config.coefficient * distances
            losses["embedding_loss"] = scaled.masked_fill(labels == IGNORE_INDEX, 0.0)
        return losses

    def decode(self, input_ids: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Maps ids (batch, length) to logits (batch, length, padded_vocab_size).

        With a cache, the ids follow the cached tokens, and `attention_mask` (batch, past length + length) covers both.
        Prompts of different lengths are padded on the left. Positions count from the first real token.
        """
        return self.lm_head(self._run(input_ids, attention_mask, None, cache)[2])

    def new_cache(self) -> Cache:
        """An empty cache for `decode`."""
        encoder: Cache = [(KeyValueCache(),) for _ in self.encoder]
        return encoder + [(KeyValueCache(), KeyValueCache()) for _ in self.decoder]

    def _run(
        self, input_ids: Tensor, segments: Tensor | None, positions: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the embeddings after dropout, the encoder's output, and the head's input. `segments` (batch, keys): 0
        at padding."""
        length, device = input_ids.size(1), input_ids.device
        past_length = cache[0][0].length if cache else 0
        keys = past_length + length
        own = None if segments is None else segments[:, past_length:]
        causal = Visibility(causal=True, query_segments=own, key_segments=segments)
        seen = causal.mask(length, keys, device) if past_length or segments is not None else None
        if positions is None:
            longest = self.config.max_positions
            if longest is not None and keys > longest:
                raise ValueError(f"{keys} tokens exceed the model's {longest} learned positions")
            if segments is not None and seen is not None:  # the number of earlier tokens that a token attends to
                positions = seen.sum(dim=-1)[:, 0] - 1
        positions = positions_from(past_length, length, device, positions)
        embeddings = self.embedding(input_ids)
        if self.position_embedding is not None and self.config.positions == "learned":
            embeddings = embeddings + self.position_embedding(positions)
        embeddings = self.dropout(embeddings)
        bias = None if seen is None else logit_bias(embeddings, keys, causal)
        mask, cross_mask = self._masks(bias, positions, embeddings.dtype)
        encoder_out = grad_barrier(embeddings)
        for i, layer in enumerate(self.encoder):
            encoder_out = layer(encoder_out, mask, cache[i][0] if cache else None)
        x = self.bridge(encoder_out)
        if self.config.add_positions:
            x = x + self._next_positions(positions)
        for i, layer in enumerate(self.decoder, start=len(self.encoder)):
            x = layer(x, encoder_out, mask, cross_mask, cache[i] if cache else None)
        x = self.final_norm(x)
        if self.config.subtract_positions != "none":
            x = self.subtracted_norm(x - self._next_positions(positions))
        return embeddings, encoder_out, x

    def _masks(
        self, bias: Tensor | Pattern | None, positions: Tensor, dtype: torch.dtype
    ) -> tuple[AttentionMask, AttentionMask]:
        """The masks of self- and cross-attention. Both have the same causal bias; rotary embeddings differ, since the
        heads differ in width."""
        mask = AttentionMask(bias, is_causal=bias is None)
        if self.config.positions == "learned":
            return mask, mask
        own, across = (
            rotary_embedding(positions, self.config.d_model // heads, dtype)
            for heads in (self.config.num_heads, self.config.cross_heads)
        )
        return mask._replace(rotary=own), mask._replace(rotary=across, memory_rotary=across)

    def _next_positions(self, positions: Tensor) -> Tensor:
        assert self.position_embedding is not None, "checked with the config"
        return self.position_embedding(positions + 1)


def _config_from_hf(settings: Json, tensors: State) -> Json:
    """Our other settings. If transformers saved the model again, the weights of the embedding loss are gone, and the
    config drops the loss."""
    ids = vocabulary(settings)
    known = AutoregressiveConfig.model_fields.keys() & settings.keys()
    config = AutoregressiveConfig.model_validate({name: settings[name] for name in known})
    of_loss = {name for name in meta_model(config).state_dict() if name.startswith("embedding_loss.")}
    gone = {"embedding_loss": None} if of_loss and of_loss.isdisjoint(tensors) else {}
    return {**ids, **gone}


HF_MODELS = (
    own_code(
        AutoregressiveConfig,
        "autoregressive",
        "autoregressive_encoder_decoder",
        "AutoModelForCausalLM",
        "AutoregressiveForCausalLM",
        fixed={"tie_word_embeddings": True},
        config_from_hf=_config_from_hf,
        last_norm=lambda config: {"none": "final_norm", "with_norm": "subtracted_norm"}.get(config.subtract_positions),
    ),
)
