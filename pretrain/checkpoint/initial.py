"""Checkpoints of weights alone. A run can start from one, and `evaluate`, `export` and `generate` can read it."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml
from torch import Tensor

from data_pipeline import tokenizer as tokenizers
from data_pipeline.foundation.atomic import new_directory
from data_pipeline.tokenizer import Tokenizer
from pretrain import models
from pretrain.checkpoint import CONFIG
from pretrain.checkpoint.buffers import model_buffers, write_buffers
from pretrain.checkpoint.index import Index
from pretrain.checkpoint.table import Piece
from pretrain.checkpoint.tensors import PARAMETER
from pretrain.checkpoint.write import write_index, write_part
from pretrain.models import ModelConfig

MODEL = "model.yaml"


def save_weights(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    out: Path,
    origin: Index | None = None,
    run_file: Path | None = None,
) -> None:
    """Writes the checkpoint `out`, which must not exist or must be empty. It appears only when it is complete.

    `state` is the model's `state_dict()`; the checkpoint keeps its parameters and buffers. The file MODEL in it is the
    `model:` section of a run file, which may extend it. `origin` and `run_file`: the index of the checkpoint whose step
    and data it takes over, and the run file there; by default it is of step 0.
    """
    model = models.outline(config)
    names = [name for name, _ in model.named_parameters()]
    with new_directory(out) as partial:
        tokenizers.save(tokenizer, partial)
        settings = {"family": config.family, **config.model_dump(exclude_defaults=True)}
        (partial / MODEL).write_text(yaml.safe_dump({"model": settings}, sort_keys=False), encoding="utf-8")
        tensors = {f"{PARAMETER}/{name}": state[name].float().flatten() for name in names}
        pieces = {name: Piece(0, state[name].numel(), list(state[name].shape)) for name in names}
        write_buffers({name: state[name] for name in model_buffers(model) if name in state}, partial)
        if run_file is not None:
            shutil.copyfile(run_file, partial / CONFIG)
        write_index(
            partial,
            write_part(partial, 0, tensors, pieces),
            step=origin.step if origin else 0,
            position=origin.position if origin else 0,
            consumed=origin.consumed if origin else [],
            skipped=origin.skipped if origin else [],
            config_fingerprint=origin.config_fingerprint if origin else "",
            identity={
                **(origin.identity if origin else {}),
                "model": config.model_dump(),
                "tokenizer_sha256": tokenizer.sha256,
            },
            world_size=1,
            zero_stage=0,
        )
