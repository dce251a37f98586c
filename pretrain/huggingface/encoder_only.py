"""The encoder-only model in transformers: `BertForPreTraining`, and `BertForMaskedLM` without next sentences."""

from collections.abc import Mapping

from torch import Tensor

from pretrain.huggingface.interchange import (
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
from pretrain.models import EncoderOnlyConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
OURS = {**{theirs: ours for ours, theirs in ACTIVATIONS.items()}, "gelu_pytorch_tanh": "gelu_tanh"}
TOKEN_TYPES = "bert.embeddings.token_type_embeddings.weight"
NAMES = {
    "embedding": "bert.embeddings.word_embeddings",
    "encoder.positions": "bert.embeddings.position_embeddings",
    "encoder.token_types": TOKEN_TYPES.removesuffix(".weight"),
    "encoder.embedding_norm": "bert.embeddings.LayerNorm",
    "masked_lm.transform": "cls.predictions.transform.dense",
    "masked_lm.norm": "cls.predictions.transform.LayerNorm",
    "next_sentence.pooler": "bert.pooler.dense",
    "next_sentence.classifier": "cls.seq_relationship",
}
PARTS = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.wi": "intermediate.dense",
    "feed_forward.wo": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
SETTINGS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "dropout_rate": "hidden_dropout_prob",
    "init_std": "initializer_range",
}
# Settings of transformers' BERT that ours lacks, each with the value at which both compute the same.
FIXED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def to_hugging_face(state_dict: Mapping[str, Tensor], config: EncoderOnlyConfig) -> Exported:
    """A model without token types gets one, of zeros: transformers' BERT always has them."""
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in state_dict.items()
        if name != "lm_head.weight"  # one matrix, stored once
    }
    if not config.num_token_types:
        tensors[TOKEN_TYPES] = state_dict["encoder.positions.weight"].new_zeros(1, config.d_model)
    saved = {
        "architectures": ["BertForPreTraining" if config.next_sentence else "BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.padded_vocab_size,
        **to_theirs(config, SETTINGS),
        "type_vocab_size": max(config.num_token_types, 1),
        "hidden_act": ACTIVATIONS[config.activation],
        "attention_probs_dropout_prob": config.dropout_rate,
        "tie_word_embeddings": True,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
    }
    return Exported(tensors, saved)


def from_hugging_face(saved: Json, tensors: State) -> tuple[EncoderOnlyConfig, State]:
    """The tensors show whether next sentences are predicted. The dropout rate is that of hidden states."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".position_ids")}
    drop_copies(tensors, "bert.embeddings.word_embeddings.weight", ["cls.predictions.decoder.weight"])
    drop_copies(tensors, "cls.predictions.bias", ["cls.predictions.decoder.bias"])
    next_sentence = "cls.seq_relationship.weight" in tensors
    if not next_sentence:
        for kind in ("weight", "bias"):  # without the classifier nothing uses the pooler
            tensors.pop(f"bert.pooler.dense.{kind}", None)
    eos = saved["eos_token_id"]
    config = EncoderOnlyConfig(
        vocab_size=saved["vocab_size"],
        pad_id=saved["pad_token_id"] or 0,
        **to_ours(saved, SETTINGS),
        num_token_types=saved["type_vocab_size"],
        next_sentence=next_sentence,
        activation=one_of(saved, "hidden_act", OURS),
        **({} if eos is None else {"eos_id": eos}),
    )
    if NAMES["embedding"] + ".weight" in tensors:
        tensors["lm_head.weight"] = tensors[NAMES["embedding"] + ".weight"]
    return config, renamed(tensors, config, hugging_face_name)


def hugging_face_name(name: str) -> str:
    """The name that transformers gives to one of our weights.

    encoder.layers.3.attention.q.weight → bert.encoder.layer.3.attention.self.query.weight
    """
    if name == "lm_head.bias":
        return "cls.predictions.bias"
    if name == "lm_head.weight":
        return name
    part, kind = name.rsplit(".", 1)
    if part in NAMES:
        return f"{NAMES[part]}.{kind}"
    _, _, number, part = part.split(".", 3)
    return f"bert.encoder.layer.{number}.{PARTS[part]}.{kind}"


BERT = Interchange(
    "bert",
    "BertForMaskedLM",
    to_hugging_face,
    from_hugging_face,
    {**SETTINGS, "num_token_types": "type_vocab_size"},
    fixed=FIXED,
    begins=True,
    ends=True,
    last_norm=lambda config: "masked_lm.norm",
)
INTERCHANGES = (BERT,)
