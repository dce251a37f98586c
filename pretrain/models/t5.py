"""T5: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

A pre-norm encoder-decoder without biases, with relative positions. Version 1.0 has ReLU layers and ties embedding and
output; version 1.1 has gated GELU layers and an untied output matrix. mT5, ByT5 and Flan-T5 are of version 1.1. UL2 has
gated SiLU layers (Tay et al. 2022), and umT5 relative positions in every layer (Chung et al. 2023). Other kinds of
positions are additions of this project.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from pretrain.config.model_config import Heads
from pretrain.config.models import T5Config
from pretrain.models.attention import AttentionMask, self_attention_mask
from pretrain.models.functional.attention_backends import Visibility
from pretrain.models.layers import Embedding, LayerConfig
from pretrain.models.model import Head
from pretrain.models.positions import LearnedPositions
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder, Stack
from pretrain.models.t5_hf import HF_MODELS as HF_MODELS


def relative_position_bucket(
    relative_position: Tensor, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """The buckets of `key position − query position`: exact for small distances, logarithmic for larger ones.

    If bidirectional, half of the buckets are for keys after the query; otherwise all keys after the query share bucket
    0.

        bidirectional, 32 buckets, 128:   -200 → 15   -9 → 8   -1 → 1   0 → 0   1 → 17   200 → 31
        unidirectional:                   -200 → 31   -17 → 16   -1 → 1   0 → 0   1 → 0
    """
    if bidirectional:
        num_buckets //= 2
        offset = torch.where(relative_position > 0, num_buckets, 0)
        distance = relative_position.abs()
    else:
        offset = torch.zeros_like(relative_position)
        distance = (-relative_position).clamp(min=0)
    num_exact = num_buckets // 2
    # always fp32: bf16 would shift the bucket boundaries
    growth = torch.log(distance.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (growth * (num_buckets - num_exact)).long()
    return offset + torch.where(distance < num_exact, distance, far.clamp(max=num_buckets - 1))


class RelativePositionBias(Embedding):
    """T5's relative positions (Raffel et al. 2020, section 2.1): a scalar for each head and bucket."""

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, bidirectional: bool, std: float):
        super().__init__(num_buckets, num_heads, std)
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def forward(self, queries: int, keys: int) -> Tensor:  # type: ignore[override]
        """Returns the diagonals (heads, queries + keys − 1): the bias of query i and key j at queries − 1 − i + j.

        The last query is aligned with the last key, as in decoding with a cache. The bias depends on the distance
        alone, so each diagonal is looked up once.
        """
        distances = torch.arange(1 - keys, queries, device=self.weight.device)
        buckets = relative_position_bucket(distances, self.bidirectional, self.num_embeddings, self.max_distance)
        return super().forward(buckets).t()


_ACTIVATIONS = {"gated-gelu": "geglu", "gated-silu": "swiglu", "relu": "relu"}


def _layer_config(config: T5Config) -> LayerConfig:
    """The settings of layers. Initial standard deviations follow from the fan-in; attention logits aren't scaled."""
    return LayerConfig.of(
        config,
        Heads(d_model=config.d_model, d_ff=config.d_ff, num_heads=config.num_heads, head_dim=config.d_kv),
        activation=_ACTIVATIONS[config.feed_forward],
        norm="rms",
        activation_dropout_rate=config.dropout_rate,
        scaled=False,
    )


def _output_std(config: T5Config) -> float:
    return config.init_output_std * (1.0 if config.scale_outputs else config.base_width**-0.5)


def _embedding_std(config: T5Config) -> float:
    return _output_std(config) if config.tie_embeddings else 1.0


class T5Stack(Stack):
    """A stack with the config's kind of positions.

    The bias of relative positions is computed once for all layers that share `relative_attention_bias`, and once for
    each layer if each has its own in `relative_attention_biases`.
    """

    def new_positions(self, config: T5Config) -> None:
        self.relative_attention_biases: nn.ModuleDict | None = None  # lists are of layers
        if config.positions == "relative":
            buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
            std, both = config.base_width**-0.5, not self.causal
            new_bias = partial(RelativePositionBias, buckets, distance, config.num_heads, both, std)
            if config.relative_attention_in_every_layer:
                layers = config.num_decoder_layers if self.causal else config.num_encoder_layers
                self.relative_attention_biases = nn.ModuleDict({str(layer): new_bias() for layer in range(layers)})
            else:
                self.relative_attention_bias = new_bias()
        elif config.positions == "learned":
            assert config.max_positions is not None
            self.learned_positions = LearnedPositions(config.max_positions, config.d_model, _embedding_std(config))

    def masks(self, x: Tensor, keys: int, positions: Tensor, seen: Visibility) -> list[AttentionMask]:
        if self.relative_attention_biases is None:
            return super().masks(x, keys, positions, seen)
        diagonals = [bias(x.size(1), keys) for bias in self.relative_attention_biases.values()]
        return [self_attention_mask(x, keys, seen, diagonals=one) for one in diagonals]

    def diagonals(self, queries: int, keys: int, x: Tensor) -> Tensor | None:
        if self.position_kind == "relative":
            return self.relative_attention_bias(queries, keys)
        return super().diagonals(queries, keys, x)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().add_positions(
            x + self.learned_positions(positions) if self.position_kind == "learned" else x, positions
        )


class T5Encoder(T5Stack, Encoder):
    """The encoder."""


class T5Decoder(T5Stack, Decoder):
    """The decoder. Cross-attention has no positions."""


class T5(EncoderDecoder):
    """The model."""

    config: T5Config

    def __init__(self, config: T5Config):
        rows, d_model = config.padded_vocab_size, config.d_model
        super().__init__(
            config,
            Embedding(rows, d_model, _embedding_std(config)),
            T5Encoder(config, _layer_config(config), config.num_encoder_layers),
            T5Decoder(config, _layer_config(config), config.num_decoder_layers),
            Head(d_model, rows, std=_output_std(config), multiplier=config.logits_multiplier),
            config.tie_embeddings,
        )

    def before_head(self, x: Tensor) -> Tensor:
        return x * self.config.d_model**-0.5 if self.config.scale_outputs else x
