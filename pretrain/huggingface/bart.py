"""BART in transformers: `BartForConditionalGeneration`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.conversion import Choice, Conversion, Encoder, Exported, Json, State, within
from pretrain.models import BartConfig

BIAS = "lm_head.final_logits_bias"
LAYER = {
    **{f"self_attention.{matrix}": f"self_attn.{matrix}_proj" for matrix in "qkv"},
    "self_attention.o": "self_attn.out_proj",
    "self_attention_norm": "self_attn_layer_norm",
    **{f"cross_attention.{matrix}": f"encoder_attn.{matrix}_proj" for matrix in "qkv"},
    "cross_attention.o": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward.wi": "fc1",
    "feed_forward.wo": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
STACK = {
    "inputs.positions": "embed_positions",
    "inputs.norm": "layernorm_embedding",
    **within("layers.{}", "layers.{}", LAYER),
}
MODULES = {
    "embedding": "model.shared",
    **within("encoder", "model.encoder", STACK),
    **within("decoder", "model.decoder", STACK),
    BIAS: "final_logits_bias",
}
SETTINGS = {
    "d_model": "d_model",
    "d_ff": "encoder_ffn_dim",
    "num_heads": "encoder_attention_heads",
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "max_positions": "max_position_embeddings",
    "scale_embedding": "scale_embedding",
    "init_std": "init_std",
    "dropout_rate": "dropout",
    "attention_dropout_rate": "attention_dropout",
    "activation_dropout_rate": "activation_dropout",
}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def to_theirs(config: BartConfig) -> Json:
    return {
        "decoder_start_token_id": config.decoder_start_id,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.d_ff,
        "normalize_before": False,  # transformers 5 dropped the key, but CTranslate2 needs it
        "normalize_embedding": True,
        "forced_eos_token_id": None,  # the default, 2, would end every text of the maximum length
    }


def to_ours(settings: Json, tensors: State) -> Json:
    """Raises UserError if encoder and decoder differ in settings that are shared here."""
    problems = [
        f"encoder_{key} is {settings[f'encoder_{key}']} and decoder_{key} is {settings[f'decoder_{key}']}"
        for key in ("attention_heads", "ffn_dim")
        if settings[f"encoder_{key}"] != settings[f"decoder_{key}"]
    ]
    if problems:
        raise UserError(f"encoder and decoder must have the same values for these settings: {'; '.join(problems)}")
    return {}


def tidy(settings: Json, tensors: State) -> State:
    return {"final_logits_bias": torch.zeros(1, settings["vocab_size"]), **tensors}


def fuse(state: Mapping[str, Tensor], config: BartConfig) -> State:
    return {**state, BIAS: state[BIAS][None]}


def split(state: State, config: BartConfig) -> State:
    return {**state, BIAS: state[BIAS][0]}


def encoder_alone(exported: Exported) -> Exported:
    """Under the names of transformers' BartEncoder, which the model contains."""
    inside = "model.encoder."
    tensors = {
        name.removeprefix(inside): tensor for name, tensor in exported.tensors.items() if name.startswith(inside)
    }
    tensors["embed_tokens.weight"] = exported.tensors["model.shared.weight"]
    return Exported(tensors, {**exported.config, "architectures": ["BartEncoder"]})


BART = Conversion(
    "bart",
    "BartForConditionalGeneration",
    BartConfig,
    MODULES,
    SETTINGS,
    encoder_decoder=True,
    begins=True,
    ends=True,
    fuse=fuse,
    split=split,
    tidy=tidy,
    copies={
        "model.shared.weight": [
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        ]
    },
    last_norm=lambda config: f"decoder.layers.{config.num_decoder_layers - 1}.feed_forward_norm",
    choices={"activation": Choice("activation_function", ACTIVATIONS, {"gelu_new": "gelu_tanh"})},
    fixed={
        "is_encoder_decoder": True,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "tie_word_embeddings": True,
    },
    to_theirs=to_theirs,
    to_ours=to_ours,
    encoder=Encoder("transformers.models.bart.modeling_bart.BartEncoder", encoder_alone),
    engines={"ctranslate2": lambda state, config: (state, config)},
)
CONVERSIONS = (BART,)
