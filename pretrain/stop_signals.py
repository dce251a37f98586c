"""A signal to one rank asks the whole run to save and stop."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_received: list[int] = []


@contextlib.contextmanager
def caught() -> Iterator[None]:
    """Within the block, signals are only taken note of: no step and no save is torn, however many there are."""
    previous = {number: signal.signal(number, _on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        _received.clear()
        for number, handler in previous.items():
            signal.signal(number, handler)


def received() -> bool:
    """Whether this rank was asked to stop. The ranks agree on it with their next step."""
    return bool(_received)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _received:
        tell(number, "saving and stopping after this step; Ctrl-\\ ends the run at once")
    _received.append(number)


def tell(number: int, what: str) -> None:
    """Says on stderr `what` a signal does. Not by print: the handler may have interrupted one."""
    with contextlib.suppress(OSError):
        os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())
