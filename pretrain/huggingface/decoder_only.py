"""The decoder-only model in transformers: `GPT2LMHeadModel`, or one of those in `rotary_decoders`.

GPT-2's matrices are transposed (`Conv1D`), and queries, keys and values share one matrix: c_attn.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pretrain.huggingface.conversion import Choice, Conversion, Json, State, pad_or, within
from pretrain.huggingface.rotary_decoders import CONVERSIONS as ROTARY
from pretrain.models import DecoderOnlyConfig

LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.wi": "mlp.c_fc",
    "feed_forward.wo": "mlp.c_proj",
}
MODULES = {
    "embedding": "transformer.wte",
    "decoder.positions": "transformer.wpe",
    **within("decoder.layers.{}", "transformer.h.{}", LAYER),
    "decoder.final_norm": "transformer.ln_f",
}
SETTINGS = {
    "d_model": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_positions": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "dropout_rate": "resid_pdrop",  # that of residual branches
}
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


def fuse(state: Mapping[str, Tensor], config: DecoderOnlyConfig) -> State:
    """A model without biases gets biases of zero: transformers' GPT-2 always has them."""
    fused = dict(state)
    for name, tensor in state.items():
        if not config.biases and name.startswith(("decoder.layers.", "decoder.final_norm.")):
            fused[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    for attention, kind in _attentions(config):
        fused[f"{attention}.qkv.{kind}"] = torch.cat([fused.pop(f"{attention}.{one}.{kind}") for one in "qkv"])
    return _transposed(fused)


def split(state: State, config: DecoderOnlyConfig) -> State:
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


def to_theirs(config: DecoderOnlyConfig) -> Json:
    return {"n_inner": config.d_ff, "embd_pdrop": config.dropout_rate, "attn_pdrop": config.dropout_rate}


def to_ours(settings: Json, tensors: State) -> Json:
    return {"d_ff": settings["n_inner"] or 4 * settings["n_embd"]}


GPT2 = Conversion(
    "gpt2",
    "GPT2LMHeadModel",
    DecoderOnlyConfig,
    MODULES,
    SETTINGS,
    name="GPT-2",
    fuse=fuse,
    split=split,
    unused=r"\.attn\.(masked_)?bias$",  # the published files have causal masks beside the weights
    copies={"transformer.wte.weight": ["lm_head.weight"]},
    choices={"activation": Choice("activation_function", ACTIVATIONS, {"gelu_pytorch_tanh": "gelu_tanh"})},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    to_theirs=to_theirs,
    to_ours=to_ours,
    vocabulary=lambda settings: pad_or(settings, settings["eos_token_id"]),
    also_named={"d_ff": "n_inner"},
    can_be={
        "positions": ("learned",),
        "subtract_positions": ("none",),
        "prefix_attention": ("causal",),
        "activation": tuple(ACTIVATIONS),
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
CONVERSIONS = (GPT2, *ROTARY)
