"""An encoder-only model: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018).

Post-norm, with learned positions, token types and GELU. The head predicts masked tokens; its output matrix is tied to
the embedding. There is no prediction of the next sentence, which RoBERTa (Liu et al. 2019) found of no use.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from data_pipeline.base.errors import UserError
from pretrain.config.models import EncoderOnlyConfig
from pretrain.models.attention import AttentionInputs
from pretrain.models.functional.arithmetic import indices_of_targets
from pretrain.models.layers import ACTIVATIONS, Embedding, LayerConfig, LayerNorm, Linear
from pretrain.models.model import Head, Losses, Model
from pretrain.models.positions import LearnedPositions
from pretrain.models.stacks import Encoder
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


class BertEncoder(Encoder):
    """The encoder. Its input is the layer norm of the sum of the vectors of tokens, token types and positions."""

    def new_positions(self, config: EncoderOnlyConfig) -> None:
        types = config.num_token_types
        self.positions = LearnedPositions(config.max_positions, config.d_model, config.init_std)
        self.token_types = Embedding(types, config.d_model, config.init_std) if types else None
        self.embedding_norm = LayerNorm(config.d_model, config.layer_norm_epsilon)

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        assert self.positions is not None
        return self.dropout(self.embedding_norm(x + self.positions(positions)))


class MaskedLMHead(nn.Module):
    """The layers between the encoder and the output matrix."""

    def __init__(self, config: EncoderOnlyConfig):
        super().__init__()
        self.transform = Linear(config.d_model, config.d_model, config.hidden_std(config.init_std), bias=True)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = LayerNorm(config.d_model, config.layer_norm_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Maps states (…, d_model) to the same shape."""
        return self.norm(self.activation(self.transform(x)))


class EncoderOnly(Model):
    """`forward` returns the losses of masked tokens; `encode` returns states."""

    config: EncoderOnlyConfig

    def __init__(self, config: EncoderOnlyConfig):
        super().__init__()
        self.config = config
        rows = config.padded_vocab_size
        self.embedding = Embedding(rows, config.d_model, config.init_std)
        layer = LayerConfig.of(config, norm="layer", biases=True, post_norm=True)
        self.encoder = BertEncoder(config, layer, config.num_layers, name="attention")
        self.masked_lm = MaskedLMHead(config)
        self.lm_head = Head(config.d_model, rows, config.init_std, bias=True, multiplier=config.logits_multiplier)
        self.lm_head.weight = self.embedding.weight  # shared: each module uses it only in its own forward

    def forward(
        self,
        encoder_input_ids: Tensor,
        labels: Tensor,
        *,
        token_type_ids: Tensor | None = None,
        target_indices: Tensor | None = None,
        **attention: Tensor,
    ) -> Losses:
        """Returns the cross-entropies {"labels": (batch, length)}, fp32, 0 at -100.

        `labels` (batch, length): aligned with `encoder_input_ids`, with the same segments and positions. Only tokens
        whose label isn't ignored go through the output matrix. The z-loss applies in training only. `target_indices`:
        the indices of the labels that aren't ignored. `attention`: the tensors of `AttentionInputs`.
        """
        states = self._states(encoder_input_ids, AttentionInputs(**attention), token_type_ids)
        indices = indices_of_targets(labels) if target_indices is None else target_indices
        targets = labels.flatten().index_select(0, indices)
        predicted = self.masked_lm(states.flatten(0, 1).index_select(0, indices))
        found = self.lm_head(predicted, targets, self.config, torch.arange(len(indices), device=indices.device))
        return {"labels": found.new_zeros(labels.numel()).index_copy(0, indices, found).view(labels.shape)}

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Maps ids (batch, length) to states (batch, length, d_model)."""
        return self._states(input_ids, AttentionInputs(attention_mask), token_type_ids)

    def _states(self, input_ids: Tensor, inputs: AttentionInputs, token_type_ids: Tensor | None) -> Tensor:
        """States (batch, length, d_model). Default of token types: 0."""
        x = self.embedding(input_ids)
        if self.encoder.token_types is not None:
            x = x + self.encoder.token_types(torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        return self.encoder(x, inputs)


_TOKEN_TYPES, _POSITIONS = "encoder.token_types.weight", "encoder.positions.weight"
_HF_LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.wi": "intermediate.dense",
    "feed_forward.wo": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}


def _hf_names(encoder: str, bias: str, heads: Mapping[str, str]) -> dict[str, str]:
    embeddings = {
        "embedding": f"{encoder}.embeddings.word_embeddings",
        "encoder.positions": f"{encoder}.embeddings.position_embeddings",
        "encoder.token_types": f"{encoder}.embeddings.token_type_embeddings",
    }
    modules = {
        "encoder.embedding_norm": f"{encoder}.embeddings.LayerNorm",
        **within("encoder.layers.{}", f"{encoder}.encoder.layer.{{}}", _HF_LAYER),
        **heads,
    }
    return {**tensors_of(embeddings), **tensors_of(modules, "weight", "bias"), "lm_head.bias": bias}


BERT_NAMES = _hf_names(
    "bert",
    "cls.predictions.bias",
    {
        "masked_lm.transform": "cls.predictions.transform.dense",
        "masked_lm.norm": "cls.predictions.transform.LayerNorm",
    },
)
ROBERTA_NAMES = _hf_names(
    "roberta", "lm_head.bias", {"masked_lm.transform": "lm_head.dense", "masked_lm.norm": "lm_head.layer_norm"}
)
_SETTINGS: Settings = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "max_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "dropout_rate": "hidden_dropout_prob",
    "init_std": "initializer_range",
    "activation": Choice(
        "hidden_act", {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}, {"gelu_pytorch_tanh": "gelu_tanh"}
    ),
}


def _config_to_hf(config: EncoderOnlyConfig) -> Json:
    return {
        "type_vocab_size": max(config.num_token_types, 1),
        "attention_probs_dropout_prob": config.dropout_rate,
    }


def _config_from_hf(settings: Json, tensors: State) -> Json:
    """Our other settings. Drops position ids, and BERT's head for the next sentence: the pooler and its classifier."""
    unused = (".pooler.", "cls.seq_relationship.")
    drop_tensors(tensors, lambda name: name.endswith(".position_ids") or any(one in name for one in unused))
    ids = vocabulary(settings, pad_id=0)
    if ids["eos_id"] is None:  # the published files name none
        del ids["eos_id"]
    return {**ids, "num_token_types": settings["type_vocab_size"]}


