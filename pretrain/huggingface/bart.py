"""BART in transformers: `BartForConditionalGeneration`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.interchange import (
    Encoder,
    Exported,
    Interchange,
    State,
    drop_copies,
    one_of,
    renamed,
    to_ours,
    to_theirs,
)
from pretrain.huggingface.json_files import Json
from pretrain.models import BartConfig

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
OURS = {**{theirs: ours for ours, theirs in ACTIVATIONS.items()}, "gelu_new": "gelu_tanh"}
NAMES = {
    "embedding.weight": "model.shared.weight",
    "lm_head.weight": "lm_head.weight",
    "lm_head.final_logits_bias": "final_logits_bias",
}
PARTS = {
    "inputs.positions": "embed_positions",
    "inputs.norm": "layernorm_embedding",
    "self_attention": "self_attn",
    "self_attention_norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward.wi": "fc1",
    "feed_forward.wo": "fc2",
    "feed_forward_norm": "final_layer_norm",
    **{f"{ours}_attention.{matrix}": f"{theirs}_attn.{matrix}_proj"
       for ours, theirs in (("self", "self"), ("cross", "encoder")) for matrix in "qkv"},
    "self_attention.o": "self_attn.out_proj",
    "cross_attention.o": "encoder_attn.out_proj",
}  # fmt: skip
SETTINGS = {
    "d_model": "d_model",
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "max_positions": "max_position_embeddings",
    "scale_embedding": "scale_embedding",
    "init_std": "init_std",
    "dropout_rate": "dropout",
    "attention_dropout_rate": "attention_dropout",
    "activation_dropout_rate": "activation_dropout",
}


def to_hugging_face(state_dict: Mapping[str, Tensor], config: BartConfig) -> Exported:
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in state_dict.items()
        if name != "lm_head.weight"  # one matrix, stored once
    }
    tensors["final_logits_bias"] = tensors["final_logits_bias"][None]
    ids = {
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.decoder_start_id,
    }
    saved = {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "is_encoder_decoder": True,
        "vocab_size": config.padded_vocab_size,
        **to_theirs(config, SETTINGS),
        **{f"{stack}_attention_heads": config.num_heads for stack in ("encoder", "decoder")},
        **{f"{stack}_ffn_dim": config.d_ff for stack in ("encoder", "decoder")},
        "activation_function": ACTIVATIONS[config.activation],
        "tie_word_embeddings": True,
        "normalize_before": False,  # transformers 5 dropped the key, but CTranslate2 needs it
        "normalize_embedding": True,
        "forced_eos_token_id": None,  # the default, 2, would end every text of the maximum length
        **ids,
    }
    return Exported(tensors, saved, ids)


def from_hugging_face(saved: Json, tensors: State) -> tuple[BartConfig, State]:
    _refuse_unlike_stacks(saved)
    shared = "model.shared.weight"
    copies = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
    drop_copies(tensors, shared, copies)
    config = BartConfig(
        vocab_size=saved["vocab_size"],
        pad_id=saved["pad_token_id"],
        eos_id=saved["eos_token_id"],
        d_ff=saved["encoder_ffn_dim"],
        num_heads=saved["encoder_attention_heads"],
        activation=one_of(saved, "activation_function", OURS),
        **to_ours(saved, SETTINGS),
    )
    if shared in tensors:
        tensors["lm_head.weight"] = tensors[shared]
    bias = tensors.get("final_logits_bias", torch.zeros(1, config.padded_vocab_size))
    tensors["final_logits_bias"] = bias.flatten()
    return config, renamed(tensors, config, hugging_face_name)


def hugging_face_name(name: str) -> str:
    """The name that transformers gives to one of our tensors.

    encoder.layers.3.self_attention.q.weight → model.encoder.layers.3.self_attn.q_proj.weight
    """
    if name in NAMES:
        return NAMES[name]
    stack, rest = name.split(".", 1)
    layer = ""
    if rest.startswith("layers."):
        _, number, rest = rest.split(".", 2)
        layer = f"layers.{number}."
    part, kind = rest.rsplit(".", 1)
    return f"model.{stack}.{layer}{PARTS[part]}.{kind}"


def _refuse_unlike_stacks(saved: Json) -> None:
    """Raises UserError if encoder and decoder differ in settings that are shared here."""
    problems = [
        f"encoder_{key} is {saved[f'encoder_{key}']} and decoder_{key} is {saved[f'decoder_{key}']}"
        for key in ("attention_heads", "ffn_dim")
        if saved[f"encoder_{key}"] != saved[f"decoder_{key}"]
    ]
    if problems:
        raise UserError(f"encoder and decoder must have the same values for these settings: {'; '.join(problems)}")


def encoder_of(exported: Exported) -> Exported:
    """Under the names of transformers' BartEncoder, which the model contains."""
    inside = "model.encoder."
    tensors = {
        name.removeprefix(inside): tensor for name, tensor in exported.tensors.items() if name.startswith(inside)
    }
    tensors["embed_tokens.weight"] = exported.tensors["model.shared.weight"]
    return Exported(tensors, {**exported.config, "architectures": ["BartEncoder"]})


BART = Interchange(
    "bart",
    "BartForConditionalGeneration",
    to_hugging_face,
    from_hugging_face,
    {**SETTINGS, "num_heads": "encoder_attention_heads", "d_ff": "encoder_ffn_dim"},
    fixed={"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "tie_word_embeddings": True},
    encoder_decoder=True,
    begins=True,
    ends=True,
    encoder=Encoder("transformers.models.bart.modeling_bart.BartEncoder", encoder_of),
    engines={"ctranslate2": lambda state, config: (state, config)},
    last_norm=lambda config: f"decoder.layers.{config.num_decoder_layers - 1}.feed_forward_norm",
)
INTERCHANGES = (BART,)
