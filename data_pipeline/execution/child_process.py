"""A child process for one unit: if it dies, this process can say so, and goes on."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from data_pipeline.execution.attempts import CAUSE, RETRIES, Lost

# Forked: it has all modules already, and the kernel can end it together with this process.
_FORK = get_context("fork")
_END_WITH_PARENT = 1, signal.SIGKILL  # PR_SET_PDEATHSIG


def apply(function: Callable[[str], str], text: str) -> str | Lost:
    """`function(text)`, computed in a child process. If that is lost, it is started again, up to `RETRIES` times."""
    for _ in range(1 + RETRIES):
        with contextlib.suppress(EOFError):
            return _once(function, text)
    return Lost(f"the worker died on every try, with no other one at work: {CAUSE}")


def _once(function: Callable[[str], str], text: str) -> str:
    """Raises EOFError if the child dies before it has sent its result."""
    receiving, sending = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_work, args=(function, text, sending, os.getpid()))
    child.start()
    sending.close()  # so that the pipe ends with the child
    try:
        with receiving:
            return receiving.recv()
    finally:
        child.kill()  # it has sent its result, is dead, or is no longer waited for
        child.join()


def _work(function: Callable[[str], str], text: str, sending: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(*_END_WITH_PARENT)
    if os.getppid() != parent:  # it died first
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the parent ends its child
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the unit ends and not the build
    sending.send(function(text))
