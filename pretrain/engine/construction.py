"""Builds the model that a run trains, with activation checkpointing and compiled layers, and DeepSpeed's config."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import first_few
from pretrain import models
from pretrain.config import RunConfig, deepspeed_keys
from pretrain.config.batch import BatchPlan
from pretrain.config.run_config import ComputeSection
from pretrain.engine.memory import freed_at_once
from pretrain.engine.sharding import Sharding
from pretrain.hardware import device_type
from pretrain.models import ModelConfig
from pretrain.models.layers import Layer, SkipInit, fuse_linears
from pretrain.models.model import Head, Model
from pretrain.models.stacks import Decoder
from pretrain.run import watchdog


def refuse_untrained(model: nn.Module) -> None:
    """Raises UserError if a parameter takes no gradient: no optimizer would own it, and no checkpoint would have it."""
    if names := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        raise UserError(
            f"model: {type(model).__name__} has parameters with requires_grad=False ({first_few(names, 3)}), which no "
            "checkpoint would have; make them buffers (register_buffer), or freeze them by optimizer.freeze instead"
        )


def deepspeed_config(config: RunConfig, sharding: Sharding, largest: int = 1) -> dict[str, Any]:
    """The config for `deepspeed.initialize`. `largest`: the number of elements of the model's largest parameter.

    The config has one micro-batch per step. The engine itself marks the last micro-batch of a step, since the number of
    micro-batches varies while the batch size ramps up.
    """
    ranks, stage, local = sharding.ranks, sharding.deepspeed_stage, sharding.local
    rows = BatchPlan(config.batch, ranks).micro_batch
    decided: dict[str, Any] = {
        "train_batch_size": ranks * rows,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if local else config.optimizer.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # optimizers here step on the CPU too
        "communication_data_type": "fp32",  # unset, bf16 gradients would be reduced in bf16
        "steps_per_print": 2**62,
        "timers": {"throughput": {"enabled": False}},  # the timer waits for the GPU twice
    }
    if config.precision == "bf16":
        # without the check, a step with a non-finite gradient would be applied; `LocalGradients` has a check of its own
        decided["bf16"] = {"enabled": True, "check_grad_overflow": not local}
        decided["data_types"] = {
            "grad_accum_dtype": "fp32",  # unset, gradients would be accumulated in bf16
            "keep_in_fp32_modules": ["*"],  # all buffers; unset, only stage 3 would cast them to bf16
        }
    settings = config.deepspeed.model_dump()
    import deepspeed  # chooses its accelerator when it is imported, which must be in the process group

    reductions = deepspeed_keys.reductions(stage, deepspeed.accelerator.get_accelerator().device_name())
    measured = {"compute_grad_norm": False} if local else {}  # `LocalGradients` computes the norm
    zero = settings["zero_optimization"] = {**settings["zero_optimization"], **reductions, **measured, "stage": stage}
    if stage < 3 and zero["overlap_comm"] and not config.deepspeed.zero_optimization.offloads:
        # DeepSpeed frees the gradient of a larger parameter while it reduces it in another stream
        zero["reduce_bucket_size"] = max(zero["reduce_bucket_size"], largest)
    return {**settings, **decided}


def construct(config: RunConfig, model_config: ModelConfig, sharding: Sharding, skip_init: bool = False) -> Model:
    """Builds the model. `skip_init` leaves out the random initialization, because a checkpoint is loaded next.

    At ZeRO stage 3, each parameter is sharded as soon as it is created, so that no rank ever holds the whole model.
    """
    torch.manual_seed(config.run.seed)
    with sharded(config, sharding), SkipInit() if skip_init else contextlib.nullcontext():
        model = models.build(model_config)
    prepare_layers(model, config.compute, sharding.deepspeed_stage)
    return model


@contextlib.contextmanager
def sharded(config: RunConfig, sharding: Sharding) -> Iterator[None]:
    """Within the block, parameters are sharded as they are created, if ZeRO's stage is 3."""
    if sharding.stage < 3:
        yield
        return
    import deepspeed  # chooses its accelerator when it is imported, which must be in the process group

    with freed_at_once(), deepspeed.zero.Init(config_dict_or_path=deepspeed_config(config, sharding)):
        yield


