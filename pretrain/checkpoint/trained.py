"""A model out of a checkpoint, with its tokenizer, in this process alone."""

from dataclasses import dataclass
from pathlib import Path

import torch

from data_pipeline import tokenizer
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.tensors import load_weights
from pretrain.models.model import Model


@dataclass(frozen=True)
class TrainedModel:
    """`model` in fp32 and evaluation mode."""

    model: Model
    tokenizer: tokenizer.Tokenizer

    @classmethod
    def open(cls, directory: Path) -> "TrainedModel":
        """Raises UserError where `directory` is no checkpoint, FailedError where it is damaged."""
        model = models.build(checkpoint_index.read(directory).model)
        load_weights(model, directory)
        return cls(model.eval(), tokenizer.load(directory))

    def on_best_device(self) -> "TrainedModel":
        """The same, its model moved to a GPU where there is one."""
        return TrainedModel(self.model.to("cuda" if torch.cuda.is_available() else "cpu"), self.tokenizer)
