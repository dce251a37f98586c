"""T5 in transformers: `T5ForConditionalGeneration`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.interchange import (
    Encoder,
    Exported,
    Interchange,
    Rewriting,
    State,
    drop_copies,
    one_of,
    renamed,
    to_ours,
    to_theirs,
)
from pretrain.huggingface.json_files import Json
from pretrain.models import T5Config

# In transformers a layer is a numbered list of sublayers, each with its norm.
SUBLAYERS = {
    "encoder": ["self_attention", "feed_forward"],
    "decoder": ["self_attention", "cross_attention", "feed_forward"],
}
CLASS_NAMES = {
    "self_attention": "SelfAttention",
    "cross_attention": "EncDecAttention",
    "feed_forward": "DenseReluDense",
}
SETTINGS = {
    "d_model": "d_model",
    "d_kv": "d_kv",
    "d_ff": "d_ff",
    "num_heads": "num_heads",
    "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "dropout_rate": "dropout_rate",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "scale_outputs": "scale_decoder_outputs",
}
# The keys are what transformers derives from `feed_forward_proj`; its own name for the second is gated-gelu.
FEED_FORWARDS = {"relu": "relu", "gated-gelu_new": "gated-gelu"}
# Cross-attention has no relative positions, but the first T5 models were saved with a table for it.
SHARED, OUTPUT = "shared.weight", "lm_head.weight"
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
POSITIONS = 512  # as in the published files: T5's positions are relative, but llama.cpp takes a context of this length


def to_hugging_face(state_dict: Mapping[str, Tensor], config: T5Config) -> Exported:
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in state_dict.items()
        if not (config.tie_embeddings and name == "lm_head.weight")  # one matrix, stored once
    }
    return Exported(tensors, _hugging_face_config(config), _token_ids(config))


def from_hugging_face(saved: Json, tensors: State) -> tuple[T5Config, State]:
    """The tensors show whether embedding and output share a matrix; transformers 5 looks at them too.

    Its `tie_word_embeddings` doesn't show that. `scale_decoder_outputs`, which older files store as
    `tie_word_embeddings`, says whether outputs are scaled.
    """
    drop_copies(tensors, SHARED, ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
    tensors.pop(UNUSED, None)
    if SHARED not in tensors and OUTPUT in tensors:
        tensors[SHARED] = tensors[OUTPUT]
    if SHARED in tensors:
        tensors.setdefault(OUTPUT, tensors[SHARED])
    activation = {"feed_forward_proj": ("gated-" if saved["is_gated_act"] else "") + saved["dense_act_fn"]}
    config = T5Config(
        vocab_size=saved["vocab_size"],
        pad_id=saved["pad_token_id"] or 0,
        eos_id=saved["eos_token_id"],
        **to_ours(saved, SETTINGS),
        feed_forward=one_of(activation, "feed_forward_proj", FEED_FORWARDS),
        tie_embeddings=SHARED in tensors and torch.equal(tensors[OUTPUT], tensors[SHARED]),
    )
    return config, renamed(tensors, config, hugging_face_name)


def hugging_face_name(name: str) -> str:
    """The name that transformers gives to one of our weights.

    encoder.layers.3.self_attention.q.weight → encoder.block.3.layer.0.SelfAttention.q.weight
    """
    match name.split("."):
        case ["embedding", "weight"]:
            return "shared.weight"
        case ["lm_head", "weight"]:
            return name
        case [stack, "final_norm", "weight"]:
            return f"{stack}.final_layer_norm.weight"
        case [stack, "relative_attention_bias", "weight"]:
            return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        case [stack, "layers", number, sublayer, *rest]:
            kind = sublayer.removesuffix("_norm")
            inner = CLASS_NAMES[kind] if kind == sublayer else "layer_norm"
            return ".".join([stack, "block", number, "layer", str(SUBLAYERS[stack].index(kind)), inner, *rest])
    raise ValueError(f"not a weight of T5: {name}")


def _hugging_face_config(config: T5Config) -> Json:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.padded_vocab_size,
        **to_theirs(config, SETTINGS),
        "decoder_layers": config.num_decoder_layers,  # what transformers 5 sizes a decoder's cache by
        "feed_forward_proj": config.feed_forward,
        "n_positions": POSITIONS,
        # transformers 5 takes the first for the second, and unties where it finds two different matrices
        "tie_word_embeddings": config.scale_outputs,
        **_token_ids(config),
    }


def _token_ids(config: T5Config) -> dict[str, int]:
    return {
        "decoder_start_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }


def encoder_of(exported: Exported) -> Exported:
    config = {**exported.config, "architectures": ["T5EncoderModel"], "is_encoder_decoder": False, "use_cache": False}
    of_decoder = {"num_decoder_layers", "decoder_layers", "decoder_start_token_id"}
    of_outputs = {"scale_decoder_outputs", "tie_word_embeddings"}
    return Exported(
        {name: tensor for name, tensor in exported.tensors.items() if name.startswith((SHARED, "encoder."))},
        {key: value for key, value in config.items() if key not in of_decoder | of_outputs},
    )


def with_head(scaled: bool) -> Rewriting:
    """Outputs `scaled` by d_model^-½, or not, by an output matrix of its own that makes up for it.

    CTranslate2 looks at the flag `tie_word_embeddings`, which transformers 5 sets for every T5, and scales all outputs.
    llama.cpp never scales them.
    """

    def rewritten(state: Mapping[str, Tensor], config: T5Config) -> tuple[Mapping[str, Tensor], T5Config]:
        if config.scale_outputs == scaled:
            return state, config
        factor = config.d_model ** (0.5 if scaled else -0.5)
        changes = {"scale_outputs": scaled, "tie_embeddings": False}
        return {**state, OUTPUT: state[OUTPUT] * factor}, config.model_copy(update=changes)

    return rewritten


def for_llama_cpp(state: Mapping[str, Tensor], config: T5Config) -> tuple[Mapping[str, Tensor], T5Config]:
    """Raises UserError for what it lacks: its relative positions end at a constant distance, and its converter knows
    no names for a decoder's layers beyond the number of the encoder's."""
    if config.num_decoder_layers > config.num_encoder_layers:
        raise UserError(
            f"llama.cpp converts no decoder that is deeper than its encoder: "
            f"{config.num_decoder_layers} and {config.num_encoder_layers} layers"
        )
    if config.relative_attention_max_distance != LLAMA_CPP_DISTANCE:
        raise UserError(
            f"llama.cpp has relative positions up to {LLAMA_CPP_DISTANCE}, "
            f"but model.relative_attention_max_distance is {config.relative_attention_max_distance}"
        )
    return with_head(scaled=False)(state, config)


LLAMA_CPP_DISTANCE = 128
T5 = Interchange(
    "t5",
    "T5ForConditionalGeneration",
    to_hugging_face,
    from_hugging_face,
    SETTINGS,
    name="T5",
    can_be={"positions": ("relative",)},
    fixed={"is_encoder_decoder": True},  # without it transformers' two attentions share one cache
    encoder_decoder=True,
    ends=True,
    encoder=Encoder("T5EncoderModel", encoder_of),
    engines={"ctranslate2": with_head(scaled=True), "llama.cpp": for_llama_cpp},
    last_norm=lambda config: "decoder.final_norm",
)
INTERCHANGES = (T5,)
