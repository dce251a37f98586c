"""The faults themselves: what each does to the process that it happens in."""

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SLOW_STEPS, SLOW_SECONDS = 10, 0.3
CLOCKS = {"clock an hour ahead": 3600.0, "clock an hour behind": -3600.0}
_slow = 0  # steps that a straggler still is slow in


class Here:
    """Where a fault happens: the `arguments` of the function that is about to be called, and its `call`."""

    def __init__(self, *arguments: Any, call: Callable[[], Any] = lambda: None):
        self.arguments, self.call = arguments, call


Fault = Callable[[Here], object]


def be_slow() -> None:
    """What a straggler does at the beginning of each step."""
    global _slow
    if _slow:
        _slow -= 1
        time.sleep(SLOW_SECONDS)


def _signal(number: int) -> Fault:
    return lambda _: os.kill(os.getpid(), number)


def _kill_agent(_: Here) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def _raised(error: Callable[[], BaseException]) -> Fault:
    def fail(_: Here) -> None:
        raise error()

    return fail


def _of_the_disk(number: int) -> Fault:
    return _raised(lambda: OSError(number, os.strerror(number)))


def _in_a_thread(fault: Fault, wait: bool) -> Fault:
    def start(here: Here) -> None:
        thread = threading.Thread(target=fault, args=(here,), daemon=True)
        thread.start()
        if wait:
            thread.join()

    return start


def _hold_the_gil(_: Here) -> None:
    ctypes.PyDLL(None).sleep(3600)


def _kill_a_loaders_worker(_: Here) -> None:
    own = psutil.Process()
    workers = [one for one in own.children(recursive=True) if one.ppid() != own.pid]  # the loader's server forks them
    workers[0].kill()


def _straggle(_: Here) -> None:
    global _slow
    _slow = SLOW_STEPS


def _flip_a_weight(here: Here) -> None:
    """Of the model, and of the optimizer on the rank that owns it, which has the same tensor in fp32."""
    import torch

    weights = max(here.arguments[0].engine.deepspeed.module.parameters(), key=lambda one: one.numel())
    weights.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


def _kill_later(_: Here) -> None:
    """Dies when this rank's threads have finished what they were doing."""
    time.sleep(2.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _tear(here: Here) -> None:
    """A file under its final name, but cut in half: a rename that a machine without power has kept, not the content."""
    here.call()
    *_, named = here.arguments
    if isinstance(named, Path):  # a checkpoint
        torn = max(named.iterdir(), key=lambda file: file.stat().st_size)
    else:
        torn = here.arguments[0] / "checkpoints/latest"
    os.truncate(torn, torn.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(seconds: float) -> Fault:
    return lambda _: time.sleep(seconds)


KILLS: dict[str, Fault] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGABRT": _signal(signal.SIGABRT),
    "SIGBUS": _signal(signal.SIGBUS),
}
HANGS: dict[str, Fault] = {
    "SIGSTOP": _signal(signal.SIGSTOP),
    "hang with the GIL": _hold_the_gil,
    "a thread hangs with the GIL": _in_a_thread(_hold_the_gil, wait=False),
    "hang": _wait(3600),
}
ERRORS: dict[str, Fault] = {
    "exception": _raised(lambda: RuntimeError("on purpose")),
    "out of memory": _raised(MemoryError),
}
DISK: dict[str, Fault] = {
    "ENOSPC": _of_the_disk(errno.ENOSPC),
    "EIO": _of_the_disk(errno.EIO),
    "EROFS": _of_the_disk(errno.EROFS),
}
HARMLESS: dict[str, Fault] = {
    "exception in another thread": _in_a_thread(_raised(lambda: RuntimeError("on purpose")), wait=True),
    "a slow step": _wait(3.0),
    **dict.fromkeys(CLOCKS, _wait(0.0)),  # `planted.turn_clock` does it
}
HOSTS: dict[str, Fault] = {  # the matrix does them when it sees the marker
    "the head killed": _wait(3600),
    "the agent killed": _kill_agent,
    "a lost host": _wait(1.0),
    "a slow host": _wait(1.0),
    "a host cut off for a while": _wait(0.0),
    "a host cut off": _wait(0.0),
}
OTHERS: dict[str, Fault] = {
    "exit with 0": lambda _: os._exit(0),
    "a loader's worker killed": _kill_a_loaders_worker,
    "straggler": _straggle,
    "a bit of a weight": _flip_a_weight,
    "torn rename": _tear,
}
DRAWN = {**KILLS, **HANGS, **ERRORS, **DISK, **HARMLESS, **HOSTS, **OTHERS}
FAULTS: dict[str, Fault] = {**DRAWN, "SIGKILL two seconds later": _kill_later}  # of ONCE_WRONG
