"""A model out of a checkpoint, with its tokenizer, in this process alone."""

from dataclasses import dataclass
from pathlib import Path

from data_pipeline.tokenizer import Tokenizer
from pretrain import models
from pretrain.checkpoint import TOKENIZER
from pretrain.checkpoint import index as checkpoint_index
from pretrain.checkpoint.tensors import load_weights
from pretrain.models.config import T5Config
from pretrain.models.t5 import T5


@dataclass(frozen=True)
class TrainedModel:
    """`model` in fp32 and evaluation mode."""

    model: T5
    tokenizer: Tokenizer
    tokenizer_path: Path

    @classmethod
    def open(cls, directory: Path) -> "TrainedModel":
        """Raises UserError where `directory` is no checkpoint, FailedError where it is damaged."""
        config = T5Config.model_validate(checkpoint_index.read(directory).identity["model"])
        model = models.build(config)
        load_weights(model, directory)
        path = directory / TOKENIZER
        assert config.vocab_size is not None, "a run fills it in"
        pieces = Tokenizer(path, 0).pieces
        return cls(model.eval(), Tokenizer(path, config.vocab_size - pieces), path)
