"""What is done to each layer of a model in training: its activations computed again, its arithmetic compiled."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pretrain.config import RunConfig
from pretrain.run import watchdog

Forward = Callable[..., Tensor]

BACKEND = "inductor"
# Of one layer's code: rows with padding or without, of one width or of any, aligned for the fastest kernels or not.
# Past PyTorch's 8 it would run as it is, and say so only in a warning.
_GRAPHS = 32


def prepare_layers(model: nn.Module, config: RunConfig) -> None:
    """Makes the layers of `model` do in training what `config.compute` says; before DeepSpeed sees it.

    Names of parameters stay as they are. In evaluation layers run as they are: what decoding gives them grows with
    every token. ZeRO-3 gathers a compiled layer as one: its hooks on each module inside would break the graph there.
    """
    compute = config.compute
    if compute.compile:
        torch._dynamo.config.recompile_limit = _GRAPHS
        _tell_the_watchdog()
    for layer in layers(model):
        forward: Forward = layer.forward
        if compute.compile:
            forward = torch.compile(forward, backend=BACKEND)
            if config.zero_stage == 3:
                _gather_as_one(layer)
        if compute.activation_checkpointing:
            forward = partial(checkpoint, forward, use_reentrant=False)
        if compute.compile or compute.activation_checkpointing:
            layer.forward = _in_training(layer, forward, layer.forward)


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """What every family repeats: the members of its lists of modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def _tell_the_watchdog() -> None:
    from torch._dynamo.callback import on_compile_end, on_compile_start  # 120 MB, which other runs do without

    on_compile_start(lambda _: watchdog.compiling(True))
    on_compile_end(lambda _: watchdog.compiling(False))


def _in_training(layer: nn.Module, prepared: Forward, plain: Forward) -> Forward:
    return lambda *inputs, **options: (prepared if layer.training else plain)(*inputs, **options)


def _gather_as_one(layer: nn.Module) -> None:
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(layer, True)
