"""The decoder-only model in transformers, where it has the layers of Llama, Qwen3, Gemma 2 or Gemma 3."""

from collections.abc import Mapping
from typing import Any

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.attention_settings import ACTIVATIONS, KEYS, RotarySettings
from pretrain.huggingface.conversion import Choice, Conversion, Json, State, pad_or, within
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
NORMS = {"feed_forward_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attention_norm_after": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_norm_after": "post_feedforward_layernorm",
}
ALL = {
    "positions": ("rotary",),
    "activation": tuple(ACTIVATIONS),
    "subtract_positions": ("none",),
    "prefix_attention": ("causal",),
}
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
    name: str, model_type: str, class_name: str, can_be: Mapping[str, tuple], fixed: Mapping[str, Any]
) -> Conversion:
    """A model of transformers, which has those settings of ours that `can_be` doesn't fix."""
    is_gemma, has_windows = can_be["norm"] == ("rms_around_one",), "sliding_window" not in can_be
    has_biases = "biases" not in can_be
    constants = {setting: values[0] for setting, values in can_be.items() if len(values) == 1}

    rotary = RotarySettings(name, has_windows, "window_rope_base" not in can_be, scalar=is_gemma)

    def to_theirs(config: DecoderOnlyConfig) -> Json:
        theirs = rotary.to_theirs(config, config, config.num_layers)
        if has_biases:
            theirs |= {"attention_bias": config.biases, "mlp_bias": config.biases}
        if has_windows and not is_gemma:
            theirs |= {"use_sliding_window": config.sliding_window is not None}
        return theirs

    def to_ours(settings: Json, tensors: State) -> Json:
        ours = {**constants, **rotary.to_ours(settings)}
        if has_biases:
            if settings["attention_bias"] != settings["mlp_bias"]:
                raise UserError("attention_bias and mlp_bias differ: our models have both kinds of biases or none")
            ours |= {"biases": settings["attention_bias"]}
        return ours

    return Conversion(
        model_type,
        class_name,
        DecoderOnlyConfig,
        {
            "embedding": "model.embed_tokens",
            **within("decoder.layers.{}", "model.layers.{}", LAYER | (GEMMA_NORMS if is_gemma else NORMS)),
            "decoder.final_norm": "model.norm",
        },
        {**SETTINGS, **{ours: theirs for ours, theirs in CAPS.items() if ours not in can_be}},
        name=name,
        copies={"model.embed_tokens.weight": ["lm_head.weight"]},
        choices={"activation": Choice("hidden_activation" if is_gemma else "hidden_act", ACTIVATIONS)},
        fixed=fixed,
        to_theirs=to_theirs,
        to_ours=to_ours,
        vocabulary=lambda settings: pad_or(settings, settings["eos_token_id"]),
        also_named=KEYS,
        can_be=can_be,
    )


NO_BIAS = {"attention_bias": False}
LLAMA = {**PLAIN, "qk_norm": (False,), "sliding_window": (None,)}
QWEN3 = {**PLAIN, "qk_norm": (True,), "biases": (False,)}
GEMMA2 = {**GEMMA, "qk_norm": (False,), "window_rope_base": (None,)}
GEMMA3 = {**GEMMA, "qk_norm": (True,), "attention_softcap": (None,)}
CONVERSIONS = (
    conversion("Llama", "llama", "LlamaForCausalLM", LLAMA, {}),
    conversion("Qwen3", "qwen3", "Qwen3ForCausalLM", QWEN3, NO_BIAS),
    conversion("Gemma 2", "gemma2", "Gemma2ForCausalLM", GEMMA2, NO_BIAS),
    conversion(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM", GEMMA3, {**NO_BIAS, "use_bidirectional_attention": False}
    ),
)
