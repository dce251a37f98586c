"""A signal to one rank asks the whole run to save and stop."""

import contextlib
import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_received: list[int] = []


def heeded() -> list[signal.Signals]:
    """Those that ask this process to stop: SIGHUP, of a terminal that is closed, unless `nohup` has it ignored."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (deaf and number is signal.SIGHUP)]


def catch() -> None:
    """From here on signals are only taken note of: no step and no save is torn, however many there are.

    Also those that came while this process started, where a supervisor has had it hold them back.
    """
    for number in heeded():
        signal.signal(number, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore() -> None:
    """From here on signals do nothing: the run is over. Python, as it ends, would let go of handlers of its own."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


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
