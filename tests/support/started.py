"""Commands of this project in the background."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.processes import processes_with
from tests.support.steps import Planned, environment


class Started:
    """A command whose ranks do what is planned. Its output goes to files; its processes end with the block."""

    def __init__(self, folder: Path, *command: str | Path, planned: tuple[Planned, ...] = ()):
        self._folder = folder
        # a variable that all processes of a run get, on other hosts too
        variables = {**os.environ, **(environment(*planned) if planned else {}), "RUN_UNDER_TEST": str(folder)}
        name, *arguments = map(str, command)
        program = [str(Path(sys.executable).with_name(name)), *arguments]
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as errors:
            self.process = subprocess.Popen(program, stdout=out, stderr=errors, env=variables, start_new_session=True)

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def until(self, true: Callable[[], object]) -> None:
        """Until something is true, which is to happen while the command runs."""
        while not true():
            assert self.process.poll() is None, self.stderr
            time.sleep(0.05)

    def end(self) -> int:
        """The exit code, when the command has ended and left no process behind."""
        self.process.wait()
        psutil.wait_procs(self.others())  # they die of its death, which takes the kernel a moment
        return self.process.returncode

    def others(self) -> list[psutil.Process]:
        """Every process of the run except the one that was started."""
        marked = processes_with(RUN_UNDER_TEST=str(self._folder))
        return [process for process in marked if process.pid != self.process.pid]

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.others(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
