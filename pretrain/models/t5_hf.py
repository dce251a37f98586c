"""T5 in transformers: `T5ForConditionalGeneration`."""

import torch

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
    ),
)
