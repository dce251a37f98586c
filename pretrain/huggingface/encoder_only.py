"""The encoder-only model in transformers: `BertForPreTraining`, and `BertForMaskedLM` without next sentences.

RoBERTa (Liu et al. 2019) is imported as one too, which is then exported as BERT.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from data_pipeline.foundation.errors import UserError
from pretrain.huggingface.conversion import Choice, Conversion, Json, State, pad_or, within
from pretrain.models import EncoderOnlyConfig

TOKEN_TYPES, POSITIONS = "encoder.token_types.weight", "encoder.positions.weight"
LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.wi": "intermediate.dense",
    "feed_forward.wo": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
ENCODER = {
    "embedding": "embeddings.word_embeddings",
    "encoder.positions": "embeddings.position_embeddings",
    "encoder.token_types": "embeddings.token_type_embeddings",
    "encoder.embedding_norm": "embeddings.LayerNorm",
    **within("encoder.layers.{}", "encoder.layer.{}", LAYER),
    "next_sentence.pooler": "pooler.dense",
}
BERT_MODULES = {
    **{ours: f"bert.{theirs}" for ours, theirs in ENCODER.items()},
    "masked_lm.transform": "cls.predictions.transform.dense",
    "masked_lm.norm": "cls.predictions.transform.LayerNorm",
    "lm_head.bias": "cls.predictions.bias",
    "next_sentence.classifier": "cls.seq_relationship",
}
ROBERTA_MODULES = {
    **{ours: f"roberta.{theirs}" for ours, theirs in ENCODER.items()},
    "masked_lm.transform": "lm_head.dense",
    "masked_lm.norm": "lm_head.layer_norm",
    "lm_head.bias": "lm_head.bias",
}
SETTINGS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "dropout_rate": "hidden_dropout_prob",  # that of hidden states
    "init_std": "initializer_range",
}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def fuse(state: Mapping[str, Tensor], config: EncoderOnlyConfig) -> Mapping[str, Tensor]:
    """A model without token types gets one, of zeros: transformers' BERT always has them."""
    return state if config.num_token_types else {**state, TOKEN_TYPES: state[POSITIONS].new_zeros(1, config.d_model)}


def tidy(settings: Json, tensors: State) -> State:
    """Without the pooler if there is no classifier that would use it."""
    next_sentence = "cls.seq_relationship.weight" in tensors
    return {name: tensor for name, tensor in tensors.items() if next_sentence or ".pooler." not in name}


def to_theirs(config: EncoderOnlyConfig) -> Json:
    return {
        "architectures": ["BertForPreTraining" if config.next_sentence else "BertForMaskedLM"],
        "type_vocab_size": max(config.num_token_types, 1),
        "attention_probs_dropout_prob": config.dropout_rate,
    }


def to_ours(settings: Json, tensors: State) -> Json:
    """The tensors show whether next sentences are predicted."""
    return {
        "num_token_types": settings["type_vocab_size"],
        "next_sentence": "cls.seq_relationship.weight" in tensors,
    }


def vocabulary(settings: Json) -> Json:
    """The published files name no EOS."""
    ids = pad_or(settings, 0)
    return ids if ids["eos_id"] is not None else {name: id_ for name, id_ in ids.items() if name != "eos_id"}


BERT = Conversion(
    "bert",
    "BertForMaskedLM",
    EncoderOnlyConfig,
    BERT_MODULES,
    SETTINGS,
    begins=True,
    ends=True,
    generates=False,
    fuse=fuse,
    unused=r"\.position_ids$",
    copies={
        "bert.embeddings.word_embeddings.weight": ["cls.predictions.decoder.weight"],
        "cls.predictions.bias": ["cls.predictions.decoder.bias"],
    },
    tidy=tidy,
    last_norm=lambda config: "masked_lm.norm",
    choices={"activation": Choice("hidden_act", ACTIVATIONS, {"gelu_pytorch_tanh": "gelu_tanh"})},
    fixed={
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    to_theirs=to_theirs,
    to_ours=to_ours,
    vocabulary=vocabulary,
    also_named={"num_token_types": "type_vocab_size"},
)


def from_roberta(settings: Json, tensors: State) -> State:
    """Without the first positions, up to the id of padding: they belong to padding alone, which nothing attends to."""
    tensors = tidy(settings, tensors)
    positions = "roberta.embeddings.position_embeddings.weight"
    if positions in tensors:
        tensors[positions] = tensors[positions][_unused_positions(settings) :].contiguous()
    return tensors


def roberta_to_ours(settings: Json, tensors: State) -> Json:
    """Raises UserError if the head has another activation than the layers: its own is always GELU."""
    if settings["hidden_act"] != "gelu":
        raise UserError(f"hidden_act is {settings['hidden_act']!r}, but the head of RoBERTa has gelu")
    longest = settings["max_position_embeddings"] - _unused_positions(settings)
    return {**to_ours(settings, tensors), "max_positions": longest}


def _unused_positions(settings: Json) -> int:
    return (settings["pad_token_id"] or 0) + 1


ROBERTA = replace(
    BERT,
    model_type="roberta",
    class_name="RobertaForMaskedLM",
    modules=ROBERTA_MODULES,
    copies={
        "roberta.embeddings.word_embeddings.weight": ["lm_head.decoder.weight"],
        "lm_head.bias": ["lm_head.decoder.bias"],
    },
    tidy=from_roberta,
    to_ours=roberta_to_ours,
)
CONVERSIONS = (BERT, ROBERTA)
