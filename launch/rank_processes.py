"""The rank processes below a launcher: found as they start, and how each has ended."""

import contextlib
import os
import select
import time
from pathlib import Path

import psutil

_EXIT_CODE = 49  # of /proc/PID/stat, counted from the state behind the name


class RankProcesses:
    """`ended`: exit codes by rank, those that ended first in front; negative for a signal, None where unknown."""

    def __init__(self, launcher: int, ranks: int):
        self._launcher, self._ranks = launcher, ranks
        self._poll = select.poll()
        self._running: dict[int, tuple[int, int]] = {}  # rank and process number by the descriptor that tells its end
        self.ended: dict[int, int | None] = {}
        self.first_end: float | None = None

    @property
    def running(self) -> bool:
        return bool(self._running)

    def wait(self, seconds: float) -> None:
        """Returns when a rank ends, or after so many seconds."""
        if len(self._running) + len(self.ended) < self._ranks:
            self._find()
        ended = [self._end(descriptor) for descriptor, _ in self._poll.poll(seconds * 1000)]
        if ended:
            self.first_end = self.first_end or time.monotonic()
            # of several at once those that were killed: the others' failures follow from that
            self.ended.update(sorted(ended, key=lambda end: end[1] is None or end[1] >= 0))

    def _end(self, descriptor: int) -> tuple[int, int | None]:
        rank, pid = self._running.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return rank, _exit_code(pid)

    def _find(self) -> None:
        known = {rank for rank, _ in self._running.values()} | self.ended.keys()
        with contextlib.suppress(psutil.NoSuchProcess):
            for node_launcher in psutil.Process(self._launcher).children():
                for process in node_launcher.children():
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                        rank = int(process.environ().get("RANK", "-1"))  # not there yet while the process is made
                        if rank not in known and rank >= 0:
                            descriptor = os.pidfd_open(process.pid)
                            self._poll.register(descriptor, select.POLLIN)
                            self._running[descriptor] = rank, process.pid


def _exit_code(pid: int) -> int | None:
    """Of a process that has ended and that its parent, who looks once a second, has not yet asked about."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
