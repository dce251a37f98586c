"""Accumulates the gradients of a step's micro-batches, and updates the weights, in one of two ways.

`LocalGradients`: each rank accumulates the gradients of its micro-batches in fp32, and the ranks reduce them once a
step. This takes 4 bytes per parameter on each rank. `ReducedByDeepSpeed`: DeepSpeed's hooks accumulate and reduce each
gradient during the backward pass, with DeepSpeed's documented interface alone.
"""

import math
from typing import Protocol

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from pretrain.engine.deepspeed_private import forget_gradients, give_gradients, weights_by_group
from pretrain.engine.optimizers.flat_buffers import sum_of_squares
from pretrain.engine.same_use import SameUse
from pretrain.run import watchdog


class Gradients(Protocol):
    """The gradient of a step. All ranks call `reduce` and `update` together.

    Attributes:
        model: the module that computes the losses of a micro-batch.
        scale: the factor of the loss whose gradient `add` accumulates.
        norm: the L2 norm of the last step's gradient before clipping; infinite if the step was skipped.
    """

    model: nn.Module
    scale: float
    norm: float

    def add(self, loss: Tensor, first: bool, last: bool) -> None:
        """Adds the gradient of a micro-batch's part of the step's loss. `first`, `last`: True for the first and the
        last of this rank's micro-batches."""

    def reduce(self) -> None:
        """Sums the gradient over the ranks, unless the backward pass has done so."""

    def update(self) -> bool:
        """Clips the gradient and updates the weights. Returns False, on all ranks, if the gradient isn't finite; the
        step is then skipped."""

    def discard(self, loss: Tensor) -> None:
        """Computes the gradient of a micro-batch's loss as in a step, and updates nothing."""


class LocalGradients:
    """A flat fp32 buffer of gradients for each parameter group, laid out like DeepSpeed's weights: for stage 1, stage 2
    in fp32, and one rank.

    `torch.autograd.grad` adds nothing to `.grad`, so no hook of DeepSpeed runs. DeepSpeed's `step` gets this rank's
    partition of each buffer, updates its fp32 weights and gathers the weights.
    """

    def __init__(self, engine: DeepSpeedEngine, clip_norm: float):
        self.model = engine.module
        self.scale = 1.0
        self.norm = math.inf
        self._engine, self._clip_norm = engine, clip_norm or math.inf
        self._ranks, rank = engine.world_size, engine.global_rank
        self._parameters: list[Tensor] = []
        self._views: list[Tensor] = []  # of each parameter's gradient
        self._buffers: list[Tensor] = []
        for weights, parameters in weights_by_group(engine):
            buffer = torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
            for parameter, place in parameters.values():
                self._parameters.append(parameter)
                self._views.append(buffer.narrow(0, place, parameter.numel()).view_as(parameter))
            self._buffers.append(buffer)
        sizes = [buffer.numel() // self._ranks for buffer in self._buffers]
        self._partitions = [
            buffer.narrow(0, rank * size, size) for buffer, size in zip(self._buffers, sizes, strict=True)
        ]

    def add(self, loss: Tensor, first: bool, last: bool) -> None:
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        used = [(view, gradient) for view, gradient in zip(self._views, found, strict=True) if gradient is not None]
        views, gradients = [view for view, _ in used], [gradient for _, gradient in used]
        with torch.no_grad():
            if first and len(used) < len(found):
                torch._foreach_zero_(self._buffers)
            (torch._foreach_copy_ if first else torch._foreach_add_)(views, gradients)

    def reduce(self) -> None:
        if self._ranks == 1:
            return
        for buffer, partition in zip(self._buffers, self._partitions, strict=True):
            if buffer.is_cuda:
                deepspeed.comm.reduce_scatter_tensor(partition, buffer)
            else:  # gloo's reduce_scatter takes twice as long
                deepspeed.comm.all_reduce(buffer)

    @torch.no_grad()
    def update(self) -> bool:
        squares = torch.stack([sum_of_squares(partition) for partition in self._partitions]).sum()
        if self._ranks > 1:
            deepspeed.comm.all_reduce(squares)
        norm = squares.sqrt().float().cpu()  # the host waits for the device only here
        self.norm = float(norm)
        if not math.isfinite(self.norm):
            self.norm = math.inf
            return False
        excess = (norm + 1e-6) / self._clip_norm
        if excess > 1:
            for partition in self._partitions:
                partition.mul_(1 / excess)
        give_gradients(self._engine, self._partitions)
        self._engine.step()
        return True

    def discard(self, loss: Tensor) -> None:
        self.add(loss, first=True, last=True)


class ReducedByDeepSpeed:
    """Stage 3, offloading, and stage 2 in bf16 on several ranks: a step as DeepSpeed documents it.

    `same_use`: checks that the ranks use the same parameters, where there are several.
    """

    def __init__(self, engine: DeepSpeedEngine, same_use: SameUse | None):
        self.model, self.norm = engine, math.inf
        self._same_use = same_use
        self.scale = float(engine.world_size)  # DeepSpeed averages over the ranks
        self._engine = engine

    def add(self, loss: Tensor, first: bool, last: bool) -> None:
        watchdog.mark()  # at stage 3 the ranks have met in the forward pass
        if self._same_use:
            self._same_use.compare(loss)
        if first:
            forget_gradients(self._engine)
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def reduce(self) -> None: ...

    def update(self) -> bool:
        self._engine.step()
        applied = self._engine.was_step_applied()
        self.norm = float(self._engine.get_global_grad_norm()) if applied else math.inf
        return applied

    def discard(self, loss: Tensor) -> None:
        self.add(loss * math.nan, first=False, last=True)  # DeepSpeed skips a step without a finite gradient
        self._engine.step()
