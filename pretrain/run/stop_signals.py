"""A signal to one rank asks the whole run to save and stop."""

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_received: list[int] = []


def heeded() -> list[signal.Signals]:
    """The signals that ask this process to stop. SIGHUP, which a closed terminal sends, is one unless `nohup` has it
    ignored."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (deaf and number is signal.SIGHUP)]


def catch() -> None:
    """From here on a signal is only recorded, so that no step and no save is interrupted.

    Signals that a supervisor blocked while this process started are delivered now.
    """
    for number in heeded():
        signal.signal(number, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore() -> None:
    """From here on signals do nothing, because the run is over. Python would remove its own handlers as it exits."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> bool:
    """Whether this rank was asked to stop. The ranks agree on it with their next step."""
    return bool(_received)


def held_back(process: int) -> signal.Signals | None:
    """A signal of `heeded` that `process` was sent and holds back; see ShdPnd in proc_pid_status(5)."""
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                pending = int(line.split()[1], 16)
                return next((number for number in heeded() if pending >> (number - 1) & 1), None)
    return None


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _received:
        tell(number, "saving and stopping after this step; Ctrl-\\ ends the run at once")
    _received.append(number)


def tell(number: int, what: str) -> None:
    """Says on stderr `what` a signal does. Not by print: the handler may have interrupted one."""
    with contextlib.suppress(OSError):
        os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())
