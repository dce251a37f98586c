"""Activation checkpointing and compilation of each layer of a model in training."""

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data_pipeline.foundation.lazy_imports import imported_at_first_use
from pretrain.config.run_config import ComputeSection
from pretrain.models.layers import fuse_linears
from pretrain.models.model import Head
from pretrain.run import watchdog

with imported_at_first_use():
    from torch._dynamo import callback  # 2.7 s and 150 MB, which only compilation needs: see unused_imports.py

    from pretrain.zero import deepspeed_private  # chooses its accelerator when it is imported; `compiles` comes before

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
