"""T5 in transformers: `T5ForConditionalGeneration`, and umT5's class; mT5's class is read.

ByT5, Flan-T5 and UL2 are T5s in transformers too.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.config.models import T5Config
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

# In transformers a layer is a numbered list of sublayers, each with its norm.
_SUBLAYERS = {
    "self_attention": "SelfAttention",
    "cross_attention": "EncDecAttention",
    "feed_forward": "DenseReluDense",
}


def _names_of_stack(stack: str, *sublayers: str) -> dict[str, str]:
    names = {
        "relative_attention_bias": "block.0.layer.0.SelfAttention.relative_attention_bias",
        "relative_attention_biases.{}": "block.{}.layer.0.SelfAttention.relative_attention_bias",  # umT5's
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
_LAST_NORM = "decoder.final_norm.weight"
_SAME = ["d_model", "d_kv", "d_ff", "num_heads", "num_decoder_layers", "dropout_rate", "layer_norm_epsilon"]
_SAME += ["relative_attention_num_buckets", "relative_attention_max_distance"]
_SETTINGS = {
    **{name: name for name in _SAME},
    "num_encoder_layers": "num_layers",
    "scale_outputs": "scale_decoder_outputs",
}
# transformers derives the activation from `feed_forward_proj`, where gated-gelu means gated-gelu_new.
_HF_FEED_FORWARD = Choice(
    "feed_forward_proj", {"relu": "relu", "gated-gelu": "gated-gelu_new", "gated-silu": "gated-silu"}
)


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


def _config_from_mt5(settings: Json, tensors: State) -> Json:
    """transformers 4 scaled the outputs of an mT5 whose config.json says that it ties its matrices. transformers 5
    scales the outputs of no mT5, and says so in every file."""
    of_4 = str(settings["transformers_version"]).startswith("4.")
    return {**_config_from_hf(settings, tensors), "scale_outputs": of_4 and settings["tie_word_embeddings"] is True}


def _config_from_umt5(settings: Json, tensors: State) -> Json:
    """The file alone says whether outputs are scaled, as in transformers 4. transformers 5 scales all outputs."""
    return {
        **_config_from_hf(settings, tensors),
        "relative_attention_in_every_layer": True,
        "scale_outputs": settings["tie_word_embeddings"] is not False,
    }


def _config_to_umt5(config: T5Config) -> Json:
    return {**_config_to_hf(config), "tie_word_embeddings": True}


def _tensors_to_umt5(config: T5Config, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """transformers 5 scales the outputs of every umT5. The last norm takes the inverse of a factor that ours lacks."""
    if config.scale_outputs:
        return state
    return {**state, _LAST_NORM: state[_LAST_NORM] * config.d_model**0.5}


_COMMON: Json = {
    "config_class": T5Config,
    "names": HF_NAMES,
    "copies": {_SHARED: ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]},
    "fixed": {"is_encoder_decoder": True},  # without it, transformers' two attentions share one cache
    "ends": True,
}
_NOT_SCALED = {name: key for name, key in _SETTINGS.items() if name != "scale_outputs"}
HF_MODELS = (
    HFModel(
        **_COMMON,
        model_type="t5",
        class_name="T5ForConditionalGeneration",
        name="T5",
        settings=_SETTINGS,
        config_to_hf=_config_to_hf,
        config_from_hf=_config_from_hf,
        can_be={"positions": ("relative",), "relative_attention_in_every_layer": (False,)},
    ),
    HFModel(
        **_COMMON,
        model_type="mt5",
        class_name="MT5ForConditionalGeneration",
        name="mT5",
        settings=_NOT_SCALED,
        config_to_hf=_config_to_hf,
        config_from_hf=_config_from_mt5,
        as_saved=("tie_word_embeddings", "transformers_version"),
        can_be={"positions": ()},  # an imported mT5 is exported as a T5, which computes the same
    ),
    HFModel(
        **_COMMON,
        model_type="umt5",
        class_name="UMT5ForConditionalGeneration",
        name="umT5",
        settings=_NOT_SCALED,
        config_to_hf=_config_to_umt5,
        config_from_hf=_config_from_umt5,
        tensors_to_hf=_tensors_to_umt5,
        as_saved=("tie_word_embeddings",),
        can_be={"positions": ("relative",), "relative_attention_in_every_layer": (True,)},
    ),
)
