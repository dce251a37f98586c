"""A micro-batch's forward pass, losses and gradients as one CUDA graph, which the host launches at once.

As with `torch.cuda.make_graphed_callables` and Megatron-LM's full-iteration graphs, a graph is for micro-batches of one
form. A replay copies the inputs to the tensors of the capture, and launches the captured kernels in the same order on
the same addresses. On a CPU the same tensors are filled, and the body runs on them.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from data_pipeline.base.errors import one_line
from data_pipeline.loading.batches import Batch
from pretrain.config import RunConfig
from pretrain.engine.sharding import Sharding
from pretrain.models.model import Model

MOST = 8  # graphs
WARM_UPS = 2  # of each form: they compile, choose kernels and allocate what a capture can't
KEY = "compute.cuda_graphs"

Sums = dict[str, Tensor]
Body = Callable[[Batch, dict[str, Tensor], bool, bool], Sums]
"""(batch, counts of labels, whether it is the first of its step, and the last) → its sums of losses, detached."""


class Recorder(Protocol):
    """Captures work on a device and replays it."""

    def warm_up(self, work: Callable[[], Sums]) -> Sums:
        """Runs `work` where it will be captured."""

    def record(self, work: Callable[[], Sums]) -> Callable[[], Sums]:
        """Captures `work`; returns a function that replays it into the same result tensors each time."""

    def finish(self) -> None:
        """Waits until no replay runs. All captures are released after that."""


class StaticTensors:
    """On a CPU nothing is captured: a replay runs the work itself."""

    def warm_up(self, work: Callable[[], Sums]) -> Sums:
        return work()

    def record(self, work: Callable[[], Sums]) -> Callable[[], Sums]:
        return work

    def finish(self) -> None: ...


class CUDAGraphs:
    """Graphs of one device, captured on a stream of their own. They share one memory pool, since no two run at once.

    Warm-up runs on the capture stream: autograd remembers the stream of a leaf's first use, and would otherwise
    synchronize with that stream during capture (PyTorch issue 180090).
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Sums]) -> Sums:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = work()
        current.wait_stream(self._stream)
        return found

    def record(self, work: Callable[[], Sums]) -> Callable[[], Sums]:
        graph = torch.cuda.CUDAGraph()
        # threads of the loader and of checkpoints use CUDA meanwhile; a capture that fails leaves its stream current
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(self._stream), capture:
                found = work()
        except Exception:
            self._end_capture_of_generator()
            raise

        def replay() -> Sums:
            graph.replay()
            return found

        return replay

    def _end_capture_of_generator(self) -> None:
        """A capture that failed leaves the generator of the device as in a capture, and whatever draws from it next, as
        dropout does, would raise an error (seen with PyTorch 2.11). A new state ends that."""
        fresh = torch.Generator(self._device)
        fresh.manual_seed(torch.initial_seed())
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)
        self._pool = torch.cuda.graph_pool_handle()  # one that all graphs have left can't be used again


