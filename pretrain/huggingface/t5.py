"""T5 in transformers: `T5ForConditionalGeneration`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from data_pipeline.errors import UserError
from pretrain.huggingface.interchange import Exported, Interchange, Json, State, drop_copies, renamed
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
# Cross-attention has no relative positions; the first T5s were saved with a table for it all the same.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def to_hugging_face(state_dict: Mapping[str, Tensor], config: T5Config) -> Exported:
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in state_dict.items()
        if not (config.tie_embeddings and name == "lm_head.weight")  # one matrix, stored once
    }
    return Exported(tensors, _hugging_face_config(config), _token_ids(config))


def from_hugging_face(saved: Json, tensors: State) -> tuple[T5Config, State]:
    """Whether embedding and output are one matrix is seen in the tensors.

    Transformers 5 writes tie_word_embeddings: true for every T5, and says beside it whether outputs are scaled.
    """
    drop_copies(tensors, "shared.weight", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
    tensors.pop(UNUSED, None)
    tied = saved.get("scale_decoder_outputs", saved.get("tie_word_embeddings", True))
    shared = tensors.get("shared.weight")
    if shared is not None and tied and not torch.equal(tensors.get("lm_head.weight", shared), shared):
        raise UserError("the outputs are scaled as those of a tied T5, but lm_head is a matrix of its own")
    config = T5Config(
        vocab_size=saved["vocab_size"],
        d_model=saved["d_model"],
        d_kv=saved["d_kv"],
        d_ff=saved["d_ff"],
        num_heads=saved["num_heads"],
        num_encoder_layers=saved["num_layers"],
        num_decoder_layers=saved.get("num_decoder_layers") or saved["num_layers"],
        relative_attention_num_buckets=saved.get("relative_attention_num_buckets", 32),
        relative_attention_max_distance=saved.get("relative_attention_max_distance", 128),
        dropout_rate=saved.get("dropout_rate", 0.1),
        layer_norm_epsilon=saved.get("layer_norm_epsilon", 1e-6),
        feed_forward=saved.get("feed_forward_proj", "relu"),
        tie_embeddings=tied,
    )
    if shared is not None:
        tensors.setdefault("lm_head.weight", shared)
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
        "d_model": config.d_model,
        "d_kv": config.d_kv,
        "d_ff": config.d_ff,
        "num_heads": config.num_heads,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "feed_forward_proj": config.feed_forward,
        # transformers 5 takes this for "scale the outputs" and unties when it finds two different matrices
        "tie_word_embeddings": config.tie_embeddings,
        **_token_ids(config),
    }


def _token_ids(config: T5Config) -> dict[str, int]:
    return {
        "decoder_start_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }


INTERCHANGE = Interchange("t5", "T5ForConditionalGeneration", to_hugging_face, from_hugging_face, ends=True)
