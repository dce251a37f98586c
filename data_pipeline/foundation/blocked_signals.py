"""Starting processes with signals blocked."""

import contextlib
import signal
from collections.abc import Iterable, Iterator


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
