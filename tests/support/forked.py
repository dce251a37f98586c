"""Commands in processes that are forked from a server, which has imported DeepSpeed already.

A process of its own, with its own output, signals and exit code, without the seconds that its imports take.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from tests.support.rank_processes import PROCESSES, environments


class Forked:
    """`pretrain ARGUMENTS` in the background, in a session of its own, on `terminal` if one is given.

    `command`: another package with a `cli`. `variables`: what its environment has besides that of this process. A
    `ProcessGroup` can take charge of it.
    """

    def __init__(
        self, *arguments: str | Path, command: str = "pretrain", terminal: str | None = None, **variables: str
    ):
        self.arguments = [str(argument) for argument in arguments]
        self._files = tempfile.TemporaryDirectory(prefix="forked-")
        self._output = [Path(self._files.name, name) for name in ("stdout", "stderr")]
        environment = {**os.environ, "COLUMNS": "120", **variables}
        self._process = PROCESSES.Process(
            target=_main, args=(command, self.arguments, environment, Path.cwd(), self._output, terminal)
        )
        self._process.start()
        assert self._process.pid
        self.pid, self.started = self._process.pid, time.monotonic()

    @property
    def stdout(self) -> str:
        return self._output[0].read_text() if self._output[0].exists() else ""

    @property
    def stderr(self) -> str:
        return self._output[1].read_text() if self._output[1].exists() else ""

    def until(self, line_start: str) -> None:
        """Waits for a line of stdout that begins like this."""
        while not any(line.startswith(line_start) for line in self.stdout.splitlines()):
            assert self._process.is_alive(), self.stderr
            time.sleep(0.02)

    def wait(self, seconds: float | None = None) -> Any:
        """The exit code, negative for a signal; None if it still runs after some seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    @property
    def code(self) -> Any:
        return self.wait(0)

    def close(self) -> None:
        self._process.join()

    def others(self) -> list[psutil.Process]:
        """The processes that it has started and that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                in_session = os.getsid(process.pid) == self.pid and process.pid != self.pid
                if in_session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.others():
            process.kill()
        self._process.kill()
        self._process.join()
        self._files.cleanup()


@contextlib.contextmanager
def forked_ranks(ranks: int, *arguments: str | Path) -> Iterator[list[Forked]]:
    """`pretrain ARGUMENTS` as each of several ranks, without a launcher and a supervisor."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Forked(*arguments, **own)) for own in environments(ranks)]


def run_forked(*arguments: str | Path, command: str = "pretrain") -> subprocess.CompletedProcess[str]:
    """What `pretrain ARGUMENTS` comes to, or that of another `command`."""
    with Forked(*arguments, command=command) as forked:
        return subprocess.CompletedProcess(forked.arguments, forked.wait(), forked.stdout, forked.stderr)


def _main(
    command: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: Path,
    output: list[Path],
    terminal: str | None,
) -> None:
    os.setsid()
    gc.freeze()  # as in ranks
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` may have the tests ignore it
    for number, path in enumerate((os.devnull, *output)):
        # the first terminal that the leader of a session opens becomes the session's
        os.dup2(os.open(terminal or path, os.O_RDWR | (os.O_CREAT if number and not terminal else 0)), number)
    # the server's own are of other files, and know whether these can seek
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [command, *arguments]
    import_module(f"{command}.cli").main()
