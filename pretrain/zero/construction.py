"""Building the model that a run trains."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from data_pipeline.loading.cut import Cut
from pretrain import models
from pretrain.config import RunConfig
from pretrain.models import ModelConfig
from pretrain.models.model import Model
from pretrain.zero.config import deepspeed_config
from pretrain.zero.layers import prepare_layers
from pretrain.zero.memory import freed_at_once


def construct(config: RunConfig, model_config: ModelConfig, cut: Cut) -> Model:
    """The model with new weights; what a checkpoint has comes later.

    At ZeRO stage 3 each parameter is cut up as soon as it is made: no rank ever holds the whole model.
    """
    torch.manual_seed(config.run.seed)
    with _sharded(config, cut) if config.zero_stage == 3 else contextlib.nullcontext():
        model = models.build(model_config)
    prepare_layers(model, config)
    return model


@contextlib.contextmanager
def _sharded(config: RunConfig, cut: Cut) -> Iterator[None]:
    import deepspeed

    with freed_at_once(), deepspeed.zero.Init(config_dict_or_path=deepspeed_config(config, cut)):
        yield


def broadcast_buffers(model: nn.Module) -> None:
    """Gives all ranks the buffers of rank 0: DeepSpeed does so with parameters only."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
