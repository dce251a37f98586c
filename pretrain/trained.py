"""A model out of a checkpoint, with its tokenizer, in this process alone."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline import tokenizer
from pretrain import models
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.tensors import load_weights
from pretrain.models.config import T5Config
from pretrain.models.t5 import T5


@dataclass(frozen=True)
class TrainedModel:
    """`model` in fp32 and evaluation mode."""

    model: T5
    tokenizer: tokenizer.Tokenizer

    @classmethod
    def open(cls, directory: Path) -> "TrainedModel":
        """Raises UserError where `directory` is no checkpoint, FailedError where it is damaged."""
        config = T5Config.model_validate(checkpoint_index.read(directory).identity["model"])
        model = models.build(config)
        load_weights(model, directory)
        return cls(model.eval(), tokenizer.load(directory))
