"""Collectives of hooks: all ranks leave a hook if one of them does, whether it returns, raises, hangs or is late.

If one rank left a hook, the others would wait in their next collective for ever. So before each collective the ranks
exchange their states, and if one of them has left, all leave.
"""

import contextlib
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_GOES_ON, _LATE, _RAISED, _RETURNED = range(4)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How a hook ended: on all ranks with a `value`, or on all with an `error`.

    `traceback`: that of the exception that this rank's hook raised, if any. `others_left`: the error isn't this rank's.
    """

    value: T | None = None
    error: str | None = None
    traceback: str | None = None
    others_left: bool = False


class _Interrupted(BaseException):
    """Raised in a hook that hangs. No Exception, so that the hook doesn't catch it."""


class _OthersLeft(BaseException):
    """Raised in a hook that other ranks have left."""


class Collectives:
    """Runs one hook on all ranks. `seconds`: its budget; None: no limit. `alone`: there is no process group."""

    def __init__(self, seconds: float | None, device: torch.device, alone: bool = False):
        self._seconds, self._device, self._alone = seconds, device, alone
        self._began = time.monotonic()
        self._shielded = self._overdue = False
        self.late = False
        """True if the budget is spent, as all ranks have agreed."""

    def run(self, hook: Callable[[], T]) -> Outcome[T]:
        """Calls `hook`, and ends on all ranks with the same outcome: each has a value, or each has an error.

        A hook that hangs in Python code is interrupted when twice its budget is over. One that hangs in native code
        can't be: the run's watchdog ends it.
        """
        try:
            with self._alarm():
                outcome = Outcome(value=hook())
        except _OthersLeft as error:
            return Outcome(error=str(error), others_left=True)
        except _Interrupted:
            outcome = Outcome(error=f"hung: no end after {2 * (self._seconds or 0):g} s, twice its budget")
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            outcome = Outcome(
                error=f"{type(error).__name__}: {lines[0]}".rstrip(": "), traceback=traceback.format_exc()
            )
        try:
            self._agree(_RETURNED if outcome.error is None else _RAISED)
        except _OthersLeft as error:
            return Outcome(error=str(error), others_left=True)
        return outcome

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Within the block, all ranks are in the same collective, and the budget doesn't interrupt it."""
        overdue = self._seconds is not None and time.monotonic() - self._began > self._seconds
        with self._shield():
            self._agree(_LATE if overdue else _GOES_ON)
            yield

    def _agree(self, state: int) -> None:
        """Raises _OthersLeft if this rank goes on, but another has ended."""
        states = torch.zeros(4, dtype=torch.int64, device=self._device)
        states[state] = 1
        if not self._alone:
            dist.all_reduce(states)
        going_on, late, raised, returned = states.tolist()
        self.late |= late > 0
        if state == _RAISED:
            return
        if raised:
            raise _OthersLeft("failed on another rank")
        if returned and going_on + late:
            raise _OthersLeft("its ranks made different numbers of collective calls")

    @contextlib.contextmanager
    def _shield(self) -> Iterator[None]:
        before, self._shielded = self._shielded, True
        try:
            yield
        finally:
            self._shielded = before
        if self._overdue and not before:
            raise _Interrupted

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        if self._seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def overdue(signal_number: int, frame: FrameType | None) -> None:
            self._overdue = True
            if not self._shielded:
                raise _Interrupted

        before = signal.signal(signal.SIGALRM, overdue)
        began = time.monotonic()
        others_seconds, interval = signal.setitimer(signal.ITIMER_REAL, 2 * self._seconds)
        try:
            yield
        finally:
            self._shielded = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if others_seconds:  # an alarm that was set before goes off when it would have
                left = others_seconds - (time.monotonic() - began)
                signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), interval)
