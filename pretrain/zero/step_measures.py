"""What is measured of a training step while it runs: its norms, and the time of each step on this rank.

Norms of gradients, weights, updates and activations are taken from what a step computes anyway: the optimizer's flat
buffers before and after their update, and the outputs of layers. The step's result doesn't change.

Times are those for a step's rows, and for this rank's own compute. No reading waits for the device. All ranks end a
step together, since they wait for one another in collectives. The slow rank is the one that computes longest and waits
least.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from pretrain.models.model import Model
from pretrain.optimizers.flat_buffers import FlatBuffer, sums_of_squares
from pretrain.zero.construction import layers
from pretrain.zero.deepspeed_private import DeepSpeedEngine, flat_buffers, wrapped

GRADIENT, WEIGHT, UPDATE = range(3)


class StepNorms:
    """Sums of squares over this rank's part of a step, fp64; those of the step are their sums over all ranks.

    `parameters` (parameters, 3): of each parameter's gradient after clipping, of its fp32 values before the step, and
    of their change, in the order of `names`. `activations` (layers, 2): of each layer's output at real tokens, and the
    number of elements there, in the order of `layers`. `error`: what went wrong; the step itself isn't affected.

    Until the optimizer has updated a flat buffer, a second copy of this flat buffer exists.
    """

    def __init__(self, engine: DeepSpeedEngine):
        model: Model = engine.module
        self.names = [name for name, _ in model.named_parameters()]
        self.layers = list(layers(model))
        self.parameters = torch.zeros(len(self.names), 3, dtype=torch.float64, device=engine.device)
        self.activations = torch.zeros(len(self.layers), 2, dtype=torch.float64, device=engine.device)
        self.error: Exception | None = None
        self._buffers = {id(buffer.tensor): buffer for buffer in flat_buffers(engine)}
        self._before: dict[int, Tensor] = {}
        self._real: dict[str, Tensor | None] = {}

    @contextlib.contextmanager
    def measuring(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Within the block, measures the step that `engine` takes."""
        optimizer, model = wrapped(engine), engine.module
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


Item = TypeVar("Item")
Call = Callable[..., Any]
Events = tuple[torch.cuda.Event, torch.cuda.Event]


class StepTimes:
    """Seconds of the last step.

    - `data`: the rank waited for its rows, or made them.
    - `compute`: the rank itself computed; in other words, it didn't wait for other ranks.
    - `whole`: the step took, without `data`.

    `data` and `compute` leave out what the kernel tells of the time that this thread was ready to run while others had
    the CPU: on a busy machine that changes from one moment to the next, and says nothing about the device.
    """

    def __init__(self) -> None:
        self.data = self.compute = self.whole = 0.0
        self._scheduler: FileIO | None = None
        with contextlib.suppress(OSError):  # not Linux, or a sandbox
            self._scheduler = FileIO("/proc/thread-self/schedstat")

    def loading(self, steps: Iterable[Item]) -> Iterator[Item]:
        """The same items; the time until one is there is the `data` of its step."""
        began = self._clock()
        for item in steps:
            self.data = self._clock() - began
            yield item
            began = self._clock()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Encloses a step."""
        began = time.perf_counter()
        yield
        self.whole = time.perf_counter() - began

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Encloses the forward pass of a micro-batch."""
        return contextlib.nullcontext()

    def waiting(self, call: Call) -> Call:
        """`call`, in which this rank waits for others."""
        return call

    def _clock(self) -> float:
        """Seconds, without those in which this thread waited for a CPU."""
        now = time.perf_counter()
        if self._scheduler is None:
            return now
        return now - int(os.pread(self._scheduler.fileno(), 80, 0).split()[1]) / 1e9


class HostTimes(StepTimes):
    """On a CPU, collectives block: a rank computes while it isn't in one."""

    _waited = 0.0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self._waited, began = 0.0, self._clock()
        with super().step():
            yield
        self.compute = self._clock() - began - self._waited

    def waiting(self, call: Call) -> Call:
        timed = self._timed(call)

        def begun(*arguments: Any, **options: Any) -> Any:
            handle = timed(*arguments, **options)
            return handle if handle is None else _Handle(handle, self._timed(handle.wait))

        return begun

    def _timed(self, call: Call) -> Call:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = self._clock()
            try:
                return call(*arguments, **options)
            finally:
                self._waited += self._clock() - began

        return timed


class _Handle:
    """The handle of an asynchronous collective, with another `wait`."""

    def __init__(self, handle: Any, wait: Call):
        self._handle, self.wait = handle, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class DeviceTimes(StepTimes):
    """On CUDA, `compute` is what the forward passes take on the device: reductions run beside the backward pass.

    Events are recorded around them, and around the gathering of weights inside them (stage 3). A step ends with its
    loss on the host, so they have happened by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forward: list[Events] = []
        self._waits: list[Events] = []
        self._inside = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self._forward, self._waits = [], []
        with super().step():
            yield
        self.compute = _seconds(self._forward) - _seconds(self._waits)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._inside = True
        with _between(self._forward):
            yield
        self._inside = False

    def waiting(self, call: Call) -> Call:
        def timed(*arguments: Any, **options: Any) -> Any:
            with _between(self._waits) if self._inside else contextlib.nullcontext():
                return call(*arguments, **options)

        return timed


@contextlib.contextmanager
def _between(recorded: list[Events]) -> Iterator[None]:
    begins, ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begins.record()
    yield
    ends.record()
    recorded.append((begins, ends))


def _seconds(recorded: list[Events]) -> float:
    return sum(begins.elapsed_time(ends) for begins, ends in recorded) / 1e3
