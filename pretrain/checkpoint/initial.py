"""Checkpoints of weights alone, at step 0. A run can start from one, and `export` and `generate` can read it."""

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from data_pipeline import tokenizer as tokenizers
from data_pipeline.foundation.atomic import flush
from data_pipeline.foundation.errors import UserError
from data_pipeline.tokenizer import Tokenizer
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint import rank_file
from pretrain.checkpoint.index import Index, files_below
from pretrain.checkpoint.table import Piece, Table
from pretrain.checkpoint.tensors import PARAMETER
from pretrain.models import ModelConfig


def save_weights(config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Tokenizer, out: Path) -> None:
    """Writes the checkpoint `out`, which must not exist or must be empty. It appears only when it is complete.

    `state` is the model's `state_dict()`; the checkpoint keeps only its parameters.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another directory")
    with torch.device("meta"):
        names = [name for name, _ in models.build(config).named_parameters()]
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        tokenizers.save(tokenizer, partial)
        file = partial / f"{rank_file(0)}.safetensors"
        save_file({f"{PARAMETER}/{name}": state[name].float().flatten() for name in names}, file)
        Table({name: Piece(0, state[name].numel(), list(state[name].shape)) for name in names}).write(
            file.with_suffix(".json")
        )
        index = Index(
            step=0,
            position=0,
            consumed=[],
            skipped=[],
            config_fingerprint="",
            identity={"model": config.model_dump(), "tokenizer_sha256": tokenizer.sha256},
            world_size=1,
            zero_stage=0,
            files=files_below(partial),
        )
        (partial / checkpoint_index.INDEX).write_text(index.as_json())
        flush(partial / checkpoint_index.INDEX)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush(out.parent)
