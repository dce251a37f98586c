"""Building the model that a run trains."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from pretrain import models
from pretrain.checkpoint.tensors import load_weights
from pretrain.deepspeed_config import deepspeed_config
from pretrain.layerwise import prepare_layers
from pretrain.memory import freed_at_once
from pretrain.models.model import Model
from pretrain.setup import Setup


def construct(setup: Setup) -> Model:
    """The model with new weights, or those that the run starts from; what a checkpoint has comes later.

    At ZeRO stage 3 each parameter is cut up as soon as it is made: no rank ever holds the whole model.
    """
    torch.manual_seed(setup.config.run.seed)
    with _sharded(setup) if setup.config.zero_stage == 3 else contextlib.nullcontext():
        model = models.build(setup.model)
    if setup.initial_weights and not setup.resume:
        load_weights(model, setup.initial_weights)
    prepare_layers(model, setup.config)
    return model


@contextlib.contextmanager
def _sharded(setup: Setup) -> Iterator[None]:
    import deepspeed

    with freed_at_once(), deepspeed.zero.Init(config_dict_or_path=deepspeed_config(setup.config, setup.cut)):
        yield


def broadcast_buffers(model: nn.Module) -> None:
    """Gives all ranks the buffers of rank 0: DeepSpeed does so with parameters only."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
