"""Building the model that a run trains."""

import torch

from pretrain import models
from pretrain.checkpoint.tensors import load_weights
from pretrain.models.model import Model
from pretrain.setup import Setup


def construct(setup: Setup) -> Model:
    """The model with new weights, or those that the run starts from or goes on with."""
    torch.manual_seed(setup.config.run.seed)
    model = models.build(setup.model)
    if weights := setup.resume or setup.initial_weights:
        load_weights(model, weights)
    return model
