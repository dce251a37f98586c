"""A model and its tokenizer loaded from a checkpoint into a single process."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline import tokenizer
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.tensors import load_weights
from pretrain.hardware.machine import device_type
from pretrain.models.model import Model


@dataclass(frozen=True)
class TrainedModel:
    """A model, in fp32 and evaluation mode, and its tokenizer."""

    model: Model
    tokenizer: tokenizer.Tokenizer

    @classmethod
    def open(cls, directory: Path) -> "TrainedModel":
        """Loads a checkpoint. Raises UserError if `directory` isn't one, FailedError if it is damaged."""
        model = models.build(checkpoint_index.read(directory).model)
        load_weights(model, directory)
        return cls(model.eval(), tokenizer.load(directory))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def on_best_device(self) -> "TrainedModel":
        """The same model, moved to a GPU if there is one."""
        return TrainedModel(self.model.to(device_type()), self.tokenizer)
