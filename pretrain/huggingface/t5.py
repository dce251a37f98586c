"""T5 in transformers: `T5ForConditionalGeneration`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.conversion import Choice, Conversion, Encoder, Exported, Json, Rewriting, State, drop_copies
from pretrain.models import T5Config

SHARED, OUTPUT = "shared.weight", "lm_head.weight"
# In transformers a layer is a numbered list of sublayers, each with its norm.
MODULES = {
    "embedding": "shared",
    "encoder.relative_attention_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder.layers.{}.self_attention": "encoder.block.{}.layer.0.SelfAttention",
    "encoder.layers.{}.self_attention_norm": "encoder.block.{}.layer.0.layer_norm",
    "encoder.layers.{}.feed_forward": "encoder.block.{}.layer.1.DenseReluDense",
    "encoder.layers.{}.feed_forward_norm": "encoder.block.{}.layer.1.layer_norm",
    "encoder.final_norm": "encoder.final_layer_norm",
    "decoder.relative_attention_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder.layers.{}.self_attention": "decoder.block.{}.layer.0.SelfAttention",
    "decoder.layers.{}.self_attention_norm": "decoder.block.{}.layer.0.layer_norm",
    "decoder.layers.{}.cross_attention": "decoder.block.{}.layer.1.EncDecAttention",
    "decoder.layers.{}.cross_attention_norm": "decoder.block.{}.layer.1.layer_norm",
    "decoder.layers.{}.feed_forward": "decoder.block.{}.layer.2.DenseReluDense",
    "decoder.layers.{}.feed_forward_norm": "decoder.block.{}.layer.2.layer_norm",
    "decoder.final_norm": "decoder.final_layer_norm",
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
# What transformers derives from `feed_forward_proj`; its own name for gated-gelu_new there is gated-gelu.
FEED_FORWARD = Choice("feed_forward_proj", {"relu": "relu", "gated-gelu": "gated-gelu_new"})
POSITIONS = 512  # as in the published files: T5's positions are relative, but llama.cpp takes a context of this length
LLAMA_CPP_DISTANCE = 128


def tidy(settings: Json, tensors: State) -> State:
    """With both matrices, or with one if embedding and output are equal.

    transformers 5 compares them too: its `tie_word_embeddings` doesn't say whether they are one.
    """
    drop_copies(tensors, SHARED, ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
    if SHARED not in tensors and OUTPUT in tensors:
        tensors[SHARED] = tensors[OUTPUT]
    if OUTPUT in tensors and torch.equal(tensors[OUTPUT], tensors[SHARED]):
        del tensors[OUTPUT]
    return tensors


def to_ours(settings: Json, tensors: State) -> Json:
    feed_forward = ("gated-" if settings["is_gated_act"] else "") + settings["dense_act_fn"]
    return {
        "pad_id": settings["pad_token_id"] or 0,
        "feed_forward": FEED_FORWARD.to_ours({FEED_FORWARD.key: feed_forward}),
        "tie_embeddings": OUTPUT not in tensors,
    }


def to_theirs(config: T5Config) -> Json:
    return {
        "decoder_start_token_id": config.decoder_start_id,
        "decoder_layers": config.num_decoder_layers,  # what transformers 5 sizes a decoder's cache by
        "feed_forward_proj": config.feed_forward,
        "n_positions": POSITIONS,
        # transformers 5 takes the first for the second, and unties where it finds two different matrices
        "tie_word_embeddings": config.scale_outputs,
    }


def encoder_alone(exported: Exported) -> Exported:
    config = {**exported.config, "architectures": ["T5EncoderModel"], "is_encoder_decoder": False, "use_cache": False}
    decoder = {"num_decoder_layers", "decoder_layers", "decoder_start_token_id"}
    outputs = {"scale_decoder_outputs", "tie_word_embeddings"}
    return Exported(
        {name: tensor for name, tensor in exported.tensors.items() if name.startswith((SHARED, "encoder."))},
        {key: value for key, value in config.items() if key not in decoder | outputs},
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


T5 = Conversion(
    "t5",
    "T5ForConditionalGeneration",
    T5Config,
    MODULES,
    SETTINGS,
    name="T5",
    encoder_decoder=True,
    ends=True,
    # Cross-attention has no relative positions, but the first T5 models were saved with a table for it.
    unused=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias",
    tidy=tidy,
    fixed={"is_encoder_decoder": True},  # without it transformers' two attentions share one cache
    to_theirs=to_theirs,
    to_ours=to_ours,
    can_be={"positions": ("relative",)},
    encoder=Encoder("T5EncoderModel", encoder_alone),
    engines={"ctranslate2": with_head(scaled=True), "llama.cpp": for_llama_cpp},
)
CONVERSIONS = (T5,)
