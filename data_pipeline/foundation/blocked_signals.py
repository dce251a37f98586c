"""Holding signals back from processes that are about to be started."""

import contextlib
import signal
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Processes started within the block hold `signals` back, and so do those that they start, until they unblock them.

    Handlers that they set, as DeepSpeed's launcher does, don't change that.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
