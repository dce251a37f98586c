"""The decoder-only model in transformers: `GPT2LMHeadModel`, or one of those in `rotary_decoders`.

GPT-2's matrices are transposed (`Conv1D`), and queries, keys and values share one matrix: c_attn.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pretrain.huggingface.interchange import (
    Exported,
    Interchange,
    State,
    check,
    drop_copies,
    one_of,
    shapes,
    to_ours,
    to_theirs,
)
from pretrain.huggingface.json_files import Json
from pretrain.huggingface.rotary_decoders import FORMS
from pretrain.models import DecoderOnlyConfig

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
OURS = {**{theirs: ours for ours, theirs in ACTIVATIONS.items()}, "gelu_pytorch_tanh": "gelu_tanh"}
NAMES = {
    "embedding.weight": "transformer.wte.weight",
    "decoder.positions.weight": "transformer.wpe.weight",
    "decoder.final_norm.weight": "transformer.ln_f.weight",
    "decoder.final_norm.bias": "transformer.ln_f.bias",
}
NORMS = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
MATRICES = {
    "attn.c_attn": ["attention.q", "attention.k", "attention.v"],
    "attn.c_proj": ["attention.o"],
    "mlp.c_fc": ["feed_forward.wi"],
    "mlp.c_proj": ["feed_forward.wo"],
}
SETTINGS = {
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_positions": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "dropout_rate": "resid_pdrop",
}
CAN_BE = {
    "positions": ("learned",),
    "subtract_positions": ("none",),
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
}
# Settings of transformers' GPT-2 that ours lacks, each with the value at which both compute the same.
FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_hugging_face(state_dict: Mapping[str, Tensor], config: DecoderOnlyConfig) -> Exported:
    """A model without biases gets biases of zero: transformers' GPT-2 always has them."""
    ours = dict(state_dict)
    for name, tensor in state_dict.items():
        if not config.biases and (name.startswith("decoder.layers.") or name.startswith("decoder.final_norm.")):
            ours[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0])
    tensors = {theirs: ours[name] for name, theirs in NAMES.items()}
    for layer in range(config.num_layers):
        here, there = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for kind in ("weight", "bias"):
            tensors |= {f"{there}.{norm}.{kind}": ours[f"{here}.{name}.{kind}"] for name, norm in NORMS.items()}
            for theirs, names in MATRICES.items():
                joined = torch.cat([ours[f"{here}.{name}.{kind}"] for name in names])
                tensors[f"{there}.{theirs}.{kind}"] = joined.t() if kind == "weight" else joined
    ids = {"eos_token_id": config.eos_id, "pad_token_id": config.pad_id}
    saved = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.padded_vocab_size,
        **to_theirs(config, SETTINGS),
        "activation_function": ACTIVATIONS[config.activation],
        **{f"{part}_pdrop": config.dropout_rate for part in ("embd", "attn")},
        "tie_word_embeddings": True,
        **ids,
    }
    return Exported(tensors, saved, ids)


def from_hugging_face(saved: Json, tensors: State) -> tuple[DecoderOnlyConfig, State]:
    """The dropout rate is that of residual branches."""
    masks = (".attn.bias", ".attn.masked_bias")  # the published files have causal masks beside the weights
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(masks)}
    drop_copies(tensors, NAMES["embedding.weight"], ["lm_head.weight"])
    eos, pad = saved["eos_token_id"], saved["pad_token_id"]
    config = DecoderOnlyConfig(
        vocab_size=saved["vocab_size"],
        pad_id=eos if pad is None else pad,
        eos_id=eos,
        activation=one_of(saved, "activation_function", OURS),
        **to_ours({**saved, "n_inner": saved["n_inner"] or 4 * saved["n_embd"]}, SETTINGS),
    )
    check(_their_shapes(config), tensors)
    state = {name: tensors[theirs] for name, theirs in NAMES.items()}
    state["lm_head.weight"] = state["embedding.weight"]
    for layer in range(config.num_layers):
        here, there = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for kind in ("weight", "bias"):
            state |= {f"{here}.{name}.{kind}": tensors[f"{there}.{norm}.{kind}"] for name, norm in NORMS.items()}
            for theirs, names in MATRICES.items():
                joined = tensors[f"{there}.{theirs}.{kind}"]
                parts = (joined.t() if kind == "weight" else joined).chunk(len(names))
                state |= {f"{here}.{name}.{kind}": part.contiguous() for name, part in zip(names, parts, strict=True)}
    return config, state


def _their_shapes(config: DecoderOnlyConfig) -> dict[str, tuple[int, ...]]:
    ours = {name: torch.empty(shape, device="meta") for name, shape in shapes(config).items()}
    return {name: tuple(tensor.shape) for name, tensor in to_hugging_face(ours, config).tensors.items()}


GPT2 = Interchange(
    "gpt2",
    "GPT2LMHeadModel",
    to_hugging_face,
    from_hugging_face,
    SETTINGS,
    name="GPT-2",
    can_be=CAN_BE,
    fixed=FIXED,
    last_norm=lambda config: "decoder.final_norm",
)
INTERCHANGES = (GPT2, *(form.interchange for form in FORMS))
