"""Watches over a launcher and its ranks. DeepSpeed's launcher forwards no signals and can leave ranks behind."""

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType

import psutil

from data_pipeline.command import STOPPED
from pretrain import status

_SECONDS_TO_END = 10.0


def supervise(command: list[str], environment: dict[str, str], run: Path) -> int:
    """Runs `command` until it ends; returns 0 finished, 75 stopped after saving, or its own exit code.

    The first signal becomes a request to stop, which the ranks obey after their step; the second ends them all. No
    process of the run outlives this function.
    """
    before = status.read(run)
    # a session of its own: Ctrl-C in the terminal reaches the supervisor alone
    launcher = subprocess.Popen(command, env={**environment, status.SUPERVISED: "1"}, start_new_session=True)
    signals = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            print(f"{signal.Signals(number).name}: saving and stopping; once more ends the run at once", flush=True)
            status.request_stop(run)
        else:
            _end(launcher)

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = {number: signal.signal(number, on_signal) for number in caught}
    try:
        code = launcher.wait()
    finally:
        _end(launcher)
        for number, handler in previous.items():
            signal.signal(number, handler)
    now = status.read(run)
    if now.attempt > before.attempt and now.state in ("stopped", "finished"):
        return STOPPED if now.state == "stopped" else 0
    if code == 0 and now == before and now.state == "finished":
        return 0  # there was nothing left to do
    return code if code > 0 else 1


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends every process of the launcher's session: first asked, then killed."""
    for number, patience in ((signal.SIGTERM, _SECONDS_TO_END), (signal.SIGKILL, _SECONDS_TO_END)):
        processes = _session(launcher.pid)
        for process in processes:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        if not psutil.wait_procs(processes, timeout=patience)[1]:
            return


def _session(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return members
