"""Times each step on this rank: the wait for data, and the rank's own compute. Measuring never waits for the device."""

import contextlib
import os
import time
from collections.abc import Iterator
from io import FileIO

import torch


class StepTimes:
    """Seconds of the last step.

    - `data`: the rank waited for its rows, or made them.
    - `compute`: the rank itself computed gradients, without waiting for other ranks.
    - `whole`: the step took, without `data`.

    The time that this thread waited in a CPU's run queue (/proc/thread-self/schedstat) is subtracted from `data` and
    `compute`: on a busy host that time is noise.
    """

    def __init__(self) -> None:
        self.data = self.compute = self.whole = 0.0
        self._queued_before = self._queued_meanwhile = 0.0
        self._scheduler: FileIO | None = None
        with contextlib.suppress(OSError):  # not Linux, or a sandbox
            self._scheduler = FileIO("/proc/thread-self/schedstat")

    def ask_for_rows(self) -> None:
        """Called before the wait for the rows of the next step."""
        self._queued_before = self._queued()

    def take_rows(self) -> None:
        """Called before a step, whose rows have come."""
        self._queued_meanwhile = self._queued() - self._queued_before

    def waited_for_rows(self, seconds: float) -> None:
        """Called after the step. `seconds`: how long this rank waited for the rows by the wall clock."""
        self.data = max(seconds - self._queued_meanwhile, 0.0)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Encloses a step."""
        self.compute, began = 0.0, time.perf_counter()
        yield
        self.whole = time.perf_counter() - began

    def begin(self) -> None:
        """Begins a part of the step. During this part the rank doesn't wait for other ranks."""

    def end(self) -> None:
        """Ends the part."""

    def _clock(self) -> float:
        """Seconds, without the time that this thread waited for a CPU."""
        return time.perf_counter() - self._queued()

    def _queued(self) -> float:
        """Seconds that this thread has waited for a CPU so far; 0 where the kernel doesn't tell."""
        if self._scheduler is None:
            return 0.0
        return int(os.pread(self._scheduler.fileno(), 80, 0).split()[1]) / 1e9


class HostTimes(StepTimes):
    """Times on a CPU, by the clock."""

    _began = 0.0

    def begin(self) -> None:
        self._began = self._clock()

    def end(self) -> None:
        self.compute += self._clock() - self._began


class DeviceTimes(StepTimes):
    """Times on a GPU, by CUDA events. The events have happened when a step ends, since its loss is on the host then."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[torch.cuda.Event] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self._events = []
        with super().step():
            yield
        begins, ends = self._events[::2], self._events[1::2]
        self.compute = sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)) / 1e3

    def begin(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    end = begin
