"""T5Gemma in transformers: `T5GemmaForConditionalGeneration`."""

from data_pipeline.foundation.errors import UserError
from pretrain.config.models import Gemma, StackConfig
from pretrain.huggingface import conversion
from pretrain.huggingface.attention_settings import KEYS, RotarySettings, base_to_ours, layer_types, windows_to_ours
from pretrain.huggingface.conversion import Conversion, Json, State, within
from pretrain.models import T5GemmaConfig

STACKS = ("encoder", "decoder")
SUBLAYERS = {"self_attention": "self_attn", "cross_attention": "cross_attn", "feed_forward": "feedforward"}
LAYER = {
    **{ours + "_norm": f"pre_{theirs}_layernorm" for ours, theirs in SUBLAYERS.items()},
    **{ours + "_norm_after": f"post_{theirs}_layernorm" for ours, theirs in SUBLAYERS.items()},
    **{f"{one}_attention.{matrix}": f"{one}_attn.{matrix}_proj" for one in ("self", "cross") for matrix in "qkvo"},
    **{f"self_attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
}
STACK = {**within("layers.{}", "layers.{}", LAYER), "final_norm": "norm"}
ACTIVATION = "gelu_pytorch_tanh"
DROPOUT = {"dropout_rate": "dropout_rate", "attention_dropout_rate": "attention_dropout"}
# Settings of both stacks, which they share here.
SHARED = {
    "layer_norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_softcap": "attn_logit_softcapping",
}


def to_theirs(config: T5GemmaConfig) -> Json:
    stacks = {name: _stack_to_theirs(config, stack, name) for name, stack in config.stacks.items()}
    return {**stacks, "initializer_range": config.init_std}


def _stack_to_theirs(config: T5GemmaConfig, stack: StackConfig, name: str) -> Json:
    return {
        **stack_to_theirs(config, stack, RotarySettings(f"T5Gemma {name}")),
        "final_logit_softcapping": config.output_softcap,
        **conversion.to_theirs(config, SHARED),
        "pad_token_id": _padding(config),
    }


def stack_to_theirs(config: Gemma, stack: StackConfig, rotary: RotarySettings) -> Json:
    """What both versions have in common."""
    return {
        "vocab_size": config.padded_vocab_size,
        **rotary.to_theirs(config, stack, stack.num_layers),
        "num_hidden_layers": stack.num_layers,
        "hidden_activation": ACTIVATION,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "bos_token_id": config.decoder_start_id,  # transformers' decoder starts from it
    }


def _padding(config: T5GemmaConfig) -> int:
    """The id that stacks in transformers mask where they are given no mask: padding, or if that has another role too, a
    row beyond the vocabulary, which no text has."""
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


def to_ours(settings: Json, tensors: State) -> Json:
    encoder, decoder = (settings[stack] for stack in STACKS)
    deeper = max(encoder, decoder, key=lambda stack: stack["num_hidden_layers"])
    ours = {
        **{stack: _stack_to_ours(settings[stack]) for stack in STACKS},
        "rope_base": base_to_ours(decoder["rope_parameters"]),
        **windows_to_ours(deeper),
        **conversion.to_ours(decoder, SHARED),
        "output_softcap": decoder["final_logit_softcapping"],
    }
    config = T5GemmaConfig.model_validate(ours)
    refuse_differences(
        encoder, decoder, ("vocab_size", "hidden_activation", "rope_parameters", "sliding_window", *SHARED.values())
    )
    if decoder["hidden_activation"] != ACTIVATION:
        raise UserError(f"hidden_activation is {decoder['hidden_activation']!r}, not {ACTIVATION}")
    for stack in STACKS:
        if settings[stack]["attention_bias"]:
            raise UserError(f"{stack}.attention_bias is true, but our T5Gemma has no biases")
        if settings[stack]["layer_types"] != layer_types(config, settings[stack]["num_hidden_layers"]):
            raise UserError("layer_types: encoder and decoder have their windows in different layers")
    return ours


def refuse_differences(encoder: Json, decoder: Json, keys: tuple[str, ...]) -> None:
    for key in keys:
        if encoder[key] != decoder[key]:
            raise UserError(f"{key} is {encoder[key]} in the encoder and {decoder[key]} in the decoder; ours are equal")


def _stack_to_ours(settings: Json) -> Json:
    return {**RotarySettings("T5Gemma").heads_to_ours(settings), "num_layers": settings["num_hidden_layers"]}


def vocabulary(settings: Json) -> Json:
    """As the decoder has it, but for padding: where the decoder has another id, see `_padding`."""
    decoder, pad = settings["decoder"], settings["pad_token_id"]
    ids = conversion.vocabulary_to_ours({**decoder, "pad_token_id": pad})
    return {**ids, "bos_id": None if decoder["bos_token_id"] == pad else decoder["bos_token_id"]}


T5GEMMA = Conversion(
    "t5gemma",
    "T5GemmaForConditionalGeneration",
    T5GemmaConfig,
    {
        "embedding": "model.encoder.embed_tokens",
        **within("encoder", "model.encoder", STACK),
        "decoder_embedding": "model.decoder.embed_tokens",
        **within("decoder", "model.decoder", STACK),
        "lm_head": "model.decoder.embed_tokens",
    },
    DROPOUT,
    name="T5Gemma",
    encoder_decoder=True,
    ends=True,
    copies={"model.decoder.embed_tokens.weight": ["lm_head.out_proj.weight"]},
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
    to_theirs=to_theirs,
    to_ours=to_ours,
    vocabulary=vocabulary,
    also_named={**KEYS, **SHARED},
    can_be={"window_rope_base": (None,)},
)
CONVERSIONS = (T5GEMMA,)