def _roberta_config_from_hf(settings: Json, tensors: State) -> Json:
    """Our other settings of a RoBERTa (Liu et al. 2019), which is then exported as BERT.

    Drops the first positions, up to the id of padding: only padding has them. Raises UserError if the layers'
    activation isn't GELU, which RoBERTa's head always has.
    """
    positions, unused = "roberta.embeddings.position_embeddings.weight", (settings["pad_token_id"] or 0) + 1
    if positions in tensors:
        tensors[positions] = tensors[positions][unused:].contiguous()
    if settings["hidden_act"] != "gelu":
        raise UserError(f"hidden_act is {settings['hidden_act']!r}, but the head of RoBERTa has gelu")
    return {**_config_from_hf(settings, tensors), "max_positions": settings["max_position_embeddings"] - unused}


def _with_token_types(config: EncoderOnlyConfig, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Adds a token type of zeros to a model without token types: transformers' BERT always has some."""
    return state if config.num_token_types else {**state, _TOKEN_TYPES: state[_POSITIONS].new_zeros(1, config.d_model)}


_BERT = HFModel(
    config_class=EncoderOnlyConfig,
    model_type="bert",
    class_name="BertForMaskedLM",
    name="bert",
    settings=_SETTINGS,
    names=BERT_NAMES,
    config_to_hf=_config_to_hf,
    config_from_hf=_config_from_hf,
    keys={"num_token_types": "type_vocab_size"},
    copies={
        "bert.embeddings.word_embeddings.weight": ["cls.predictions.decoder.weight"],
        "cls.predictions.bias": ["cls.predictions.decoder.bias"],
    },
    fixed={
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    tensors_to_hf=_with_token_types,
    begins=True,
    ends=True,
    last_norm=lambda config: "masked_lm.norm",
)
_ROBERTA = replace(
    _BERT,
    model_type="roberta",
    class_name="RobertaForMaskedLM",
    name="roberta",
    names=ROBERTA_NAMES,
    config_from_hf=_roberta_config_from_hf,
    copies={
        "roberta.embeddings.word_embeddings.weight": ["lm_head.decoder.weight"],
        "lm_head.bias": ["lm_head.decoder.bias"],
    },
)
HF_MODELS = (_BERT, _ROBERTA)
