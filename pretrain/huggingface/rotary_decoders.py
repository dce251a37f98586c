"""The decoder-only model in transformers, where it has the layers of Llama, Qwen3, Gemma 2 or Gemma 3."""

from collections.abc import Callable, Mapping
from typing import Any

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.attention_settings import (
    ACTIVATIONS,
    KEYS,
    heads_to_ours,
    heads_to_theirs,
    rotations_to_ours,
    rotations_to_theirs,
    scalar_to_ours,
    two_rotations_to_theirs,
    windows_and_rotations_to_ours,
    windows_to_ours,
    windows_to_theirs,
)
from pretrain.huggingface.conversion import Choice, Conversion, Json, pad_or, within
from pretrain.huggingface.conversion import to_ours as renamed_to_ours
from pretrain.huggingface.conversion import to_theirs as renamed_to_theirs
from pretrain.models import DecoderOnlyConfig

SETTINGS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout_rate": "attention_dropout",  # in transformers these models have no other dropout
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
CAPS = {"attention_softcap": "attn_logit_softcapping", "output_softcap": "final_logit_softcapping"}
LAYER = {
    **{f"attention.{matrix}": f"self_attn.{matrix}_proj" for matrix in "qkvo"},
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
    "attention_norm": "input_layernorm",
}
NORMS_BEFORE = {"feed_forward_norm": "post_attention_layernorm"}
NORMS_BEFORE_AND_AFTER = {
    "attention_norm_after": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_norm_after": "post_feedforward_layernorm",
}
ALL = {"positions": ("rotary",), "activation": tuple(ACTIVATIONS), "subtract_positions": ("none",)}
PLAIN = {
    **ALL,
    "norm": ("rms",),
    "norm_after": (False,),
    "scale_embedding": (False,),
    "query_pre_attn_scalar": (None,),
    "attention_softcap": (None,),
    "output_softcap": (None,),
    "window_rope_base": (None,),
}
GEMMA = {**ALL, "norm": ("rms_around_one",), "norm_after": (True,), "scale_embedding": (True,), "biases": (False,)}


def conversion(
    name: str,
    model_type: str,
    class_name: str,
    can_be: Mapping[str, tuple],
    to_theirs: Callable[[DecoderOnlyConfig], Json],
    to_ours: Callable[[Json], Json],
    fixed: Mapping[str, Any],
) -> Conversion:
    """A model of transformers. `to_theirs`, `to_ours`: settings that only some of the models have."""
    is_gemma = can_be["norm_after"] == (True,)
    norms = NORMS_BEFORE_AND_AFTER if is_gemma else NORMS_BEFORE
    constant = {setting: values[0] for setting, values in can_be.items() if len(values) == 1}
    return Conversion(
        model_type,
        class_name,
        DecoderOnlyConfig,
        {
            "embedding": "model.embed_tokens",
            **within("decoder.layers.{}", "model.layers.{}", {**LAYER, **norms}),
            "decoder.final_norm": "model.norm",
        },
        SETTINGS,
        name=name,
        copies={"model.embed_tokens.weight": ["lm_head.weight"]},
        choices={"activation": Choice("hidden_activation" if is_gemma else "hidden_act", ACTIVATIONS)},
        fixed=fixed,
        to_theirs=lambda config: {**heads_to_theirs(config, name), **to_theirs(config)},
        to_ours=lambda settings, tensors: {**constant, **heads_to_ours(settings), **to_ours(settings)},
        vocabulary=lambda settings: pad_or(settings, settings["eos_token_id"]),
        also_named=KEYS,
        can_be=can_be,
    )


def llama_to_theirs(config: DecoderOnlyConfig) -> Json:
    biases = {"attention_bias": config.biases, "mlp_bias": config.biases}
    return {"rope_parameters": rotations_to_theirs(config.rope_base), **biases}


def llama_to_ours(settings: Json) -> Json:
    if settings["attention_bias"] != settings["mlp_bias"]:
        raise UserError("attention_bias and mlp_bias differ: our models have both kinds of biases or none")
    return {"rope_base": rotations_to_ours(settings["rope_parameters"]), "biases": settings["attention_bias"]}


def qwen3_to_theirs(config: DecoderOnlyConfig) -> Json:
    return {
        "rope_parameters": rotations_to_theirs(config.rope_base),
        "use_sliding_window": config.sliding_window is not None,
        **windows_to_theirs(config, config.num_layers),
    }


def qwen3_to_ours(settings: Json) -> Json:
    return {"rope_base": rotations_to_ours(settings["rope_parameters"]), **windows_to_ours(settings)}


def gemma2_to_theirs(config: DecoderOnlyConfig) -> Json:
    return {
        "rope_parameters": rotations_to_theirs(config.rope_base),
        **windows_to_theirs(config, config.num_layers),
        "query_pre_attn_scalar": config.attention_scalar,
        **renamed_to_theirs(config, CAPS),
    }


def gemma2_to_ours(settings: Json) -> Json:
    return {**qwen3_to_ours(settings), **renamed_to_ours(settings, CAPS), **scalar_to_ours(settings)}


def gemma3_to_theirs(config: DecoderOnlyConfig) -> Json:
    return {
        **two_rotations_to_theirs(config),
        **windows_to_theirs(config, config.num_layers),
        "query_pre_attn_scalar": config.attention_scalar,
        "final_logit_softcapping": config.output_softcap,
    }


def gemma3_to_ours(settings: Json) -> Json:
    if settings["use_bidirectional_attention"]:
        raise UserError("use_bidirectional_attention is true, but our decoders are causal")
    return {
        "output_softcap": settings["final_logit_softcapping"],
        **windows_and_rotations_to_ours(settings),
        **scalar_to_ours(settings),
    }


NO_BIAS = {"attention_bias": False}
CONVERSIONS = (
    conversion(
        "Llama",
        "llama",
        "LlamaForCausalLM",
        {**PLAIN, "qk_norm": (False,), "sliding_window": (None,)},
        llama_to_theirs,
        llama_to_ours,
        {},
    ),
    conversion(
        "Qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        {**PLAIN, "qk_norm": (True,), "biases": (False,)},
        qwen3_to_theirs,
        qwen3_to_ours,
        NO_BIAS,
    ),
    conversion(
        "Gemma 2",
        "gemma2",
        "Gemma2ForCausalLM",
        {**GEMMA, "qk_norm": (False,), "window_rope_base": (None,)},
        gemma2_to_theirs,
        gemma2_to_ours,
        NO_BIAS,
    ),
    conversion(
        "Gemma 3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**GEMMA, "qk_norm": (True,), "attention_softcap": (None,)},
        gemma3_to_theirs,
        gemma3_to_ours,
        NO_BIAS,
    ),
)
