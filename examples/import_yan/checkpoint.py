"""Reads a checkpoint of Yan's code (2024, github.com/yiphei/yif-AI) and writes one of this project.

Such a checkpoint is a file of `torch.save`, with weights under "model" and settings under "model_config". Its tokens
are GPT-2's.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from data_pipeline.base.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer, tokenizer_json
from pretrain.config.model_config import ModelConfig
from pretrain.config.models import AutoregressiveConfig
from pretrain.engine.checkpoint.trained import save_weights
from pretrain.export import weights
from pretrain.models.state_dict_adapter import Json, State, in_their_names

# Some settings are pickled as members of these classes of the author; each is read as its text.
_MODULES = ("autoregressive_encoder_decoder_transformer.model", "encoder_decoder_transformer.model", "model")
_CLASSES = ("OrderType", "SubPosEmbedType", "EmbeddingLossType", "DetachType", "EmbeddingLayerNormType")

_ORDER = {"ORIGINAL": "original", "ALT": "alternate", "ALTERNATE": "alternate"}
_SUBTRACTED = {"NO": "none", "YES_NO_LN": "without_norm", "YES_LN": "with_norm"}
_KIND = {"MSE": "mse", "CONSINE_SIM": "cosine", "COSINE_SIM": "cosine", "LOG_COSINE_SIM": "log_cosine"}
_NORM = {"NONE": "none", "INIT": "before_mean", "AVG_CUM_SUM": "after_mean"}

# Our settings and the keys of model_config that they come from.
_SETTINGS = {
    "vocab_size": "alphabet_size",
    "d_model": "n_embed",
    "num_heads": "n_head",
    "num_encoder_layers": "n_layer",
    "num_decoder_layers": "n_layer",
    "max_positions": "context_size",
    "dropout_rate": "dropout_rate",
}
_LAYER = re.compile(r"(encoder|decoder)_transformer_blocks\.(\d+)\.(.+)\.(weight|bias)")
# Modules of a layer. Those of the decoder have the prefix "decoder_", unless the encoder has no such module.
_LAYER_MODULES = {
    "multi_attn_head.batch_attn_weights": ["self_attention.q", "self_attention.k", "self_attention.v"],
    "multi_attn_head.residual_proj": ["self_attention.o"],
    "cross_multi_attn_head.q_weights": ["cross_attention.q"],
    "cross_multi_attn_head.k_v_weights": ["cross_attention.k", "cross_attention.v"],
    "cross_multi_attn_head.residual_proj": ["cross_attention.o"],
    "feed_forward.linear": ["feed_forward.wi"],
    "feed_forward.residual_proj": ["feed_forward.wo"],
    "ln1": ["self_attention_norm"],
    "cross_ln": ["cross_attention_norm"],
    "encoder_cross_ln": ["encoder_norm"],
    "ln2": ["feed_forward_norm"],
}
_MODULES_OUTSIDE = {
    "token_embedding": "embedding",
    "output_layer": "lm_head",
    "positional_embedding": "position_embedding",
    "ffd_ln": "bridge.norm",
    "decoder_feed_forward": "bridge.linear",
    "ln": "final_norm",
    "post_sub_pos_ln": "subtracted_norm",
    "encoder_out_ln": "embedding_loss.encoder_norm",
    "embeddings_ln": "embedding_loss.embedding_norm",
}


def import_yan(path: Path, tokenizer: Path, out: Path) -> ModelConfig:
    """Writes a checkpoint of step 0 to `out`. `tokenizer`: a directory with GPT-2's files.

    Raises UserError if `path` is no checkpoint of Yan's code, or the tokenizer isn't the model's.
    """
    model = Tokenizer(tokenizer_json.read(tokenizer))
    config, state = _read(path, model.vocabulary.eos)
    if config.vocab_size != model.size:
        raise UserError(f"{path}: the model has {config.vocab_size} ids, the tokenizer {tokenizer} {model.size}")
    weights.refuse_infinite(state, path)
    save_weights(config, state, model, out)
    return config


def _read(path: Path, eos: int) -> tuple[AutoregressiveConfig, State]:
    """The config and the weights in `path`, under our names. `eos`: the id of GPT-2's EOS.

    No code in the file is run. Raises UserError for another file, and for settings that our model doesn't have.
    """
    saved = _load(path)
    try:
        settings, tensors = saved["model_config"], saved["model"]
        config = _config(settings, eos)
        state = _renamed(tensors)
        if config.embedding_loss is None:  # the author's model has a norm for the loss in any case
            state = {name: tensor for name, tensor in state.items() if not name.startswith("embedding_loss.")}
        weights.check(weights.shapes(config), state, f"{path}: the weights don't fit")
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a checkpoint of Yan's autoregressive encoder-decoder: lacks {error}") from None
    except ValidationError as error:
        lines = dict.fromkeys(in_their_names(error, _SETTINGS))  # n_layer is two of our settings
        raise UserError("\n".join(f"{path}: model_config: {line}" for line in lines)) from None
    return config, state


def _load(path: Path) -> Json:
    known: list[Any] = [(str, f"{module}.{name}") for module in _MODULES for name in _CLASSES]
    try:
        with torch.serialization.safe_globals(known):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which would run" if named else "no file of torch.save"
        raise UserError(f"{path}: can't be read: {why}") from None
    return saved if isinstance(saved, dict) else {}


def _config(settings: Json, eos: int) -> AutoregressiveConfig:
    across = settings["cross_attn_config"] or {"use_bias": settings["use_bias"], "n_head": 2 * settings["n_head"]}
    loss = settings["embedding_loss_type"]
    return AutoregressiveConfig.model_validate(
        {
            **{ours: settings[theirs] for ours, theirs in _SETTINGS.items()},
            "pad_id": eos,
            "eos_id": eos,
            "num_cross_heads": across["n_head"],
            "bias": settings["use_bias"],
            "cross_attention_bias": across["use_bias"],
            "order": _ORDER[settings["order_type"]],
            "bridge_norm": settings["add_ln_before_decoder_ff"],
            "subtract_positions": _SUBTRACTED[settings["sub_pos_embed_to_decoder"]],
            "add_positions": settings["add_pos_embed_to_decoder"],
            "embedding_loss": None
            if loss == "NONE"
            else {
                "kind": _KIND[loss],
                "coefficient": settings["embedding_loss_coeff"],
                "embedding_norm": _NORM[settings["embedding_ln_type"]],
                "encoder_norm": settings["use_ln_on_encoder_out"],
                "detach": settings["detach_type"].lower(),
            },
        }
    )


def _renamed(tensors: dict[str, Tensor]) -> State:
    """The tensors under our names, with fused matrices split, without the causal masks that some versions save."""
    found: State = {}
    for name, tensor in tensors.items():
        theirs = name.removeprefix("_orig_mod.")
        if layer := _LAYER.fullmatch(theirs):
            stack, number, part, kind = layer.groups()
            ours = _LAYER_MODULES.get(part.removeprefix("decoder_"), [f"unknown.{part}"])
            for one, piece in zip(ours, tensor.chunk(len(ours)), strict=True):
                found[f"{stack}.{number}.{one}.{kind}"] = piece
        elif not theirs.endswith(".tril"):
            part, _, kind = theirs.rpartition(".")
            found[f"{_MODULES_OUTSIDE.get(part, part)}.{kind}"] = tensor
    return found
