"""A session of processes: the launcher and everything it starts. None of them outlives the process that created it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import time

import psutil

from data_pipeline.foundation.blocked_signals import blocked
from pretrain.run.stop_signals import STOP_SIGNALS

_SECONDS_TO_DIE, _SECONDS_BETWEEN_LOOKS = 60.0, 0.05


class Session:
    """Runs `command` in a session of its own, so that Ctrl-C in the terminal doesn't reach it."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        lifeline, self._held = os.pipe()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        with blocked(STOP_SIGNALS):  # one of them would end DeepSpeed's launcher, which leaves its ranks or kills them
            self.launcher = subprocess.Popen(
                command, env=environment, stdin=lifeline, stdout=output, stderr=output, start_new_session=True
            )
        _kill_when_closed(lifeline, self.launcher.pid)
        os.close(lifeline)
        os.close(output)

    def output(self) -> bytes:
        """The output of the launcher and the keepers since the last call."""
        chunks = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._output, 65536):
                chunks.append(chunk)
        return b"".join(chunks)

    @property
    def alive(self) -> bool:
        return bool(self._members())

    def end(self) -> None:
        """Kills every process of the session; nothing can be asked of it afterwards."""
        patience = time.monotonic() + _SECONDS_TO_DIE
        while (members := self._members()) and time.monotonic() < patience:
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self.launcher.wait()
        os.close(self._held)
        os.close(self._output)

    def _members(self) -> list[psutil.Process]:
        """The processes that still run. Zombies don't count: a container's init may take long to reap them."""
        members = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.launcher.pid and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return members


def _kill_when_closed(pipe: int, group: int) -> None:
    """Makes the kernel kill the process `group` once the other end of `pipe` is closed, however that happens.

    The group's processes share `pipe` as their stdin. Signal-driven I/O needs no thread in any of them, so it also
    kills processes that are stopped or hang in native code.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
