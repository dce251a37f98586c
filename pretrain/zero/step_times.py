"""The time of each step on this rank: for its rows, and for its own compute. No reading waits for the device.

All ranks end a step together, since they wait for one another in collectives. The slow rank is the one that computes
longest and waits least.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from typing import Any, TypeVar

import torch

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
