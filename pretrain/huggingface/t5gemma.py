"""T5Gemma in transformers: `T5GemmaForConditionalGeneration`."""

from collections.abc import Mapping

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.blocks import (
    KEYS,
    heads_to_ours,
    heads_to_theirs,
    layer_types,
    rotations_to_ours,
    rotations_to_theirs,
    scalar_to_ours,
    windows_to_ours,
    windows_to_theirs,
)
from pretrain.huggingface.interchange import Exported, Interchange, State, drop_copies, renamed, to_ours, to_theirs
from pretrain.huggingface.json_files import Json
from pretrain.models import T5GemmaConfig
from pretrain.models.config.t5gemma import Gemma

STACKS = ("encoder", "decoder")
TIED = {"decoder_embedding.weight": "model.decoder.embed_tokens.weight", "lm_head.weight": "lm_head.out_proj.weight"}
NAMES = {"embedding.weight": "model.encoder.embed_tokens.weight", **TIED}
SUBLAYERS = {"self_attention": "self_attn", "cross_attention": "cross_attn", "feed_forward": "feedforward"}
PARTS = {
    **{ours + "_norm": f"pre_{theirs}_layernorm" for ours, theirs in SUBLAYERS.items()},
    **{ours + "_norm_after": f"post_{theirs}_layernorm" for ours, theirs in SUBLAYERS.items()},
    **{f"{one}_attention.{matrix}": f"{one}_attn.{matrix}_proj" for one in ("self", "cross") for matrix in "qkvo"},
    **{f"self_attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    "feed_forward.wi_0": "mlp.gate_proj",
    "feed_forward.wi_1": "mlp.up_proj",
    "feed_forward.wo": "mlp.down_proj",
}
ACTIVATION = "gelu_pytorch_tanh"
DROPOUT = {"dropout_rate": "dropout_rate", "attention_dropout_rate": "attention_dropout"}
# Settings of both stacks, which they share here.
SHARED = {
    "layer_norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
    "attention_softcap": "attn_logit_softcapping",
}


def to_hugging_face(state_dict: Mapping[str, Tensor], config: T5GemmaConfig) -> Exported:
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in state_dict.items()
        if name != "lm_head.weight"  # one matrix, stored once
    }
    saved = {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": config.padded_vocab_size,
        **{stack: _stack_to_theirs(config, stack) for stack in STACKS},
        **to_theirs(config, DROPOUT),
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
        **marks_to_theirs(config),
    }
    return Exported(tensors, saved, {**marks_to_theirs(config), "decoder_start_token_id": config.decoder_start_id})


def marks_to_theirs(config: Gemma) -> Json:
    return {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id}


def _stack_to_theirs(config: T5GemmaConfig, name: str) -> Json:
    stack = config.encoder if name == "encoder" else config.decoder
    if stack.d_model % stack.num_heads:
        raise UserError(f"transformers has no T5Gemma whose num_heads doesn't divide d_model ({name})")
    return {
        "vocab_size": config.padded_vocab_size,
        **heads_to_theirs(stack),
        "num_hidden_layers": stack.num_layers,
        "query_pre_attn_scalar": stack.attention_scalar,
        "hidden_activation": ACTIVATION,
        "rope_parameters": rotations_to_theirs(config.rope_base),
        **windows_to_theirs(config, stack.num_layers),
        "final_logit_softcapping": config.output_softcap,
        **to_theirs(config, SHARED),
        **marks_to_theirs(config),
        "pad_token_id": _padding(config),
        "bos_token_id": config.decoder_start_id,  # transformers' decoder starts from it
    }


def _padding(config: T5GemmaConfig) -> int:
    """The id that stacks in transformers don't see where they are given no mask: padding, or if that is a mark too, a
    row beyond the vocabulary, which no text has."""
    marks = {"the decoder's start": config.decoder_start_id, "EOS": config.eos_id}
    same = [mark for mark, id_ in marks.items() if id_ == config.pad_id]
    if not same:
        return config.pad_id
    spare = range(config.vocab_size or 0, config.padded_vocab_size)
    if not spare:
        raise UserError(
            f"transformers hides padding from a T5Gemma, and here padding, id {config.pad_id}, is also "
            f"{' and '.join(same)}: train with model.pad_vocab_to_multiple_of: 128, for an id that is padding alone"
        )
    return spare[0]


def from_hugging_face(saved: Json, tensors: State) -> tuple[T5GemmaConfig, State]:
    encoder, decoder = (saved[stack] for stack in STACKS)
    deeper = max(encoder, decoder, key=lambda stack: stack["num_hidden_layers"])
    drop_copies(tensors, TIED["decoder_embedding.weight"], [TIED["lm_head.weight"]])
    config = T5GemmaConfig.model_validate(
        {
            "vocab_size": decoder["vocab_size"],
            **marks_to_ours({**decoder, "pad_token_id": saved["pad_token_id"]}),
            **{stack: stack_to_ours(saved[stack]) for stack in STACKS},
            "rope_base": rotations_to_ours(decoder["rope_parameters"]),
            **windows_to_ours(deeper),
            **to_ours(decoder, SHARED),
            "output_softcap": decoder["final_logit_softcapping"],
            **to_ours(saved, DROPOUT),
        }
    )
    for name in ("vocab_size", "hidden_activation", "rope_parameters", "sliding_window", *SHARED.values()):
        if encoder[name] != decoder[name]:
            raise UserError(
                f"{name} is {encoder[name]} in the encoder and {decoder[name]} in the decoder; ours are equal"
            )
    if decoder["hidden_activation"] != ACTIVATION:
        raise UserError(f"hidden_activation is {decoder['hidden_activation']!r}, not {ACTIVATION}")
    for stack in STACKS:
        if saved[stack]["attention_bias"]:
            raise UserError(f"{stack}.attention_bias is true, but our T5Gemma has no biases")
        if saved[stack]["layer_types"] != layer_types(config, saved[stack]["num_hidden_layers"]):
            raise UserError("layer_types: encoder and decoder have their windows in different layers")
    if TIED["decoder_embedding.weight"] in tensors:
        tensors[TIED["lm_head.weight"]] = tensors[TIED["decoder_embedding.weight"]]
    return config, renamed(tensors, config, hugging_face_name)


def marks_to_ours(decoder: Json) -> Json:
    pad, bos = decoder["pad_token_id"], decoder["bos_token_id"]
    return {"pad_id": pad, "eos_id": decoder["eos_token_id"], "bos_id": None if bos == pad else bos}


def stack_to_ours(saved: Json) -> Json:
    return {**heads_to_ours(saved), **scalar_to_ours(saved), "num_layers": saved["num_hidden_layers"]}


def hugging_face_name(name: str) -> str:
    """The name that transformers gives to one of our tensors.

    encoder.layers.3.self_attention.q.weight → model.encoder.layers.3.self_attn.q_proj.weight
    """
    if name in NAMES:
        return NAMES[name]
    stack, rest = name.split(".", 1)
    if rest == "final_norm.weight":
        return f"model.{stack}.norm.weight"
    _, number, rest = rest.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"model.{stack}.layers.{number}.{PARTS[part]}.{kind}"


T5GEMMA = Interchange(
    "t5gemma",
    "T5GemmaForConditionalGeneration",
    to_hugging_face,
    from_hugging_face,
    {**KEYS, **SHARED, **DROPOUT},
    name="T5Gemma",
    can_be={"window_rope_base": (None,)},
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
    encoder_decoder=True,
    ends=True,
    last_norm=lambda config: "decoder.final_norm",
)
INTERCHANGES = (T5GEMMA,)
