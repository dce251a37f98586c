"""Building the model that a run trains."""

import torch

from pretrain import models
from pretrain.checkpoint.tensors import load_weights
from pretrain.models.model import Model
from pretrain.setup import Setup


def construct(setup: Setup) -> Model:
    """The model with new weights, or those that the run starts from; what a checkpoint has comes later."""
    torch.manual_seed(setup.config.run.seed)
    model = models.build(setup.model)
    if setup.initial_weights and not setup.resume:
        load_weights(model, setup.initial_weights)
    return model
