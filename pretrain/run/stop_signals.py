"""Stop signals: a signal to any rank makes the whole run save and stop."""

import contextlib
import signal
from pathlib import Path
from types import FrameType

from data_pipeline.foundation.processes import STOP_SIGNALS, announce, stop_signals

_received: list[int] = []


def catch() -> None:
    """From here on signals are only recorded, so that they interrupt no step and no save.

    Signals that a supervisor blocked while this process started are delivered now.
    """
    for number in stop_signals():
        signal.signal(number, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore() -> None:
    """From here on signals do nothing, because the run is over. Python removes its own handlers as it exits."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> bool:
    """True if this rank was asked to stop. The ranks agree on that in their next step."""
    return bool(_received)


def pending(process: int) -> signal.Signals | None:
    """A stop signal that was sent to `process` but is blocked there; see ShdPnd in proc_pid_status(5)."""
    with contextlib.suppress(OSError):  # the process has ended
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                pending = int(line.split()[1], 16)
                return next((number for number in stop_signals() if pending >> (number - 1) & 1), None)
    return None


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _received:
        announce(number, "saving and stopping after this step; Ctrl-\\ ends the run at once")
    _received.append(number)
