"""Measures the norms of a training step while it is taken.

Norms of gradients, weights, updates and activations come from what a step computes anyway: the optimizer's flat buffers
before and after their update, and the outputs of layers. The step's result doesn't change.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.engine.construction import layers
from pretrain.engine.deepspeed_private import flat_buffers, wrapped
from pretrain.engine.engine import Engine
from pretrain.engine.optimizers.flat_buffers import FlatBuffer, sums_of_squares

GRADIENT, WEIGHT, UPDATE = range(3)


class StepNorms:
    """Sums of squares over this rank's part of a step, fp64. Their sums over all ranks are the sums of the step.

    `parameters` (parameters, 3): of each parameter's gradient after clipping, of its fp32 values before the step, and
    of their change, in the order of `names`. `activations` (layers, 2): of each layer's output at real tokens, and the
    number of elements there, in the order of `layers`. `error`: what went wrong; the step itself isn't affected.

    Until the optimizer has updated a flat buffer, a second copy of this flat buffer exists.
    """

    def __init__(self, engine: Engine):
        self._engine, model = engine, engine.module
        self.names = [name for name, _ in model.named_parameters()]
        self.layers = list(layers(model))
        self.parameters = torch.zeros(len(self.names), 3, dtype=torch.float64, device=engine.device)
        self.activations = torch.zeros(len(self.layers), 2, dtype=torch.float64, device=engine.device)
        self.error: Exception | None = None
        self._buffers = {id(buffer.tensor): buffer for buffer in flat_buffers(engine.deepspeed)}
        self._before: dict[int, Tensor] = {}
        self._real: dict[str, Tensor | None] = {}

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Within the block, measures the step that the engine takes."""
        optimizer, model = wrapped(self._engine.deepspeed), self._engine.module
        handles = [
            optimizer.register_step_pre_hook(self._guarded(self._before_update)),
            optimizer.register_step_post_hook(self._guarded(self._after_update)),
            model.register_forward_pre_hook(self._guarded(self._note_padding), with_kwargs=True),
        ]
        for number, (name, layer) in enumerate(layers(model).items()):
            stack = "targets" if model.decoder_reads_targets and name.startswith("decoder") else "inputs"
            handles.append(layer.register_forward_hook(self._guarded(self._note_output(number, stack))))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._before.clear()
            self._real.clear()

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """`call` without gradients, which keeps its error, after which nothing is measured."""

        def guarded(*arguments: Any) -> None:
            if self.error is None:
                try:
                    with torch.no_grad():
                        call(*arguments)
                except Exception as error:
                    self.error = error

        return guarded

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor in _updated(optimizer):
            buffer = self._buffers[id(tensor)]
            if tensor.grad is not None:
                self._add(buffer, GRADIENT, tensor.grad.view(-1))
            self._add(buffer, WEIGHT, tensor.data.view(-1))
            self._before[id(tensor)] = tensor.data.view(-1).clone()

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        for tensor in _updated(optimizer):
            change = self._before.pop(id(tensor)).sub_(tensor.data.view(-1))
            self._add(self._buffers[id(tensor)], UPDATE, change)

    def _add(self, buffer: FlatBuffer, kind: int, values: Tensor) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        rows = torch.tensor([numbers[fragment.name] for fragment in buffer.fragments], device=self.parameters.device)
        self.parameters[:, kind].index_add_(0, rows, sums_of_squares(buffer, values).to(self.parameters))

    def _note_padding(self, model: nn.Module, _: Any, batch: Mapping[str, Tensor]) -> None:
        """Notes which tokens of a micro-batch are real: (batch, length), or None for all."""
        inputs = batch.get("encoder_segment_ids", batch.get("encoder_attention_mask"))
        self._real = {"inputs": None if inputs is None else inputs != 0, "targets": batch["labels"] != IGNORE_INDEX}

    def _note_output(self, number: int, stack: str) -> Callable[..., None]:
        def note(_: nn.Module, inputs: Any, output: Tensor) -> None:
            squares = torch.linalg.vector_norm(output, dim=-1, dtype=torch.float32).double().square()
            real = self._real[stack]
            if real is not None:
                squares = squares * real
            tokens = torch.as_tensor(squares.numel()) if real is None else real.sum()
            self.activations[number, 0] += squares.sum()
            self.activations[number, 1] += tokens.to(squares) * output.size(-1)

        return note


def _updated(optimizer: Optimizer) -> Iterator[Tensor]:
    """The flat buffers that a call of `step` updates."""
    for group in optimizer.param_groups:
        yield from group["params"]
