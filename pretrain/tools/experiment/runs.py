"""Starts the runs of an experiment through `launch local`, several at once, and waits for them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from data_pipeline.foundation.command import STOPPED
from pretrain.run import stop_signals
from pretrain.run.hardware import VISIBLE
from pretrain.tools.experiment.plan import PlannedRun

_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Ended:
    """A run whose launcher has ended with exit code `code` after `seconds`."""

    run: PlannedRun
    code: int
    seconds: float

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.run.log.read_text(errors="replace").split("\n") if self.run.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "its launcher printed nothing")


def lanes(at_once: int, gpus: int) -> list[dict[str, str]]:
    """What the environment of each run that trains at the same time is changed by: GPUs are divided among the runs.

    If there are more runs than GPUs, runs share a GPU.

    2 runs on 4 GPUs -> "0,1" and "2,3"; 2 runs on 1 GPU -> "0" and "0"
    """
    if not gpus:
        return [{} for _ in range(at_once)]
    given = os.environ.get(VISIBLE)
    names = [name.strip() for name in given.split(",")][:gpus] if given else [str(number) for number in range(gpus)]
    each = max(1, gpus // at_once)
    shares = [[names[(lane * each + number) % gpus] for number in range(each)] for lane in range(at_once)]
    return [{VISIBLE: ",".join(share)} for share in shares]


def run_all(
    runs: Sequence[PlannedRun], lanes: Sequence[Mapping[str, str]], report: Callable[[Ended], None]
) -> tuple[list[Ended], bool]:
    """Runs all of `runs`, as many at once as there are `lanes`; returns how each ended, and whether a signal came.

    A run that fails doesn't end the others. After a signal no run is started; those that train get it too: they save
    and stop, and at a second signal they end at once.
    """
    waiting, ended = list(runs), list[Ended]()
    working: dict[int, tuple[PlannedRun, subprocess.Popen[bytes], float]] = {}
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not received:
            stop_signals.announce(number, "the runs that train save and stop; no other run is started")
        received.append(number)
        for _, process, _ in list(working.values()):
            if process.poll() is None:
                process.send_signal(number)

    previous: dict[int, Any] = {number: signal.signal(number, pass_on) for number in stop_signals.heeded()}
    try:
        while working or (waiting and not received):
            for lane, changes in enumerate(lanes):
                if lane not in working and waiting and not received:
                    run = waiting.pop(0)
                    working[lane] = (run, start(run, changes), time.monotonic())
                    if received:  # a signal that came while it started
                        working[lane][1].send_signal(received[0])
            for lane, (run, process, started) in list(working.items()):
                if process.poll() is not None:
                    del working[lane]
                    ended.append(Ended(run, process.returncode, time.monotonic() - started))
                    report(ended[-1])
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return ended, bool(received)


def exit_code(ended: Sequence[Ended], stopped: bool) -> int:
    """1 if a run failed, else 75 if one stopped before its end, else 0."""
    codes = {one.code for one in ended}
    return 1 if codes - {0, STOPPED} else STOPPED if stopped or STOPPED in codes else 0


def start(run: PlannedRun, changes: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts the launcher of a run, in its own session, since Ctrl-C in the terminal would reach it twice."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "launch", "local", str(run.file), *run.overrides]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **changes},
            start_new_session=True,
        )
