"""BART: Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural Language Generation" (2020).

The vanilla Transformer with learned positions, normalised embeddings in both stacks and GELU layers. All weights are
drawn from N(0, `init_std`²), 0.02 in section 2.1. Where the paper is silent, this follows fairseq.
"""

import math

import torch
from torch import Tensor, nn

from data_pipeline.base.errors import UserError
from pretrain.config.models import BartConfig
from pretrain.models.layers import Dropout, Embedding, LayerNorm
from pretrain.models.model import Head
from pretrain.models.positions import LearnedPositions
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder, Stack
from pretrain.models.state_dict_adapter import (
    Choice,
    HFModel,
    Json,
    Settings,
    State,
    drop_tensors,
    tensors_of,
    vocabulary,
    within,
)
from pretrain.models.vanilla import post_norm_layer

POSITION_OFFSET = 2  # fairseq counts positions from the row after padding's row, 1


class NormedInputs(nn.Module):
    """Token vectors plus learned positions, then layer norm, then dropout."""

    def __init__(self, config: BartConfig):
        super().__init__()
        self.scale = math.sqrt(config.base_width) if config.scale_embedding else 1.0
        self.positions = LearnedPositions(config.max_positions, config.d_model, config.init_std, POSITION_OFFSET)
        self.norm = LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout_rate)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.norm(x * self.scale + self.positions(positions)))


class BartStack(Stack):
    """A stack with `NormedInputs`."""

    def new_positions(self, config: BartConfig) -> None:
        self.inputs = NormedInputs(config)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inputs(x, positions)


class BartEncoder(BartStack, Encoder):
    """The encoder."""


class BartDecoder(BartStack, Decoder):
    """The decoder."""


class LogitsHead(Head):
    """The output matrix, with a bias that is not trained: zeros, unless an imported model has other values."""

    final_logits_bias: Tensor

    def __init__(self, d_model: int, rows: int, std: float, multiplier: float):
        super().__init__(d_model, rows, std, multiplier=multiplier)
        self.register_buffer("final_logits_bias", torch.zeros(rows))

    def offsets(self, x: Tensor) -> Tensor:
        return self.final_logits_bias.to(x.dtype)  # DeepSpeed leaves buffers in fp32


class Bart(EncoderDecoder):
    """The model. As in fairseq, padding's row starts at zero and gets a gradient from the output alone."""

    config: BartConfig

    def __init__(self, config: BartConfig):
        rows = config.padded_vocab_size
        d_model = config.d_model
        std = config.init_std
        # If one id is EOS and padding, as in GPT-2's vocabulary, its row must be trained.
        padding_idx = config.pad_id if config.pad_id != config.eos_id else None
        embedding = Embedding(rows, d_model, std, padding_idx)
        lm_head = LogitsHead(d_model, rows, std, config.logits_multiplier)
        layer = post_norm_layer(config)
        encoder = BartEncoder(config, layer, config.num_encoder_layers)
        decoder = BartDecoder(config, layer, config.num_decoder_layers)
        super().__init__(config, embedding, encoder, decoder, lm_head, tied=True)


_BIAS = "lm_head.final_logits_bias"
_LAYER = {
    **{f"self_attention.{matrix}": f"self_attn.{matrix}_proj" for matrix in "qkv"},
    "self_attention.o": "self_attn.out_proj",
    "self_attention_norm": "self_attn_layer_norm",
    "feed_forward.wi": "fc1",
    "feed_forward.wo": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_ACROSS = {
    **{f"cross_attention.{matrix}": f"encoder_attn.{matrix}_proj" for matrix in "qkv"},
    "cross_attention.o": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
}
HF_NAMES = {
    "embedding.weight": "model.shared.weight",
    **{f"{stack}.inputs.positions.weight": f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")},
    **tensors_of(
        {
            "encoder.inputs.norm": "model.encoder.layernorm_embedding",
            **within("encoder.layers.{}", "model.encoder.layers.{}", _LAYER),
            "decoder.inputs.norm": "model.decoder.layernorm_embedding",
            **within("decoder.layers.{}", "model.decoder.layers.{}", _LAYER | _ACROSS),
        },
        "weight",
        "bias",
    ),
    _BIAS: "final_logits_bias",
}
_VERSIONS = ("model.encoder.version", "model.decoder.version")  # fairseq's, in old files; transformers ignores them
_SETTINGS: Settings = {
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
    "activation": Choice(
        "activation_function",
        {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"},
        {"gelu_new": "gelu_tanh"},
    ),
}


def _config_to_hf(config: BartConfig) -> Json:
    return {
        "decoder_start_token_id": config.decoder_start_id,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.d_ff,
        "normalize_before": False,  # transformers 5 dropped the key, but CTranslate2 needs it
        "normalize_embedding": True,
        "forced_eos_token_id": None,  # the default, 2, would end every text of the maximum length
    }


def _config_from_hf(settings: Json, tensors: State) -> Json:
    """Raises UserError if encoder and decoder differ in settings that our stacks share."""
    ours = vocabulary(settings)
    drop_tensors(tensors, lambda name: name in _VERSIONS)
    problems = [
        f"encoder_{key} is {settings[f'encoder_{key}']} and decoder_{key} is {settings[f'decoder_{key}']}"
        for key in ("attention_heads", "ffn_dim")
        if settings[f"encoder_{key}"] != settings[f"decoder_{key}"]
    ]
    if problems:
        raise UserError(f"encoder and decoder must have the same values for these settings: {'; '.join(problems)}")
    tensors.setdefault("final_logits_bias", torch.zeros(1, ours["vocab_size"]))
    return ours


HF_MODELS = (
    HFModel(
        config_class=BartConfig,
        model_type="bart",
        class_name="BartForConditionalGeneration",
        name="bart",
        settings=_SETTINGS,
        names=HF_NAMES,
        config_to_hf=_config_to_hf,
        config_from_hf=_config_from_hf,
        copies={
            "model.shared.weight": [
                "model.encoder.embed_tokens.weight",
                "model.decoder.embed_tokens.weight",
                "lm_head.weight",
            ]
        },
        fixed={
            "is_encoder_decoder": True,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "tie_word_embeddings": True,
        },
        tensors_to_hf=lambda config, state: {**state, _BIAS: state[_BIAS][None]},
        tensors_from_hf=lambda config, state: {**state, _BIAS: state[_BIAS][0]},
        begins=True,
        ends=True,
        last_norm=lambda config: f"decoder.layers.{config.num_decoder_layers - 1}.feed_forward_norm",
    ),
)
