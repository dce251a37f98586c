"""The wrapper of each rank and its reports. DeepSpeed's launcher keeps neither a rank's log nor its exit code."""

import contextlib
import os
import re
import sys
from collections import deque
from pathlib import Path

from launch import keep
from pretrain.run.hardware import VISIBLE
from pretrain.run.rank_logs import SUPERVISED

_LAST_LINES = 10
_REPORT = re.compile(rf"(.*)(?:{keep.STARTED} (\d+) (\d+)|{keep.ENDED} (\d+) (\d+) (-?\d+))")


def kept(command: list[str]) -> list[str]:
    """`command` wrapped so that its output goes to the rank's log and its exit code is reported."""
    return [sys.executable, "-I", "-S", keep.__file__, SUPERVISED, *command]


def with_own_gpus(command: list[str]) -> list[str]:
    """`command` with this process's visible GPUs. DeepSpeed's launcher would give it the first GPUs of the machine."""
    chosen = os.environ.get(VISIBLE)
    return ["env", *(["-u", VISIBLE] if chosen is None else [f"{VISIBLE}={chosen}"]), *command]


class Reports:
    """Parses the output of the launcher and of the keepers below it.

    `codes` maps rank to exit code, in the order in which the ranks ended; it is negative for a signal. `above_ranks`
    are the processes that aren't ranks: DeepSpeed's and the keepers. The launcher's own lines go to `log` if the disk
    has room; `last_lines` keeps the last of them.
    """

    def __init__(self, launcher: int, log: Path):
        self.codes: dict[int, int] = {}
        self.above_ranks = {launcher}
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._log, self._begun = log, b""

    def take(self, output: bytes) -> None:
        *lines, self._begun = (self._begun + output).split(b"\n")
        for line in lines:
            self._take_line(line.decode(errors="replace"))

    def _take_line(self, line: str) -> None:
        if report := _REPORT.fullmatch(line):
            line, parent, started, ended, rank, code = report.groups()
            if started is not None:
                self.above_ranks |= {int(parent), int(started)}
            else:
                self.above_ranks.discard(int(ended))
                self.codes[int(rank)] = int(code)
        if line:
            self.last_lines.append(line)
            with contextlib.suppress(OSError), self._log.open("a") as log:
                print(line, file=log)