class GraphedMicroBatches:
    """Captures `body` for each of the first `MOST` forms of micro-batches, and replays it.

    A form is an input signature (names, shapes and dtypes) and a phase of accumulation: the first micro-batch of a step
    overwrites the gradient buffers, and later ones add to them. Results stay as they are until the next replay.

    The body runs without a graph for other forms, and while the model or its parameters have hooks, which a replay
    wouldn't call. After a failed capture, or if memory has no room for graphs and the body, the body always runs
    without a graph; `warn` gets a line that says why. Between steps graphs hold the memory that the body takes, until
    they are released.
    """

    def __init__(self, body: Body, module: nn.Module, recorder: Recorder, warn: Callable[[str], None]):
        self._body = body
        self._recorder = recorder
        self._warn = warn
        self._captured: dict[Hashable, tuple[list[Tensor], Callable[[], Sums]]] = {}
        self._seen: Counter[Hashable] = Counter()
        self._most, self._warned = MOST, False
        self._modules, self._parameters = [*module.modules()], [*module.parameters()]
        self._usual_hooks = self._hooks()  # DeepSpeed's, of no effect where it doesn't reduce

    def __call__(self, batch: Batch, counted: dict[str, Tensor], first: bool, last: bool) -> Sums:
        work = partial(self._body, batch, counted, first, last)
        if self._hooks() != self._usual_hooks:
            self.release()  # a replay and a measured step come seldom, and memory may not hold both
            return work()
        tensors = [*batch.values(), *counted.values()]
        form = (first, *batch, *counted, *((tensor.shape, tensor.dtype) for tensor in tensors))
        if form not in self._captured and self._seen[form] >= WARM_UPS and len(self._captured) < self._most:
            self._capture(form, batch, counted, first, last)
        if form not in self._captured:
            return self._as_it_is(form, work)
        inputs, replay = self._captured[form]
        torch._foreach_copy_(inputs, tensors)
        return replay()

    def release(self) -> None:
        """Frees the memory of all graphs. Forms that come again are captured again."""
        if self._captured:
            self._recorder.finish()
            self._captured.clear()

    def _capture(self, form: Hashable, batch: Batch, counted: dict[str, Tensor], first: bool, last: bool) -> None:
        inputs, numbers = ({name: tensor.clone() for name, tensor in one.items()} for one in (batch, counted))
        try:
            replay = self._recorder.record(partial(self._body, inputs, numbers, first, last))
        except Exception as error:  # whatever a driver, a compiler or a kernel raises
            self._give_up(f"a capture failed: {one_line(error.__context__ or error)}")
        else:
            self._captured[form] = [*inputs.values(), *numbers.values()], replay

    def _as_it_is(self, form: Hashable, work: Callable[[], Sums]) -> Sums:
        warming_up = len(self._captured) < self._most
        if not (warming_up or self._warned):
            self._warned = True
            self._warn(f"{KEY}: micro-batches come in more than {MOST} shapes; others run without CUDA graphs")
        self._seen[form] += 1
        try:
            return self._recorder.warm_up(work) if warming_up else work()
        except torch.OutOfMemoryError:
            if not self._captured:
                raise
        if warming_up:
            self.release()  # graphs share their memory: this form's may fit beside those that come again
        else:
            self._give_up("memory has no room for graphs and for micro-batches of other shapes")
        torch.manual_seed(torch.initial_seed())  # as before the first try
        return work()

    def _give_up(self, reason: str) -> None:
        self._most, self._warned = 0, True
        self.release()
        self._warn(f"{KEY}: {reason}; micro-batches run without CUDA graphs")

    def _hooks(self) -> int:
        """The number of hooks that a replay would leave out. PyTorch has no public count of them."""
        of_modules = (
            len(hooks)
            for one in self._modules
            for hooks in (one._forward_pre_hooks, one._forward_hooks, one._backward_pre_hooks, one._backward_hooks)
        )
        return sum(of_modules) + sum(len(one._backward_hooks or ()) for one in self._parameters)


def graphed(
    body: Body, module: Model, config: RunConfig, sharding: Sharding, device: torch.device, warn: Callable[[str], None]
) -> GraphedMicroBatches | None:
    """`body` with graphs, if the run asks for them; None if it doesn't or can't have them. `warn` gets the reason."""
    if not config.compute.cuda_graphs:
        return None
    against = {
        "DeepSpeed adds up and reduces gradients": not sharding.local,
        "a wrapper changes the loss": config.wrapper is not None,
        "activation checkpointing keeps random states on the host": config.compute.activation_checkpointing,
        "the model draws numbers on the host for each step": type(module).begin_step is not Model.begin_step,
    }
    for reason, holds in against.items():
        if holds:
            warn(f"{KEY}: {reason}; micro-batches run without CUDA graphs")
            return None
    return GraphedMicroBatches(body, module, CUDAGraphs(device) if device.type == "cuda" else StaticTensors(), warn)
