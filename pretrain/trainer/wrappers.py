"""Wrappers of the model in training: `wrapper.name` of a run file names a module of this room.

The module has the three functions below, of its settings instead of the run file. It may import torch: the launcher
doesn't, unless a run has a wrapper.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from data_pipeline.corpus import Corpus
from pretrain.checkpoint.index import Identity
from pretrain.config import RunConfig
from pretrain.models import ModelConfig

if TYPE_CHECKING:
    import torch

    from pretrain.models.model import Model


def problems(config: RunConfig, model: ModelConfig, training: list[Corpus]) -> list[str]:
    """Why the run can't have its wrapper, one line for each reason."""
    return _module(config).problems(config.wrapper, model, training) if config.wrapper else []


def identity(config: RunConfig) -> Identity | None:
    """The wrapper's settings that may not change over the life of a run."""
    return _module(config).identity(config.wrapper) if config.wrapper else None


def wrap(model: "Model", config: RunConfig, device: "torch.device") -> None:
    """Changes the losses of `model` in training, but neither its parameters nor their names."""
    if config.wrapper:
        _module(config).wrap(model, config.wrapper, config.precision, device)


def _module(config: RunConfig) -> Any:
    assert config.wrapper
    return import_module(f"pretrain.trainer.{config.wrapper.name}")
