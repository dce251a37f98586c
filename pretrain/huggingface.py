"""T5 checkpoints for Hugging Face transformers, and back."""

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_pipeline.atomic import flush
from data_pipeline.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.sentencepiece import MODEL, SentencePiece
from pretrain.models import T5Config, build

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


def export(state_dict: Mapping[str, Tensor], config: T5Config, tokenizer: Tokenizer, out: Path) -> None:
    """Write a directory that `T5ForConditionalGeneration` and `AutoTokenizer` load with `from_pretrained(out)`.

    `state_dict` has the names of `T5.state_dict()`, whole tensors in fp32. `out` must not exist or be empty; it appears
    when it is whole. Raises UserError for what doesn't fit together, and for a tokenizer that is none of T5's kind.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another directory for the export")
    if config.positions != "relative":
        raise UserError(f"transformers has no T5 with {config.positions} positions")
    _check_tensors(state_dict, config)
    if not isinstance(tokenizer.model, SentencePiece):
        raise UserError(f"a tokenizer of kind {tokenizer.model.kind} can't be exported yet, only sentencepiece")
    if tokenizer.special_tokens:
        raise UserError(
            f"special tokens can't be exported yet; the tokenizer has {', '.join(tokenizer.special_tokens)}"
        )
    if tokenizer.size != config.vocab_size:
        raise UserError(
            f"the tokenizer's {tokenizer.pieces} pieces and {tokenizer.sentinels} sentinels make {tokenizer.size} ids, "
            f"but the model's vocab_size is {config.vocab_size}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    try:
        (partial / MODEL).write_bytes(tokenizer.model.files[MODEL])
        _write_tokenizer(partial, tokenizer.sentinels)
        _write_json(partial / "config.json", _hugging_face_config(config))
        _write_json(partial / "generation_config.json", _token_ids(config))
        tensors = {
            hugging_face_name(name): tensor.contiguous()
            for name, tensor in state_dict.items()
            if not (config.tie_embeddings and name == "lm_head.weight")  # one matrix, stored once
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        for path in partial.iterdir():
            flush(path)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(out.parent)


def load_state(directory: Path) -> tuple[T5Config, dict[str, Tensor]]:
    """The config and the weights of a T5 that transformers saved; the weights have the names of `T5.state_dict()`.

    `vocab_size` counts the rows of the embedding matrix: the files don't say how many of them are padding.
    """
    saved = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if saved.get("model_type") != "t5":
        raise UserError(f"{directory / 'config.json'}: model_type is {saved.get('model_type')!r}, not 't5'")
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise UserError(f"{directory}: has no *.safetensors (other formats run code when they are read)")
    # transformers 5 writes tie_word_embeddings: true for every T5, and says beside it whether outputs are scaled
    tied = saved.get("scale_decoder_outputs", saved.get("tie_word_embeddings", True))
    if tied and not torch.equal(tensors.get("lm_head.weight", tensors["shared.weight"]), tensors["shared.weight"]):
        raise UserError(
            f"{directory}: the outputs are scaled as those of a tied T5, but lm_head is a matrix of its own"
        )
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
    tensors.setdefault("lm_head.weight", tensors["shared.weight"])
    state = {name: tensors[hugging_face_name(name)] for name in _shapes(config)}
    return config, state


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


def _hugging_face_config(config: T5Config) -> dict[str, Any]:
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


def _write_tokenizer(directory: Path, num_sentinels: int) -> None:
    """Beside spiece.model, tokenizer.json and tokenizer_config.json: transformers prefers and needs these."""
    from transformers import T5Tokenizer  # takes seconds to import

    T5Tokenizer.from_pretrained(directory, extra_ids=num_sentinels).save_pretrained(directory)


def _shapes(config: T5Config) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in build(config).state_dict().items()}


def _check_tensors(state_dict: Mapping[str, Tensor], config: T5Config) -> None:
    expected = _shapes(config)
    given = {name: tensor.shape for name, tensor in state_dict.items()}
    if config.tie_embeddings:  # a checkpoint may hold the shared matrix once
        given.setdefault("lm_head.weight", given.get("embedding.weight", torch.Size()))
    wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        shapes = [tuple(shapes[name]) if name in shapes else "none" for shapes in (expected, given)]
        raise UserError(
            f"the weights don't fit the model: {name} should be {shapes[0]}, is {shapes[1]} ({len(wrong)} such)"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
