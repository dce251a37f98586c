"""Building the model that a run trains."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pretrain import models
from pretrain.config import RunConfig
from pretrain.models import ModelConfig
from pretrain.models.layers import not_drawn
from pretrain.models.model import Model
from pretrain.zero.config import deepspeed_config, stage_on
from pretrain.zero.deepspeed_private import deepspeed
from pretrain.zero.layers import prepare_layers
from pretrain.zero.memory import freed_at_once


def construct(config: RunConfig, model_config: ModelConfig, drawn: bool = True) -> Model:
    """Builds the model with new weights, or with some that a checkpoint will replace, unless they are `drawn`.

    At ZeRO stage 3 each parameter is partitioned as soon as it is created: no rank ever holds the whole model.
    """
    torch.manual_seed(config.run.seed)
    with sharded(config), contextlib.nullcontext() if drawn else not_drawn():
        model = models.build(model_config)
    prepare_layers(model, config.compute, stage_on(config, dist.get_world_size()))
    return model


@contextlib.contextmanager
def sharded(config: RunConfig) -> Iterator[None]:
    """Within the block, parameters are partitioned as they are created, if ZeRO's stage is 3."""
    if stage_on(config, ranks := dist.get_world_size()) < 3:
        yield
        return
    with freed_at_once(), deepspeed.zero.Init(config_dict_or_path=deepspeed_config(config, ranks)):
        yield
