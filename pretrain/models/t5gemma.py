"""T5Gemma: Zhang et al., "Encoder-Decoder Gemma: Improving the Quality-Efficiency Trade-Off via Adaptation" (2025).

Two stacks of Gemma 2's layers: norms before and after each sublayer, GeGLU, grouped-query attention, RoPE, a sliding
window in every other layer, and soft caps. Each stack has an embedding matrix; the decoder's embedding is tied to the
output. Cross-attention has no positions and attends to the whole input. The authors' code and transformers differ in
the encoder's window; this follows transformers.
"""

from data_pipeline.base.errors import UserError
from pretrain.config.model_config import LocalAndGlobal, ModelConfig
from pretrain.config.models import Gemma, StackConfig, T5GemmaConfig
from pretrain.models.functional.attention_backends import Window
from pretrain.models.layers import Embedding, LayerConfig
from pretrain.models.model import Head
from pretrain.models.rotary_hf import KEYS, RotarySettings, layer_types, rotation_to_ours, windows_to_ours
from pretrain.models.stacks import Decoder, Encoder, EncoderDecoder
from pretrain.models.state_dict_adapter import (
    HFModel,
    Json,
    State,
    refuse_others,
    tensors_of,
    to_ours,
    to_theirs,
    vocabulary,
    within,
)


def layer_config(config: ModelConfig, stack: StackConfig, branches: int = 1) -> LayerConfig:
    """The settings of the layers of `stack`, with the config's dropout in feed-forward layers too."""
    return LayerConfig.of(config, stack, branches, activation_dropout_rate=config.dropout_rate)


def encoder_window(tokens: int) -> Window:
    """`tokens` keys on each side of a query."""
    return Window(tokens, tokens)


class T5Gemma(EncoderDecoder):
    """The model."""

    config: T5GemmaConfig

    def __init__(self, config: T5GemmaConfig):
        rows = config.padded_vocab_size
        std = config.init_std
        encoder = config.encoder
        decoder = config.decoder
        super().__init__(
            config,
            Embedding(rows, encoder.d_model, std),
            Encoder(config, layer_config(config, encoder), encoder.num_layers, encoder_window),
            Decoder(config, layer_config(config, decoder), decoder.num_layers, encoder.d_model),
            Head(decoder.d_model, rows, std, softcap=config.output_softcap, multiplier=config.logits_multiplier),
            tied=True,
            decoder_embedding=Embedding(rows, decoder.d_model, std),
        )


