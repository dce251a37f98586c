"""The model that a run trains, with activation checkpointing and compilation of its layers; and DeepSpeed's config: the
run file's `deepspeed` section and what the rest decides.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.foundation.lazy_imports import imported_at_first_use
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.deepspeed_keys import zero_defaults
from pretrain.config.run_config import ComputeSection
from pretrain.models import ModelConfig
from pretrain.models.layers import fuse_linears, not_drawn
from pretrain.models.model import Head, Model
from pretrain.run import watchdog
from pretrain.zero.memory import freed_at_once

with imported_at_first_use():
    from torch._dynamo import callback  # 2.7 s and 150 MB, which only compilation needs: see unused_imports.py

    from pretrain.zero import deepspeed_private  # chooses its accelerator when it is imported; `compiles` comes before


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
    defaults = zero_defaults(stage, deepspeed_private.deepspeed.accelerator.get_accelerator().device_name())
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
    with freed_at_once(), deepspeed_private.deepspeed.zero.Init(config_dict_or_path=deepspeed_config(config, ranks)):
        yield


Forward = Callable[..., Tensor]

BACKEND = "inductor"
# Compiled graphs per layer: rows with or without padding, of one width or of any, aligned for the fastest kernels or
# not. Beyond PyTorch's default of 8, it would run uncompiled with just a warning.
_GRAPHS = 32


def prepare_layers(model: nn.Module, compute: ComputeSection, stage: int) -> None:
    """Applies `compute` to the layers of `model` in training, and to its loss on GPUs, before DeepSpeed gets it.

    Parameter names don't change. In evaluation the layers run unchanged, since decoding gives them inputs that grow
    with every token. ZeRO-3 gathers a compiled layer as a whole: hooks on the modules inside would break its graph.
    """
    compiled = compiles(compute)
    if compiled:
        callback.on_compile_start(lambda _: watchdog.compiling(True))
        callback.on_compile_end(lambda _: watchdog.compiling(False))
        torch._dynamo.config.recompile_limit = _GRAPHS
        for module in model.modules():
            if isinstance(module, Head):
                module.compiled = True
    for layer in layers(model).values():
        forward: Forward = layer.forward
        if compiled or stage < 3:
            fuse_linears(layer)
        if compiled:
            forward = torch.compile(forward, backend=BACKEND)
            if stage == 3:
                deepspeed_private.deepspeed.utils.set_z3_leaf_module(layer, True)
        if compute.activation_checkpointing:
            forward = recomputed(forward)
        if compiled or compute.activation_checkpointing:
            layer.forward = _in_training(layer, forward, layer.forward)


def compiles(compute: ComputeSection) -> bool:
    """True if layers are compiled: as configured, else on GPUs."""
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return on_gpu if compute.compile is None else compute.compile


def recomputed(forward: Forward) -> Forward:
    """`forward` that keeps only its inputs for the backward pass and runs again in it."""
    return partial(checkpoint, forward, use_reentrant=False)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model, the members of its module lists, by name and in order: "encoder.layers.0"."""
    return {
        f"{name}.{number}": layer
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for number, layer in enumerate(module)
    }


def _in_training(layer: nn.Module, prepared: Forward, plain: Forward) -> Forward:
    return lambda *inputs, **options: (prepared if layer.training else plain)(*inputs, **options)
