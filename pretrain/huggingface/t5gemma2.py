"""The text part of T5Gemma 2 in transformers: `T5Gemma2ForConditionalGeneration`.

transformers always builds a vision tower. An export has the smallest one, of zeros; an import ignores the file's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.blocks import (
    HEADS,
    KEYS,
    heads_to_theirs,
    rotations_to_ours,
    rotations_to_theirs,
    windows_to_ours,
    windows_to_theirs,
)
from pretrain.huggingface.interchange import Exported, Interchange, State, drop_copies, renamed, to_ours, to_theirs
from pretrain.huggingface.json_files import Json
from pretrain.huggingface.t5gemma import ACTIVATION, DROPOUT, PARTS, marks_to_ours, marks_to_theirs, stack_to_ours
from pretrain.models import T5Gemma2Config

EMBEDDING = "model.encoder.text_model.embed_tokens.weight"
COPIES = ["model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"]
STACKS = {"encoder": "model.encoder.text_model", "decoder": "model.decoder"}
OF_IMAGES = ("encoder.vision_tower.", "encoder.multi_modal_projector.")
END_OF_IMAGE = "model.encoder.text_model.embed_tokens.eoi_embedding"
SHARED = {"layer_norm_epsilon": "rms_norm_eps", "init_std": "initializer_range"}
SAME = (
    "vocab_size",
    *HEADS.values(),
    "num_hidden_layers",
    "query_pre_attn_scalar",
    "hidden_activation",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    *SHARED.values(),
)
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
    "patch_size": 14,
}


def to_hugging_face(state_dict: Mapping[str, Tensor], config: T5Gemma2Config) -> Exported:
    if config.d_model % config.num_heads:
        raise UserError("transformers has no T5Gemma 2 whose num_heads doesn't divide d_model")
    stack = _stack_to_theirs(config)
    saved = {
        "architectures": ["T5Gemma2ForConditionalGeneration"],
        "model_type": "t5gemma2",
        "is_encoder_decoder": True,
        "vocab_size": config.padded_vocab_size,
        "encoder": {
            "text_config": stack,
            "vision_config": VISION,
            "mm_tokens_per_image": 1,
            "eoi_token_index": config.padded_vocab_size,  # no id of a text
        },
        "decoder": stack,
        **to_theirs(config, DROPOUT),
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
        **marks_to_theirs(config),
    }
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in state_dict.items()
        if name != "lm_head.weight"  # one matrix, stored once
    }
    like = tensors[EMBEDDING]
    unused = {name: like.new_zeros(shape) for name, shape in _shapes_of_images(saved).items()}
    generation = {**marks_to_theirs(config), "decoder_start_token_id": config.decoder_start_id}
    return Exported({**tensors, **unused, END_OF_IMAGE: like.new_zeros(config.d_model)}, saved, generation)


def _stack_to_theirs(config: T5Gemma2Config) -> Json:
    bases = {"full_attention": config.rope_base, "sliding_attention": config.window_rope_base or config.rope_base}
    return {
        "vocab_size": config.padded_vocab_size,
        **heads_to_theirs(config),
        "num_hidden_layers": config.num_layers,
        "query_pre_attn_scalar": config.attention_scalar,
        "hidden_activation": ACTIVATION,
        "rope_parameters": {kind: rotations_to_theirs(base) for kind, base in bases.items()},
        **windows_to_theirs(config, config.num_layers),
        **to_theirs(config, SHARED),
        **marks_to_theirs(config),
        "bos_token_id": config.decoder_start_id,  # transformers' decoder starts from it
    }


def _shapes_of_images(saved: Json) -> dict[str, torch.Size]:
    """The tensors that transformers has for images."""
    from transformers import T5Gemma2Config as TheirConfig  # takes seconds to import
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    with torch.device("meta"):
        whole = T5Gemma2Encoder(TheirConfig.from_dict(saved).encoder)
    named = {f"model.encoder.{name}": tensor.shape for name, tensor in whole.state_dict().items()}
    return {name: shape for name, shape in named.items() if _is_of_images(name)}


def _is_of_images(name: str) -> bool:
    """Whether a tensor is of the model's part for images, in a file with the head or without it."""
    return name.removeprefix("model.").startswith(OF_IMAGES)


def _without_images(saved: Json) -> Json:
    encoder = saved.get("encoder")
    return {**saved, "encoder": {**encoder, "vision_config": VISION}} if isinstance(encoder, dict) else saved


def _end_of_image(settings: Json) -> tuple[str, int] | None:
    id_ = settings["encoder"]["eoi_token_index"]
    return None if id_ is None else ("encoder.eoi_token_index", id_)


def from_hugging_face(saved: Json, tensors: State) -> tuple[T5Gemma2Config, State]:
    text, decoder = saved["encoder"]["text_config"], saved["decoder"]
    for name in SAME:
        if text[name] != decoder[name]:
            raise UserError(f"{name} is {text[name]} in the encoder and {decoder[name]} in the decoder; ours are equal")
    fixed = {"hidden_activation": ACTIVATION, "attention_bias": False}
    fixed |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    for name, value in fixed.items():
        if decoder[name] != value:
            raise UserError(f"{name} is {decoder[name]!r}, but must be {value!r}")
    parameters, windows = decoder["rope_parameters"], windows_to_ours(decoder)
    local, whole = (rotations_to_ours(parameters[f"{kind}_attention"]) for kind in ("sliding", "full"))
    own_base = windows["sliding_window"] is not None and local != whole
    config = T5Gemma2Config.model_validate(
        {
            "vocab_size": decoder["vocab_size"],
            **marks_to_ours(decoder),
            **stack_to_ours(decoder),
            **windows,
            "rope_base": whole,
            "window_rope_base": local if own_base else None,
            **to_ours(decoder, SHARED),
            **to_ours(saved, DROPOUT),
        }
    )
    drop_copies(tensors, EMBEDDING, COPIES)
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not _is_of_images(name) and not name.endswith(".eoi_embedding")
    }
    state = renamed(tensors, config, hugging_face_name)
    return config, state


def hugging_face_name(name: str) -> str:
    """The name that transformers gives to one of our tensors.

    encoder.layers.3.self_attention.q.weight → model.encoder.text_model.layers.3.self_attn.q_proj.weight
    """
    if name in ("embedding.weight", "lm_head.weight"):
        return EMBEDDING
    stack, rest = name.split(".", 1)
    if rest == "final_norm.weight":
        return f"{STACKS[stack]}.norm.weight"
    _, number, rest = rest.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"{STACKS[stack]}.layers.{number}.{PARTS[part]}.{kind}"


T5GEMMA2 = Interchange(
    "t5gemma2",
    "T5Gemma2ForConditionalGeneration",
    to_hugging_face,
    from_hugging_face,
    {**KEYS, **SHARED, **DROPOUT},
    name="T5Gemma 2",
    fixed={"is_encoder_decoder": True, "tie_word_embeddings": True},
    used=_without_images,
    unlike=_end_of_image,
    encoder_decoder=True,
    ends=True,
    last_norm=lambda config: "decoder.final_norm",
)
INTERCHANGES = (T5GEMMA2,)
