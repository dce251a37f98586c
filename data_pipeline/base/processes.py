"""Starts, watches and ends child processes; handles stop signals; measures memory."""

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Literal

import psutil

# The start of each command that runs Python: -P, so that no file of the current folder, such as random.py, is run in
# place of a module.
PYTHON = (sys.executable, "-P")
SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # variables that do the same for the Python processes that libraries start
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_SECONDS_TO_DIE, _POLL_SECONDS = 60.0, 0.05


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process to stop. SIGHUP, which a closing terminal sends, is left out under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number is signal.SIGHUP)]


def announce(number: int, what: str) -> None:
    """Prints to stderr `what` a signal does. Not with print(), which the signal may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(2, f"{signal.Signals(number).name}: {what}\n".encode())


@contextlib.contextmanager
def caught(
    on_signal: Callable[[int], None] = lambda number: None, numbers: Iterable[signal.Signals] | None = None
) -> Iterator[list[int]]:
    """Within the block, each stop signal is appended to the list that is yielded, and `on_signal` is called with it.

    `numbers`: the signals; None: all that ask this process to stop. Only the main thread can catch signals; in another
    thread the list stays empty.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_signal(number)

    may_catch = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handle) for number in (numbers or stop_signals() if may_catch else ())}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the handlers of `STOP_SIGNALS` after the block. A thread other than the main one can't change any."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # None: not set by Python
                    signal.signal(number, handler)


@contextlib.contextmanager
def blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Processes that are started within the block, and their children, have `signals` blocked until they unblock them.

    Installing a handler doesn't unblock a signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Processes that are started within the block have these environment variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def until(true: Callable[[], object], seconds: float) -> bool:
    """Waits until `true()` is true, at most `seconds`; returns whether it is."""
    deadline = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return bool(found)


class Process(subprocess.Popen[bytes]):
    """A child process that leads a session; its own children belong to the session.

    `output`: the file for stdout and stderr; "kept": they stay in memory, for `read` and `last_lines`; None: this
    process's stdout and stderr. `stdin`: written to the child's stdin, which stays open. `tied`, without `stdin`: the
    kernel kills the session as soon as this process ends, however it ends. `signals_blocked`: stop signals are blocked
    as in `blocked`.

    Attributes:
        started: when the process was started, in seconds of `time.monotonic`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | Literal["kept"] | None = None,
        stdin: bytes | None = None,
        tied: bool = False,
        signals_blocked: bool = False,
    ):
        self.program, self.started = command[0], time.monotonic()
        self._kept = os.memfd_create("output") if output == "kept" else -1
        self._taken = 0  # bytes of the kept output, by `read`
        target = self._kept if output == "kept" else output
        inside, self._inlet = os.pipe() if tied or stdin is not None else (os.open(os.devnull, os.O_RDONLY), -1)
        with blocked(STOP_SIGNALS if signals_blocked else ()):
            super().__init__(
                command, env=environment, stdin=inside, stdout=target, stderr=target, start_new_session=True
            )
        if tied:
            _kill_when_closed(inside, self.pid)
        os.close(inside)
        if stdin:
            # BrokenPipeError: the child has ended, and its output says why
            with contextlib.suppress(BrokenPipeError), open(self._inlet, "wb", closefd=False) as file:
                file.write(stdin)

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self.poll()

    def read(self) -> bytes:
        """The kept output since the last call."""
        content = self._written(self._taken)
        self._taken += len(content)
        return content

    def write(self, data: bytes) -> int:
        """Writes to stdin; returns how many bytes the pipe took. Raises OSError if it takes none."""
        os.set_blocking(self._inlet, False)
        return os.write(self._inlet, data)

    def last_lines(self, number: int) -> list[str]:
        """The last lines of the kept output, without empty lines."""
        lines = self._written().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-number:]

    def _written(self, start: int = 0) -> bytes:
        return os.pread(self._kept, os.fstat(self._kept).st_size - start, start)

    def close(self) -> None:
        for file in {self._kept, self._inlet} - {-1}:
            os.close(file)
        self._kept = self._inlet = -1


class ProcessGroup:
    """Child processes that end with the `with` block, together with their own children.

    Each leads a session, so that Ctrl-C in the terminal reaches only this process. `seconds_to_end`: how long the
    processes have to end by themselves before they are killed.
    """

    def __init__(self, seconds_to_end: float = 30.0):
        self._seconds_to_end = seconds_to_end
        self._processes: list[Process] = []

    def add(self, process: Process) -> Process:
        self._processes.append(process)
        return process

    def watch(self, stop: Callable[[], object] = lambda: False) -> Process | None:
        """Waits until a process ends, and returns it; None as soon as `stop` is true, or without a process."""
        while self._processes and not stop():
            if process := next((one for one in self._processes if one.code is not None), None):
                return process
            time.sleep(_POLL_SECONDS)
        return None

    def remove(self, process: Process) -> None:
        """Forgets a process that has ended."""
        self._processes.remove(process)
        process.close()

    def send_signal(self, number: int) -> None:
        """Sends a signal to the processes of the group, not to their children."""
        for process in self._processes:
            process.send_signal(number)

    def end(self, number: int | None = signal.SIGTERM) -> None:
        """Sends the signal `number`, if any, waits `seconds_to_end` at most, and kills the processes that still run."""
        if number is not None:
            self.send_signal(number)
        until(lambda: all(process.code is not None for process in self._processes), self._seconds_to_end)
        self.kill()

    def kill(self) -> None:
        """Kills the processes and their children, and waits until all are gone."""
        sessions = {process.pid for process in self._processes}

        def gone() -> bool:
            members = _members(sessions)
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            return not members and all(process.code is not None for process in self._processes)

        until(gone, _SECONDS_TO_DIE)
        for process in self._processes:
            process.close()
        self._processes.clear()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _members(sessions: Iterable[int]) -> list[psutil.Process]:
    """The processes of these sessions that still run."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if os.getsid(process.pid) in sessions and not _is_over(process):
                members.append(process)
    return members


