"""The model that a run trains, and DeepSpeed's config: the run file's `deepspeed` section and what the rest decides."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.deepspeed_keys import zero_defaults
from pretrain.models import ModelConfig
from pretrain.models.layers import not_drawn
from pretrain.models.model import Model
from pretrain.zero.deepspeed_private import deepspeed
from pretrain.zero.layers import prepare_layers
from pretrain.zero.memory import freed_at_once


def stage_on(config: RunConfig, ranks: int) -> int:
    """ZeRO's stage on `ranks` ranks. One rank has nothing to shard: unless it offloads, stage 3 is stage 2 there."""
    zero = config.deepspeed.zero_optimization
    offloads = zero.offloaded_to("cpu") or zero.offloaded_to("nvme")
    return min(zero.stage, 2) if ranks == 1 and not offloads else zero.stage


def deepspeed_config(config: RunConfig, ranks: int) -> dict[str, Any]:
    """The config for `deepspeed.initialize` on `ranks` ranks.

    It declares one micro-batch per step. The engine itself marks the last micro-batch of a step, since their number
    varies during a batch-size ramp-up.
    """
    rows = BatchPlan(config.batch, ranks).micro_batch
    decided: dict[str, Any] = {
        "train_batch_size": ranks * rows,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # optimizers here step on the CPU too
        "communication_data_type": "fp32",  # unset, bf16 gradients would be reduced in bf16
        "steps_per_print": 2**62,
    }
    if config.precision == "bf16":
        decided["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,  # without it, a step whose gradient isn't finite would be applied
            "immediate_grad_update": True,  # a gradient goes to the fp32 ones while it is in the cache, and is freed
        }
        decided["data_types"] = {
            "grad_accum_dtype": "fp32",  # unset, they would be accumulated in bf16
            "keep_in_fp32_modules": ["*"],  # all buffers; unset, only stage 3 would cast them to bf16
        }
    given = config.deepspeed.model_dump()
    given["timers"] = given.get("timers") or {"throughput": {"enabled": False}}  # it would wait for the GPU twice
    stage = stage_on(config, ranks)
    defaults = zero_defaults(stage, deepspeed.accelerator.get_accelerator().device_name())
    if ranks == 1 and stage < 3:  # nothing is reduced, but DeepSpeed would wait for the GPU after each backward pass
        defaults.pop("overlap_comm", None)
    given["zero_optimization"] = {**defaults, **given["zero_optimization"], "stage": stage}
    return {**given, **decided}


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
