"""T5: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020).

A pre-norm encoder-decoder without biases, with relative positions. Version 1.0 has ReLU layers and ties embedding and
output; version 1.1 has gated GELU layers and an untied output matrix. Other kinds of positions are additions of this
project.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.config.model_config import Heads
from pretrain.config.models import T5Config
from pretrain.models.layers import Embedding, LayerConfig
from pretrain.models.model import Head
from pretrain.models.positions import LearnedPositions
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder, Stack
from pretrain.models.state_dict_adapter import (
    Choice,
    HFModel,
    Json,
    State,
    drop_tensors,
    tensors_of,
    vocabulary,
    within,
)


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
    """T5's relative positions (Raffel et al. 2020, section 2.1): all layers share a scalar for each head and bucket."""

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


def _layer_config(config: T5Config) -> LayerConfig:
    """The settings of layers. Initial standard deviations follow from the fan-in; attention logits aren't scaled."""
    return LayerConfig.of(
        config,
        Heads(d_model=config.d_model, d_ff=config.d_ff, num_heads=config.num_heads, head_dim=config.d_kv),
        activation="geglu" if config.feed_forward == "gated-gelu" else "relu",
        norm="rms",
        activation_dropout_rate=config.dropout_rate,
        scaled=False,
    )


def _output_std(config: T5Config) -> float:
    return config.init_output_std * (1.0 if config.scale_outputs else config.base_width**-0.5)


def _embedding_std(config: T5Config) -> float:
    return _output_std(config) if config.tie_embeddings else 1.0


class T5Stack(Stack):
    """A stack with the config's kind of positions. The bias of relative positions is computed once for all layers."""

    def new_positions(self, config: T5Config) -> None:
        if config.positions == "relative":
            buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
            std, both = config.base_width**-0.5, not self.causal
            self.relative_attention_bias = RelativePositionBias(buckets, distance, config.num_heads, both, std)
        elif config.positions == "learned":
            assert config.max_positions is not None
            self.learned_positions = LearnedPositions(config.max_positions, config.d_model, _embedding_std(config))

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


# --- T5 in transformers ---

# In transformers a layer is a numbered list of sublayers, each with its norm.
_SUBLAYERS = {
    "self_attention": "SelfAttention",
    "cross_attention": "EncDecAttention",
    "feed_forward": "DenseReluDense",
}


def _names_of_stack(stack: str, *sublayers: str) -> dict[str, str]:
    names = {
        "relative_attention_bias": "block.0.layer.0.SelfAttention.relative_attention_bias",
        "final_norm": "final_layer_norm",
    }
    for number, ours in enumerate(sublayers):
        names[f"layers.{{}}.{ours}_norm"] = f"block.{{}}.layer.{number}.layer_norm"
        for matrix in ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"):
            names[f"layers.{{}}.{ours}.{matrix}"] = f"block.{{}}.layer.{number}.{_SUBLAYERS[ours]}.{matrix}"
    return within(stack, stack, names)


HF_NAMES = tensors_of(
    {
        "embedding": "shared",
        "lm_head": "lm_head",
        **_names_of_stack("encoder", "self_attention", "feed_forward"),
        **_names_of_stack("decoder", *_SUBLAYERS),
    }
)
# Cross-attention has no relative positions, but the first T5 models were saved with a table for it.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias."
_SHARED, _OUTPUT = "shared.weight", "lm_head.weight"
_SAME = ["d_model", "d_kv", "d_ff", "num_heads", "num_decoder_layers", "dropout_rate", "layer_norm_epsilon"]
_SAME += ["relative_attention_num_buckets", "relative_attention_max_distance"]
_SETTINGS = {
    **{name: name for name in _SAME},
    "num_encoder_layers": "num_layers",
    "scale_outputs": "scale_decoder_outputs",
}
# transformers derives the activation from `feed_forward_proj`, where gated-gelu means gated-gelu_new.
_HF_FEED_FORWARD = Choice("feed_forward_proj", {"relu": "relu", "gated-gelu": "gated-gelu_new"})


def _config_to_hf(config: T5Config) -> Json:
    return {
        "decoder_start_token_id": config.decoder_start_id,
        "decoder_layers": config.num_decoder_layers,  # transformers 5 sizes the decoder's cache by it
        "feed_forward_proj": config.feed_forward,
        "n_positions": 512,  # as in the published files, though T5's positions are relative
        # transformers 5 scales outputs if this is true; it unties two different matrices in any case
        "tie_word_embeddings": config.scale_outputs,
    }


def _config_from_hf(settings: Json, tensors: State) -> Json:
    """Our other settings. Embedding and output are tied if they are equal: transformers 5 compares them too, and
    `tie_word_embeddings` doesn't say."""
    drop_tensors(tensors, lambda name: name.startswith(_UNUSED))
    if _SHARED not in tensors and _OUTPUT in tensors:
        tensors[_SHARED] = tensors[_OUTPUT]
    if _OUTPUT in tensors and torch.equal(tensors[_OUTPUT], tensors[_SHARED]):
        del tensors[_OUTPUT]
    feed_forward = ("gated-" if settings["is_gated_act"] else "") + settings["dense_act_fn"]
    return {
        **vocabulary(settings, pad_id=0),
        "feed_forward": _HF_FEED_FORWARD.from_hf(feed_forward),
        "tie_embeddings": _OUTPUT not in tensors,
    }


def for_ctranslate2(state: Mapping[str, Tensor], config: T5Config) -> tuple[Mapping[str, Tensor], T5Config]:
    """The same model with outputs scaled by d_model^-½, and an untied output matrix multiplied by √d_model.

    CTranslate2 scales outputs if `tie_word_embeddings` is true, and transformers 5, which reads the file for
    CTranslate2, sets that flag for every T5.
    """
    if config.scale_outputs:
        return state, config
    changes = {"scale_outputs": True, "tie_embeddings": False}
    return {**state, _OUTPUT: state[_OUTPUT] * config.d_model**0.5}, config.model_copy(update=changes)


HF_MODELS = (
    HFModel(
        config_class=T5Config,
        model_type="t5",
        class_name="T5ForConditionalGeneration",
        name="T5",
        settings=_SETTINGS,
        names=HF_NAMES,
        config_to_hf=_config_to_hf,
        config_from_hf=_config_from_hf,
        copies={_SHARED: ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]},
        fixed={"is_encoder_decoder": True},  # without it, transformers' two attentions share one cache
        can_be={"positions": ("relative",)},
        ends=True,
        ctranslate2=for_ctranslate2,
    ),
)
