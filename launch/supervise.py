"""Watches over a launcher and its ranks. DeepSpeed's launcher forwards no signals and can leave ranks behind."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from data_pipeline.foundation.command import STOPPED
from launch.follow import Follower
from launch.rank_processes import Reports
from launch.session import Session
from pretrain.run import rank_logs, status, stop_signals

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_LEAVE = 60.0  # for the other ranks, once one has ended well
_LAST_LINES = 40  # a dump of stacks has the main thread last, its innermost call on top
_REFUSED = 2
_LAUNCHERS_LOG = "launcher.log"


def supervise(command: list[str], environment: dict[str, str], run: Path, ranks: int, dead_rank_seconds: float) -> int:
    """Runs `command` until its `ranks` have ended; returns 0 finished, 75 stopped after saving, 2 refused, 1 failed.

    The first signal becomes a request to stop, which the ranks follow after their current step. The second signal kills
    them. When a rank has died, the others have `dead_rank_seconds` to end by themselves. No process of the run outlives
    this one.
    """
    before = status.read(run)
    logs = rank_logs.new_directory(run)
    status.clear_stop(run)  # asked of an attempt that is over
    with (
        _stop_requests(run) as requests,
        Follower(rank_logs.log_of(logs, 0)),
        Session(command, {**environment, rank_logs.SUPERVISED: str(logs)}) as session,
    ):
        reports = Reports(session.launcher.pid, logs / _LAUNCHERS_LOG)
        deadline = float("inf")
        while len(requests.signals) < 2 and _goes_on(session, deadline, stopping=bool(requests.signals)):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            held_back = [number for process in reports.above_ranks if (number := stop_signals.held_back(process))]
            reports.take(session.output())
            if len(reports.codes) == ranks:  # the launcher would take seconds to see it
                break
            if reports.codes:
                patience = dead_rank_seconds if any(reports.codes.values()) else _SECONDS_TO_LEAVE
                deadline = min(deadline, time.monotonic() + patience)
            elif held_back:  # not by DeepSpeed's launcher, which signals the other ranks and keepers when one has ended
                requests.ask(held_back[0], "sent to DeepSpeed's launcher; saving and stopping")
        reports.take(session.output())
        launcher_code = session.launcher.poll()
    now = status.read(run)
    if now.attempt == rank_logs.attempt(logs) and now.state in ("stopped", "finished"):
        return STOPPED if now.state == "stopped" else 0
    codes = reports.codes
    told = launcher_code == 0 or bool(codes)
    if told and not any(codes.values()) and now == before and now.state == "finished":
        return 0  # there was nothing left to do
    if len(requests.signals) < 2:
        _tell(reports, logs)
    return _REFUSED if _REFUSED in codes.values() else 1


def _goes_on(session: Session, deadline: float, stopping: bool) -> bool:
    if session.launcher.poll() is not None:  # killed by someone, it leaves its ranks behind
        return stopping and session.alive
    return time.monotonic() < deadline


class _StopRequests:
    """The `signals` that this process got. The first, or one sent to the launcher, becomes a request to stop."""

    def __init__(self, run: Path):
        self.signals: list[int] = []
        self._run, self._asked = run, False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signals and number == signal.SIGHUP:
            return  # a terminal that is closed sends it more than once: by its shell, and by the kernel
        self.signals.append(number)
        self.ask(number, "saving and stopping; once more ends the run at once")

    def ask(self, number: int, told: str) -> None:
        if self._asked:
            return
        self._asked = True
        stop_signals.tell(number, told)
        try:
            status.request_stop(self._run)
        except OSError as error:  # no reason to end unsaved
            failed = f"{self._run}/{status.STOP} can't be made: {error.strerror}"
            stop_signals.tell(number, f"{failed}; signal a rank instead")


@contextlib.contextmanager
def _stop_requests(run: Path) -> Iterator[_StopRequests]:
    """What asks the run to stop within the block."""
    requests = _StopRequests(run)
    previous = {number: signal.signal(number, requests.on_signal) for number in stop_signals.heeded()}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _tell(reports: Reports, logs: Path) -> None:
    """Says on stderr which rank failed, and what it wrote last; also that this may be lost, on a full disk."""
    if refusal := rank_logs.refusal(logs):
        lost = "what the ranks wrote last is missing from their logs; make room, then run the same command again"
        print(f"{logs}: {refusal}: {lost}", file=sys.stderr)
    rank = _to_blame(reports.codes, logs)
    if rank is None:
        print(f"the launcher ended before its ranks; their logs: {logs}", file=sys.stderr)
        for line in reports.last_lines:
            print(f"  {line}", file=sys.stderr)
        return
    code = reports.codes.get(rank)
    if code == _REFUSED:
        return  # the rank has said why, in one line
    log = rank_logs.log_of(logs, rank)
    print(f"rank {rank} {_manner(code)}; its log: {log}", file=sys.stderr)
    if rank:  # what rank 0 wrote has been shown
        for line in rank_logs.last_lines(log, _LAST_LINES):
            print(f"  {line}", file=sys.stderr)


def _to_blame(codes: dict[int, int], logs: Path) -> int | None:
    """The first rank to end badly, if it was killed; else the one that failed first, which may take longer to end."""
    first = next((rank for rank, code in codes.items() if code), None)
    if first is not None and codes[first] < 0:
        return first
    failed = rank_logs.failed_first(logs)
    return first if failed is None else failed


def _manner(code: int | None) -> str:
    if code is None:
        return "failed"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
