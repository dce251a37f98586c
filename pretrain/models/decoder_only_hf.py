"""The decoder-only model in transformers: GPT-2, or the layers of Llama, Qwen3, Gemma 2 or Gemma 3.

GPT-2's matrices are transposed (`Conv1D`), and queries, keys and values share one matrix: c_attn.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.config.models import DecoderOnlyConfig
from pretrain.models.rotary_hf import ACTIVATIONS, KEYS, RotarySettings
from pretrain.models.state_dict_adapter import (
    Choice,
    Exported,
    HFModel,
    Json,
    State,
    drop_copies,
    from_hf_names,
    hf_config,
    meta_state,
    tensors_of,
    to_hf_names,
    to_ours,
    to_theirs,
    token_ids,
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
_GPT2_SETTINGS = {
    "d_model": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_positions": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "dropout_rate": "resid_pdrop",  # that of residual branches
}
_GPT2_ACTIVATION = Choice(
    "activation_function",
    {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"},
    {"gelu_pytorch_tanh": "gelu_tanh"},
)
_GPT2_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def gpt2_to_hf(config: DecoderOnlyConfig, state: Mapping[str, Tensor]) -> Exported:
    """`GPT2LMHeadModel`."""
    further = {"n_inner": config.d_ff, "embd_pdrop": config.dropout_rate, "attn_pdrop": config.dropout_rate}
    own = to_theirs(config, _GPT2_SETTINGS), _GPT2_ACTIVATION.to_hf(config.activation)
    saved = hf_config(config, "gpt2", "GPT2LMHeadModel", *own, _GPT2_FIXED, token_ids(config), further)
    return Exported(to_hf_names(_fused(state, config), _GPT2_NAMES, "embedding.weight"), saved, token_ids(config))


def gpt2_from_hf(settings: Json, tensors: State) -> tuple[DecoderOnlyConfig, State]:
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_GPT2_MASKS)}
    drop_copies(tensors, {"transformer.wte.weight": ["lm_head.weight"]})
    config = DecoderOnlyConfig.model_validate(
        {
            **vocabulary(settings, pad_id=settings["eos_token_id"]),
            **to_ours(settings, _GPT2_SETTINGS),
            "activation": _GPT2_ACTIVATION.from_hf(settings),
            "d_ff": settings["n_inner"] or 4 * settings["n_embd"],
        }
    )
    state = _fused(meta_state(config, tensors), config)
    return config, _split(from_hf_names(state, tensors, _GPT2_NAMES, "embedding.weight"), config)


def _fused(state: Mapping[str, Tensor], config: DecoderOnlyConfig) -> State:
    """A model without biases gets biases of zero: transformers' GPT-2 always has them."""
    fused = dict(state)
    for name, tensor in state.items():
        if not config.biases and name.startswith(("decoder.layers.", "decoder.final_norm.")):
            fused[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    for attention, kind in _attentions(config):
        fused[f"{attention}.qkv.{kind}"] = torch.cat([fused.pop(f"{attention}.{one}.{kind}") for one in "qkv"])
    return _transposed(fused)


def _split(state: State, config: DecoderOnlyConfig) -> State:
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


GPT2 = HFModel(
    "gpt2",
    "GPT2LMHeadModel",
    gpt2_to_hf,
    gpt2_from_hf,
    {**_GPT2_SETTINGS, "d_ff": "n_inner"},
    "GPT-2",
    fixed=_GPT2_FIXED,
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


# --- Llama, Qwen3, Gemma ---

_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout_rate": "attention_dropout",  # in transformers these models have no other dropout
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "output_softcap": "final_logit_softcapping"}
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
    settings_of = {**_SETTINGS, **{ours: theirs for ours, theirs in _CAPS.items() if ours not in can_be}}
    activation = Choice("hidden_activation" if is_gemma else "hidden_act", ACTIVATIONS)
    rotary = RotarySettings(name, has_windows, "window_rope_base" not in can_be, scalar=is_gemma)
    norms = _GEMMA_NORMS if is_gemma else _NORMS
    names = {
        **tensors_of(
            {
                "embedding": "model.embed_tokens",
                "lm_head": "lm_head",
                **within("decoder.layers.{}", "model.layers.{}", _QK_NORMS | norms),
                "decoder.final_norm": "model.norm",
            }
        ),
        **tensors_of(
            within("decoder.layers.{}", "model.layers.{}", _MATRICES), "weight", *(("bias",) if has_biases else ())
        ),
    }

    def to_hf(config: DecoderOnlyConfig, state: Mapping[str, Tensor]) -> Exported:
        further = rotary.to_theirs(config, config, config.num_layers)
        if has_biases:
            further |= {"attention_bias": config.biases, "mlp_bias": config.biases}
        if has_windows and not is_gemma:
            further |= {"use_sliding_window": config.sliding_window is not None}
        own = to_theirs(config, settings_of), activation.to_hf(config.activation)
        saved = hf_config(config, model_type, class_name, *own, dict(fixed), token_ids(config), further)
        return Exported(to_hf_names(state, names, _tied(config.tie_embeddings)), saved, token_ids(config))

    def from_hf(settings: Json, tensors: State) -> tuple[DecoderOnlyConfig, State]:
        if settings.get("tie_word_embeddings", True):
            drop_copies(tensors, {"model.embed_tokens.weight": ["lm_head.weight"]})
        values = {
            **vocabulary(settings, pad_id=settings["eos_token_id"]),
            **to_ours(settings, settings_of),
            "activation": activation.from_hf(settings),
            **constants,
            **rotary.to_ours(settings),
        }
        if has_biases:
            if settings["attention_bias"] != settings["mlp_bias"]:
                raise UserError("attention_bias and mlp_bias differ: our models have both kinds of biases or none")
            values["biases"] = settings["attention_bias"]
        config = DecoderOnlyConfig.model_validate(values)
        return config, from_hf_names(meta_state(config, tensors), tensors, names, _tied(config.tie_embeddings))

    keys = {**settings_of, **KEYS}
    return HFModel(model_type, class_name, to_hf, from_hf, keys, name, fixed=fixed, can_be=can_be)


def _tied(tie_embeddings: bool) -> str | None:
    return "embedding.weight" if tie_embeddings else None


_NO_BIAS = {"attention_bias": False}
_LLAMA = {**_PLAIN, "qk_norm": (False,), "sliding_window": (None,)}
_QWEN3 = {**_PLAIN, "qk_norm": (True,), "biases": (False,)}
_GEMMA2 = {**_GEMMA, "qk_norm": (False,), "window_rope_base": (None,)}
_GEMMA3 = {**_GEMMA, "qk_norm": (True,), "attention_softcap": (None,)}
HF_MODELS = (
    GPT2,
    rotary_model("Llama", "llama", "LlamaForCausalLM", _LLAMA, {}),
    rotary_model("Qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN3, _NO_BIAS),
    rotary_model("Gemma 2", "gemma2", "Gemma2ForCausalLM", _GEMMA2, _NO_BIAS),
    rotary_model(
        "Gemma 3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA3, {**_NO_BIAS, "use_bidirectional_attention": False}
    ),
)
