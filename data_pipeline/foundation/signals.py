"""The signals that ask a process to stop: blocked while it starts others, or caught within a block."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop. They include SIGHUP, which a closing terminal sends, unless `nohup`
    has made the process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number is signal.SIGHUP)]


def announce(number: int, what: str) -> None:
    """Prints to stderr `what` a signal does. Doesn't use print(), which the signal handler may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())


@contextlib.contextmanager
def caught(on_signal: Callable[[int], None] = lambda number: None) -> Iterator[list[int]]:
    """Within the block, stop signals are added to the list that it yields; then `on_signal` is called."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_signal(number)

    previous = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Starts processes with `signals` blocked.

    A process that is started within the block inherits the mask, and so do its own children, until one of them unblocks
    the signals. Installing a handler, as DeepSpeed's launcher does, does not unblock them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
