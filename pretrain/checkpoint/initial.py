"""Checkpoints of weights alone, at step 0. A run can start from one, and `export` and `generate` can read it."""

from collections.abc import Mapping
from pathlib import Path

import yaml
from torch import Tensor

from data_pipeline import tokenizer as tokenizers
from data_pipeline.foundation.atomic import new_directory
from data_pipeline.tokenizer import Tokenizer
from pretrain import models
from pretrain.checkpoint.table import Piece
from pretrain.checkpoint.tensors import PARAMETER
from pretrain.checkpoint.write import write_index, write_part
from pretrain.models import ModelConfig

MODEL = "model.yaml"


def save_weights(config: ModelConfig, state: Mapping[str, Tensor], tokenizer: Tokenizer, out: Path) -> None:
    """Writes the checkpoint `out`, which must not exist or must be empty. It appears only when it is complete.

    `state` is the model's `state_dict()`; the checkpoint keeps only its parameters. The file MODEL in it is the
    `model:` section of a run file, which may extend it.
    """
    names = [name for name, _ in models.outline(config).named_parameters()]
    with new_directory(out) as partial:
        tokenizers.save(tokenizer, partial)
        settings = {"family": config.family, **config.model_dump(exclude_defaults=True)}
        (partial / MODEL).write_text(yaml.safe_dump({"model": settings}, sort_keys=False), encoding="utf-8")
        tensors = {f"{PARAMETER}/{name}": state[name].float().flatten() for name in names}
        pieces = {name: Piece(0, state[name].numel(), list(state[name].shape)) for name in names}
        write_index(
            partial,
            write_part(partial, 0, tensors, pieces),
            step=0,
            position=0,
            consumed=[],
            skipped=[],
            config_fingerprint="",
            identity={"model": config.model_dump(), "tokenizer_sha256": tokenizer.sha256},
            world_size=1,
            zero_stage=0,
        )