def _is_over(process: psutil.Process) -> bool:
    """Whether a process has ended, although it is still listed: a container's init may be slow to reap it.

    A killed process is a zombie as soon as its first thread has ended; its other threads still hold files and locks.
    """
    return process.status() == psutil.STATUS_ZOMBIE and len(os.listdir(f"/proc/{process.pid}/task")) <= 1  # noqa: PTH208


def _kill_when_closed(pipe: int, session: int) -> None:
    """Makes the kernel kill the processes of `session`, whose stdin is `pipe`, once the other end of `pipe` is closed.

    Signal-driven I/O needs no thread in these processes, so it also kills processes that are stopped or hang in native
    code.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -session)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


_GROUPS = {  # controller: (mount point, file of the limit, file of the usage, key of the reclaimable part of the usage)
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory() -> int:
    """The bytes that this process can still allocate: the machine's free memory, or less under a control group."""
    return min([psutil.virtual_memory().available, *(most - taken for most, taken in control_groups())])


def total_memory() -> int:
    """The bytes of memory that this process may use, free or not."""
    return min([psutil.virtual_memory().total, *(most for most, _ in control_groups())])


def control_groups(system: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of each control group of this process that has a limit, such as a container or a job."""
    groups = (system / "proc/self/cgroup").read_text() if (system / "proc/self/cgroup").exists() else ""
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if controllers not in _GROUPS:
            continue
        mounted, limit, usage, cache = _GROUPS[controllers]
        root = system / mounted
        own = root / path.lstrip("/")
        for group in (one for one in (own, *own.parents) if one.is_relative_to(root)):
            with contextlib.suppress(OSError, ValueError):  # in a container there is only the root; "max": no limit
                most, taken = (int((group / name).read_text()) for name in (limit, usage))
                kinds = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most, taken - int(kinds.get(cache, 0))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For a block that imports large packages: Python doesn't search for garbage within the block, but once at its end.

    PyTorch, DeepSpeed and MLflow make 360,000 objects, which stay. By default, Python searches all of them several
    times while they are imported, which is a fifth of the imports' time.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        if searches:
            gc.enable()
