"""The decoder-only model in transformers: GPT-2, or the layers of Llama, Qwen3, Gemma 2 or Gemma 3.

GPT-2's matrices are transposed (`Conv1D`), and queries, keys and values share one matrix: c_attn.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.config.models import DecoderOnlyConfig, Heads, LocalAndGlobal
from pretrain.models.state_dict_adapter import (
    Choice,
    HFModel,
    Json,
    Settings,
    State,
    drop_tensors,
    tensors_of,
    to_theirs,
    vocabulary,
    within,
)

# --- GPT-2 ---

_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.wi": "mlp.c_fc",
    "feed_forward.wo": "mlp.c_proj",
}
_GPT2_NAMES = {
    "embedding.weight": "transformer.wte.weight",
    "decoder.positions.weight": "transformer.wpe.weight",
    **tensors_of(
        {
            **within("decoder.layers.{}", "transformer.h.{}", _GPT2_LAYER),
            "decoder.final_norm": "transformer.ln_f",
        },
        "weight",
        "bias",
    ),
}
_GPT2_MASKS = (".attn.bias", ".attn.masked_bias")  # the published files have causal masks beside the weights
_GPT2_ACTIVATION = Choice(
    "activation_function",
    {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"},
    {"gelu_pytorch_tanh": "gelu_tanh"},
)
_GPT2_SETTINGS: Settings = {
    "d_model": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_positions": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "dropout_rate": "resid_pdrop",  # that of residual branches
    "activation": _GPT2_ACTIVATION,
}


def _gpt2_config_to_hf(config: DecoderOnlyConfig) -> Json:
    return {"n_inner": config.d_ff, "embd_pdrop": config.dropout_rate, "attn_pdrop": config.dropout_rate}


def _gpt2_config_from_hf(settings: Json, tensors: State) -> Json:
    drop_tensors(tensors, lambda name: name.endswith(_GPT2_MASKS))
    d_ff = settings["n_inner"] or 4 * settings["n_embd"]
    return {**vocabulary(settings, pad_id=settings["eos_token_id"]), "d_ff": d_ff}


def _fused(config: DecoderOnlyConfig, state: Mapping[str, Tensor]) -> State:
    """A model without biases gets biases of zero: transformers' GPT-2 always has them."""
    fused = dict(state)
    for name, tensor in state.items():
        if not config.biases and name.startswith(("decoder.layers.", "decoder.final_norm.")):
            fused[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    for attention, kind in _attentions(config):
        fused[f"{attention}.qkv.{kind}"] = torch.cat([fused.pop(f"{attention}.{one}.{kind}") for one in "qkv"])
    return _transposed(fused)


def _split(config: DecoderOnlyConfig, state: State) -> State:
    parts = _transposed(state)
    for attention, kind in _attentions(config):
        chunks = parts.pop(f"{attention}.qkv.{kind}").chunk(3)
        parts |= {f"{attention}.{one}.{kind}": chunk.contiguous() for one, chunk in zip("qkv", chunks, strict=True)}
    return parts


def _attentions(config: DecoderOnlyConfig) -> Iterator[tuple[str, str]]:
    for layer in range(config.num_layers):
        for kind in ("weight", "bias"):
            yield f"decoder.layers.{layer}.attention", kind


def _transposed(state: Mapping[str, Tensor]) -> State:
    return {
        name: tensor.t().contiguous() if name.startswith("decoder.layers.") and tensor.dim() == 2 else tensor
        for name, tensor in state.items()
    }


_GPT2 = HFModel(
    DecoderOnlyConfig,
    "gpt2",
    "GPT2LMHeadModel",
    "GPT-2",
    _GPT2_SETTINGS,
    _GPT2_NAMES,
    _gpt2_config_to_hf,
    _gpt2_config_from_hf,
    keys={"d_ff": "n_inner"},
    copies={"transformer.wte.weight": ["lm_head.weight"]},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    tensors_to_hf=_fused,
    tensors_from_hf=_split,
    can_be={
        "positions": ("learned",),
        "subtract_positions": ("none",),
        "prefix_attention": ("causal",),
        "activation": tuple(_GPT2_ACTIVATION.values),
        "norm": ("layer",),
        "norm_after": (False,),
        "qk_norm": (False,),
        "num_key_value_heads": (None,),
        "head_dim": (None,),
        "query_pre_attn_scalar": (None,),
        "sliding_window": (None,),
        "attention_softcap": (None,),
        "output_softcap": (None,),
        "scale_embedding": (False,),
        "tie_embeddings": (True,),
    },
)


# --- heads, windows and rotations, also of T5Gemma ---

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
HEADS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "d_kv": "head_dim",
}
KEYS = {**HEADS, "num_key_value_heads": HEADS["kv_heads"], "num_layers": "num_hidden_layers"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
UNUSED_WINDOW = 4096


@dataclass(frozen=True)
class RotarySettings:
    """The settings of heads, windows and rotations in a model of transformers, `model` in messages.

    `windows`: true if layers may have one. `two_bases`: true if these layers have a rotary base of their own. `scalar`:
    true if `query_pre_attn_scalar` counts; in other models transformers ignores it.
    """

    model: str
    windows: bool = True
    two_bases: bool = False
    scalar: bool = True

    def to_theirs(self, config: LocalAndGlobal, stack: Heads, num_layers: int) -> Json:
        """Raises UserError for widths of heads that the model can't have, and for a window of one token: transformers'
        cache would show all tokens instead."""
        if stack.d_model % stack.num_heads:
            raise UserError(f"transformers has no {self.model} whose num_heads doesn't divide d_model")
        theirs = to_theirs(stack, HEADS)
        rotation = {"rope_type": "default", "rope_theta": config.rope_base}
        theirs["rope_parameters"] = rotation
        if self.two_bases:
            local = config.window_rope_base or config.rope_base
            theirs["rope_parameters"] = {GLOBAL: rotation, LOCAL: {**rotation, "rope_theta": local}}
        if self.windows:
            if config.sliding_window == 1:
                raise UserError(
                    "transformers can't generate with sliding_window: 1: its cache holds windows of 2 tokens or more"
                )
            # transformers makes the mask of a window even if no layer has one, which takes a number
            theirs["sliding_window"] = config.sliding_window or UNUSED_WINDOW
            theirs["layer_types"] = layer_types(config, num_layers)
        if self.scalar:
            theirs["query_pre_attn_scalar"] = stack.attention_scalar
        return theirs

    def to_ours(self, saved: Json) -> Json:
        """Raises UserError for windows and rotations that our models don't have."""
        ours = {**self.heads_to_ours(saved), **(windows_to_ours(saved) if self.windows else {})}
        if not self.two_bases:
            return {**ours, "rope_base": base_to_ours(saved["rope_parameters"])}
        local, whole = (base_to_ours(saved["rope_parameters"][kind]) for kind in (LOCAL, GLOBAL))
        differs = ours["sliding_window"] is not None and local != whole
        return {**ours, "rope_base": whole, "window_rope_base": local if differs else None}

    def heads_to_ours(self, saved: Json) -> Json:
        """Our settings of heads; those that are as by default are None."""
        width, heads, kv_heads, d_kv = (saved[HEADS[name]] for name in ("d_model", "num_heads", "kv_heads", "d_kv"))
        ours = {
            "d_model": width,
            "d_ff": saved["intermediate_size"],
            "num_heads": heads,
            "num_key_value_heads": None if kv_heads == heads else kv_heads,
            "head_dim": None if d_kv * heads == width else d_kv,
        }
        if self.scalar:
            scalar = saved["query_pre_attn_scalar"]
            ours["query_pre_attn_scalar"] = None if scalar == d_kv else scalar
        return ours


def layer_types(config: LocalAndGlobal, num_layers: int) -> list[str]:
    return [GLOBAL if config.sees_all(layer) else LOCAL for layer in range(num_layers)]


def windows_to_ours(saved: Json) -> Json:
    """Raises UserError unless every n-th layer has full attention, and only these."""
    types, window = saved["layer_types"], saved["sliding_window"]
    every = types.index(GLOBAL) + 1 if GLOBAL in types else None
    if LOCAL not in types:
        return {"sliding_window": None, "full_attention_every": None}
    found = LocalAndGlobal(sliding_window=window, full_attention_every=every)
    if types != layer_types(found, len(types)):
        raise UserError(f"layer_types: our models have {GLOBAL} in every n-th layer and {LOCAL} in the others")
    return {"sliding_window": window, "full_attention_every": every}


def base_to_ours(parameters: Json) -> float:
    """The rotary base. Raises UserError for rotations that grow with the row otherwise than by position."""
    if parameters["rope_type"] != "default":
        raise UserError(
            f"rope_parameters: rope_type is {parameters['rope_type']!r}, but our models have 'default' only"
        )
    return parameters["rope_theta"]


# --- Llama, Qwen3, Gemma ---

_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout_rate": "attention_dropout",  # in transformers these models have no other dropout
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "output_softcap": "final_logit_softcapping"}
_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "decoder.final_norm.weight": "model.norm.weight",
}
_MATRICES = {
    **{f"attention.{matrix}": f"self_attn.{matrix}_proj" for matrix in "qkvo"},
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
}
_QK_NORMS = {f"attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_norm_after": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_norm_after": "post_feedforward_layernorm",
}
_ALL = {
    "positions": ("rotary",),
    "activation": tuple(ACTIVATIONS),
    "subtract_positions": ("none",),
    "prefix_attention": ("causal",),
}
_PLAIN = {
    **_ALL,
    "norm": ("rms",),
    "norm_after": (False,),
    "scale_embedding": (False,),
    "query_pre_attn_scalar": (None,),
    "attention_softcap": (None,),
    "output_softcap": (None,),
    "window_rope_base": (None,),
}
_GEMMA = {**_ALL, "norm": ("rms_around_one",), "norm_after": (True,), "scale_embedding": (True,), "biases": (False,)}


