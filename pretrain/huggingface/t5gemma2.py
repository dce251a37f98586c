"""The text part of T5Gemma 2 in transformers: `T5Gemma2ForConditionalGeneration`.

transformers always builds a vision tower. An export has the smallest one, of zeros; an import ignores the file's.
"""

from dataclasses import replace

import torch

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface import conversion
from pretrain.huggingface.attention_settings import HEADS, KEYS, RotarySettings
from pretrain.huggingface.conversion import Conversion, Exported, Json, State, within
from pretrain.huggingface.t5gemma import (
    ACTIVATION,
    DROPOUT,
    STACK,
    refuse_differences,
    stack_to_theirs,
    vocabulary,
)
from pretrain.models import T5Gemma2Config

ROTARY = RotarySettings("T5Gemma 2", two_bases=True)
TEXT = "model.encoder.text_model"
EMBEDDING = f"{TEXT}.embed_tokens.weight"
VISION_MODULES = ("vision_tower.", "multi_modal_projector.")
SHARED = {"layer_norm_epsilon": "rms_norm_eps", "init_std": "initializer_range"}
SAME = (
    "vocab_size",
    *HEADS.values(),
    "num_hidden_layers",
    "query_pre_attn_scalar",
    "hidden_activation",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    *SHARED.values(),
)
FIXED_IN_STACKS = {
    "hidden_activation": ACTIVATION,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
    "patch_size": 14,
}


def to_theirs(config: T5Gemma2Config) -> Json:
    stack = {
        **stack_to_theirs(config, config, ROTARY),
        **conversion.to_theirs(config, SHARED),
    }
    encoder = {
        "text_config": stack,
        "vision_config": VISION,
        "mm_tokens_per_image": 1,
        "eoi_token_index": config.padded_vocab_size,  # no id of a text
    }
    return {"encoder": encoder, "decoder": stack, "initializer_range": config.init_std}


def to_ours(settings: Json, tensors: State) -> Json:
    decoder = settings["decoder"]
    refuse_differences(settings["encoder"]["text_config"], decoder, SAME)
    for key, value in FIXED_IN_STACKS.items():
        if decoder[key] != value:
            raise UserError(f"{key} is {decoder[key]!r}, but must be {value!r}")
    layers = {"num_layers": decoder["num_hidden_layers"]}
    return {**ROTARY.to_ours(decoder), **layers, **conversion.to_ours(decoder, SHARED)}


def with_vision(exported: Exported) -> Exported:
    """With zeros for the tensors that transformers has for images."""
    from transformers import T5Gemma2Config as TheirConfig  # takes seconds to import
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    with torch.device("meta"):
        encoder = T5Gemma2Encoder(TheirConfig.from_dict(exported.config).encoder).state_dict()
    like = exported.tensors[EMBEDDING]
    unused = {
        f"model.encoder.{name}": like.new_zeros(tensor.shape)
        for name, tensor in encoder.items()
        if name.startswith(VISION_MODULES)
    }
    end_of_image = {f"{TEXT}.embed_tokens.eoi_embedding": like.new_zeros(like.shape[1])}
    return replace(exported, tensors={**exported.tensors, **unused, **end_of_image})


def without_vision(saved: Json) -> Json:
    encoder = saved.get("encoder")
    return {**saved, "encoder": {**encoder, "vision_config": VISION}} if isinstance(encoder, dict) else saved


def end_of_image(settings: Json) -> tuple[str, int] | None:
    id_ = settings["encoder"]["eoi_token_index"]
    return None if id_ is None else ("encoder.eoi_token_index", id_)


T5GEMMA2 = Conversion(
    "t5gemma2",
    "T5Gemma2ForConditionalGeneration",
    T5Gemma2Config,
    {
        "embedding": f"{TEXT}.embed_tokens",
        **within("encoder", TEXT, STACK),
        **within("decoder", "model.decoder", STACK),
    },
    DROPOUT,
    name="T5Gemma 2",
    encoder_decoder=True,
    ends=True,
    unused=r"^(model\.)?encoder\.(vision_tower|multi_modal_projector)\.|\.eoi_embedding$",
    copies={EMBEDDING: ["model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"]},
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
    to_theirs=to_theirs,
    to_ours=to_ours,
    vocabulary=lambda settings: vocabulary({**settings, "pad_token_id": settings["decoder"]["pad_token_id"]}),
    also_named={**KEYS, **SHARED},
    needed=without_vision,
    replaced=end_of_image,
    complete=with_vision,
)
CONVERSIONS = (T5GEMMA2,)