_STACKS = ("encoder", "decoder")
_SUBLAYERS = {"self_attention": "self_attn", "cross_attention": "cross_attn", "feed_forward": "feedforward"}
_LAYER = {
    **{ours + "_norm": f"pre_{theirs}_layernorm" for ours, theirs in _SUBLAYERS.items()},
    **{ours + "_norm_after": f"post_{theirs}_layernorm" for ours, theirs in _SUBLAYERS.items()},
    **{f"{one}_attention.{matrix}": f"{one}_attn.{matrix}_proj" for one in ("self", "cross") for matrix in "qkvo"},
    **{f"self_attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
}
HF_STACK = {**within("layers.{}", "layers.{}", _LAYER), "final_norm": "norm"}
HF_NAMES = tensors_of(
    {
        "embedding": "model.encoder.embed_tokens",
        "lm_head": "lm_head.out_proj",
        **within("encoder", "model.encoder", HF_STACK),
        "decoder_embedding": "model.decoder.embed_tokens",
        **within("decoder", "model.decoder", HF_STACK),
    }
)
HF_ACTIVATION = "gelu_pytorch_tanh"
HF_FIXED_IN_STACKS = {"hidden_activation": HF_ACTIVATION, "attention_bias": False}
HF_DROPOUT = {"dropout_rate": "dropout_rate", "attention_dropout_rate": "attention_dropout"}
# Settings that config.json has for each stack, and our stacks share.
_SHARED = {
    "layer_norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_softcap": "attn_logit_softcapping",
}
_ROTARY = RotarySettings()
HF_FIXED = {"is_encoder_decoder": True, "tie_word_embeddings": True}


def _config_to_hf(config: T5GemmaConfig) -> Json:
    shared = {
        "final_logit_softcapping": config.output_softcap,
        **to_theirs(config, _SHARED),
        "pad_token_id": _padding(config),
    }
    stacks = {name: {**stack_to_hf(config, stack, _ROTARY), **shared} for name, stack in config.stacks.items()}
    return {**stacks, "initializer_range": config.init_std}


def stack_to_hf(config: Gemma, stack: StackConfig, rotary: RotarySettings) -> Json:
    """The keys of a stack that both versions of T5Gemma have."""
    return {
        "vocab_size": config.padded_vocab_size,
        **rotary.to_theirs(config, stack, stack.num_layers),
        "num_hidden_layers": stack.num_layers,
        "hidden_activation": HF_ACTIVATION,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "bos_token_id": config.decoder_start_id,  # transformers' decoder starts from it
    }


def _padding(config: T5GemmaConfig) -> int:
    """The id that transformers' stacks mask if they get no attention mask: padding or, if padding has another role too,
    an id beyond the vocabulary, which no text has."""
    roles = {"the decoder's start": config.decoder_start_id, "EOS": config.eos_id}
    same = [role for role, id_ in roles.items() if id_ == config.pad_id]
    if not same:
        return config.pad_id
    spare = range(config.vocab_size or 0, config.padded_vocab_size)
    if not spare:
        raise UserError(
            f"transformers masks padding in a T5Gemma, and here padding, id {config.pad_id}, is also "
            f"{' and '.join(same)}: train with model.pad_vocab_to_multiple_of: 128, for an id that is padding alone"
        )
    return spare[0]


def _config_from_hf(settings: Json, tensors: State) -> Json:
    """Raises UserError if the stacks differ in settings that our stacks share."""
    encoder, decoder = (settings[stack] for stack in _STACKS)
    deeper = max(encoder, decoder, key=lambda stack: stack["num_hidden_layers"])
    windows = windows_to_ours(deeper)
    ours = {
        **decoder_vocabulary(settings, settings["pad_token_id"]),
        **{
            stack: {**_ROTARY.heads_to_ours(settings[stack]), "num_layers": settings[stack]["num_hidden_layers"]}
            for stack in _STACKS
        },
        **rotation_to_ours(decoder["rope_parameters"]),
        **windows,
        **to_ours(decoder, _SHARED),
        "output_softcap": decoder["final_logit_softcapping"],
    }
    keys = "vocab_size", "hidden_activation", "rope_parameters", "sliding_window", *_SHARED.values()
    refuse_differences(encoder, decoder, keys)
    for stack in _STACKS:
        refuse_others(settings[stack], HF_FIXED_IN_STACKS)
        types = layer_types(LocalAndGlobal(**windows), settings[stack]["num_hidden_layers"])
        if settings[stack]["layer_types"] != types:
            raise UserError("layer_types: encoder and decoder have their windows in different layers")
    return ours


def refuse_differences(encoder: Json, decoder: Json, keys: tuple[str, ...]) -> None:
    for key in keys:
        if encoder[key] != decoder[key]:
            raise UserError(
                f"{key} is {encoder[key]!r} in the encoder and {decoder[key]!r} in the decoder; ours are equal"
            )


def decoder_vocabulary(settings: Json, pad: int | None) -> Json:
    """The vocabulary of the decoder's section, with the id `pad` of padding: the section may have another; see
    `_padding`."""
    decoder = settings["decoder"]
    ids = vocabulary({**decoder, "pad_token_id": pad})
    return {**ids, "bos_id": None if decoder["bos_token_id"] == pad else decoder["bos_token_id"]}


HF_MODELS = (
    HFModel(
        config_class=T5GemmaConfig,
        model_type="t5gemma",
        class_name="T5GemmaForConditionalGeneration",
        name="T5Gemma",
        settings=HF_DROPOUT,
        names=HF_NAMES,
        config_to_hf=_config_to_hf,
        config_from_hf=_config_from_hf,
        keys={**KEYS, **_SHARED},
        fixed=HF_FIXED,
        can_be={"window_rope_base": (None,)},
        ends=True,
    ),
)