BACKEND = "inductor"
# On CPUs: with vectors of 512 bits, g++ 12 optimizes TorchInductor's bf16 code into wrong gradients: those of the norms
# of queries and keys are off by 130 %, and some are NaN. With -O1 they are right, and with vectors of 256 bits.
_ON_CPUS = {"cpp.simdlen": 256}
# Compiled graphs per layer: for rows with or without padding, of one width or any width, aligned for the fastest
# kernels or not. Beyond PyTorch's default of 8, a layer would run uncompiled.
_GRAPHS = 32


def prepare_layers(model: nn.Module, compute: ComputeSection, stage: int) -> None:
    """Applies `compute` to the layers of `model` in training, and to its loss on GPUs. Called before DeepSpeed gets the
    model.

    ZeRO-3 gathers a compiled layer as a whole, since hooks on its modules would break its graph.
    """
    compiled = compiles(compute)
    if compiled:
        _watch_compilations()
        torch.compiler.config.recompile_limit = _GRAPHS
        for module in model.modules():
            if isinstance(module, Head):
                module.compiled = True
    for module in model.modules():
        if isinstance(module, Decoder):  # joined memories would keep keys and values that layers recompute
            module.joins_memories = stage < 3 and not compute.activation_checkpointing
    on_cpus = BACKEND == "inductor" and device_type() == "cpu"
    for layer in layers(model).values():
        if compiled or stage < 3:
            fuse_linears(layer)
        if compiled and stage == 3:
            import deepspeed  # chooses its accelerator when it is imported, which must be in the process group

            deepspeed.utils.set_z3_leaf_module(layer, True)
        if compiled or compute.activation_checkpointing:
            _refuse_other_layers(layer, "compile" if compiled else "activation_checkpointing")
            flags = _ON_CPUS if compiled and on_cpus else None
            layer.prepare(BACKEND if compiled else None, compute.activation_checkpointing, flags)


def _refuse_other_layers(layer: nn.Module, key: str) -> None:
    if not isinstance(layer, Layer):
        raise UserError(
            f"compute.{key}: the layer {type(layer).__name__} of this family is no subclass of "
            f"pretrain.models.layers.Layer, whose run is compiled or recomputed; make it one, or set this to false"
        )


def _watch_compilations() -> None:
    from torch._dynamo import callback  # takes a second, and few runs compile

    if _compilation_starts not in callback.callback_handler.start_callbacks:  # of an earlier run of this process
        callback.on_compile_start(_compilation_starts)
        callback.on_compile_end(_compilation_ends)


def _compilation_starts(_: object) -> None:
    watchdog.compiling(True)


def _compilation_ends(_: object) -> None:
    watchdog.compiling(False)


def forget_compiled() -> None:
    """Has layers compiled again, for the shapes that come. After two numbers of rows, as in the search for a
    micro-batch, PyTorch compiles for any number, which is slower."""
    torch.compiler.reset()  # also forgets callbacks
    _watch_compilations()


def gathered_at_once(model: nn.Module, compute: ComputeSection) -> list[nn.Module]:
    """The modules whose weights ZeRO-3 gathers before they run and releases afterwards."""
    if compiles(compute):
        return list(layers(model).values())
    owning = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    return [module for module in owning if not any(part is not module and part in owning for part in module.modules())]


def whole_copy(model: Model) -> Model:
    """A model in evaluation mode that shares the weights and buffers of `model`, which ZeRO-3 has gathered. It has none
    of DeepSpeed's hooks, which would gather and release weights."""
    copy = models.meta_model(model.config)
    for module, (_, source) in zip(copy.modules(), model.named_modules(), strict=True):
        for name, parameter in source.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.data, requires_grad=False))
        for name, buffer in source.named_buffers(recurse=False):
            setattr(module, name, buffer)
    return copy.eval()


def compiles(compute: ComputeSection) -> bool:
    """True if layers are compiled: as `compute.compile` says; null: on GPUs."""
    return device_type() == "cuda" if compute.compile is None else compute.compile


def layers(model: nn.Module) -> dict[str, Layer]:
    """The layers of a model in order, by name, such as "encoder.layers.0": the members of its module lists."""
    return {
        f"{name}.{number}": cast(Layer, layer)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for number, layer in enumerate(module)
    }