def rotary_model(
    name: str, model_type: str, class_name: str, can_be: Mapping[str, tuple], fixed: Mapping[str, Any]
) -> HFModel:
    """A model of transformers, which has those settings of ours that `can_be` doesn't fix."""
    is_gemma, has_windows = can_be["norm"] == ("rms_around_one",), "sliding_window" not in can_be
    has_biases = "biases" not in can_be
    constants = {setting: values[0] for setting, values in can_be.items() if len(values) == 1}
    rotary = RotarySettings(name, has_windows, "window_rope_base" not in can_be, scalar=is_gemma)
    stack = {
        **tensors_of(_QK_NORMS | (_GEMMA_NORMS if is_gemma else _NORMS)),
        **tensors_of(_MATRICES, "weight", *(("bias",) if has_biases else ())),
    }

    def config_to_hf(config: DecoderOnlyConfig) -> Json:
        further = rotary.to_theirs(config, config, config.num_layers)
        if has_biases:
            further |= {"attention_bias": config.biases, "mlp_bias": config.biases}
        if has_windows and not is_gemma:
            further |= {"use_sliding_window": config.sliding_window is not None}
        return further

    def config_from_hf(settings: Json, tensors: State) -> Json:
        ours = {
            **vocabulary(settings, pad_id=settings["eos_token_id"]),
            **constants,
            **rotary.to_ours(settings),
        }
        if has_biases:
            if settings["attention_bias"] != settings["mlp_bias"]:
                raise UserError("attention_bias and mlp_bias differ: our models have both kinds of biases or none")
            ours["biases"] = settings["attention_bias"]
        return ours

    return HFModel(
        DecoderOnlyConfig,
        model_type,
        class_name,
        name,
        {
            **_SETTINGS,
            **{ours: theirs for ours, theirs in _CAPS.items() if ours not in can_be},
            "activation": Choice("hidden_activation" if is_gemma else "hidden_act", ACTIVATIONS),
        },
        {**_OUTSIDE, **within("decoder.layers.{}", "model.layers.{}", stack)},
        config_to_hf,
        config_from_hf,
        keys=KEYS,
        fixed=fixed,
        can_be=can_be,
    )


_NO_BIAS = {"attention_bias": False}
_LLAMA = {**_PLAIN, "qk_norm": (False,), "sliding_window": (None,)}
_QWEN3 = {**_PLAIN, "qk_norm": (True,), "biases": (False,)}
_GEMMA2 = {**_GEMMA, "qk_norm": (False,), "window_rope_base": (None,)}
_GEMMA3 = {**_GEMMA, "qk_norm": (True,), "attention_softcap": (None,)}
HF_MODELS = (
    _GPT2,
    rotary_model("Llama", "llama", "LlamaForCausalLM", _LLAMA, {}),
    rotary_model("Qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN3, _NO_BIAS),
    rotary_model("Gemma 2", "gemma2", "Gemma2ForCausalLM", _GEMMA2, _NO_BIAS),
    rotary_model(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA3, {**_NO_BIAS, "use_bidirectional_attention": False}
    ),
)
