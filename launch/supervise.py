"""Supervises a launcher and its ranks. DeepSpeed's launcher forwards no signals and can leave ranks behind."""

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
_SECONDS_TO_LEAVE = 60.0  # for the other ranks, once one has exited with code 0
_LAST_LINES = 40  # a stack dump ends with the main thread, its innermost call on top
_REFUSED = 2
_LAUNCHERS_LOG = "launcher.log"


def supervise(command: list[str], environment: dict[str, str], run: Path, ranks: int, dead_rank_seconds: float) -> int:
    """Runs `command` until its `ranks` have ended.

    Returns 0 if the run finished, 75 if it stopped after saving, 2 if it was refused and 1 if it failed. The first
    signal becomes a request to stop, which the ranks obey after their current step; the second signal kills them. When
    a rank has died, the others have `dead_rank_seconds` to end by themselves. No process of the run outlives this one.
    """
    before = status.read(run)
    logs = rank_logs.new_directory(run)
    status.clear_stop(run)  # left from an earlier attempt
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
            if len(reports.codes) == ranks:  # the launcher itself would take seconds to notice
                break
            if reports.codes:
                patience = dead_rank_seconds if any(reports.codes.values()) else _SECONDS_TO_LEAVE
                deadline = min(deadline, time.monotonic() + patience)
            elif held_back:  # only while all ranks live: once one has ended, DeepSpeed's launcher signals the others
                requests.ask(held_back[0], "sent to DeepSpeed's launcher; saving and stopping")
        reports.take(session.output())
        launcher_code = session.launcher.poll()
    now = status.read(run)
    if now.attempt == rank_logs.attempt(logs) and now.state in ("stopped", "finished"):
        return STOPPED if now.state == "stopped" else 0
    codes = reports.codes
    known = launcher_code == 0 or bool(codes)
    if known and not any(codes.values()) and now == before and now.state == "finished":
        return 0  # the run was already finished
    if len(requests.signals) < 2:
        _report_failure(reports, logs)
    return _REFUSED if _REFUSED in codes.values() else 1


def _goes_on(session: Session, deadline: float, stopping: bool) -> bool:
    if session.launcher.poll() is not None:  # a launcher that was killed leaves its ranks behind
        return stopping and session.alive
    return time.monotonic() < deadline


class _StopRequests:
    """Turns the first signal to this process or the launcher into a request to stop; `signals` are this process's."""

    def __init__(self, run: Path):
        self.signals: list[int] = []
        self._run, self._asked = run, False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signals and number == signal.SIGHUP:
            return  # closing a terminal sends it more than once: the shell does, and the kernel
        self.signals.append(number)
        self.ask(number, "saving and stopping; a second signal ends the run at once")

    def ask(self, number: int, message: str) -> None:
        if self._asked:
            return
        self._asked = True
        stop_signals.announce(number, message)
        try:
            status.request_stop(self._run)
        except OSError as error:  # the run must not end unsaved because of it
            failed = f"{self._run}/{status.STOP} can't be created: {error.strerror}"
            stop_signals.announce(number, f"{failed}; signal a rank instead")


@contextlib.contextmanager
def _stop_requests(run: Path) -> Iterator[_StopRequests]:
    """Within the block, signals become requests to stop the run."""
    requests = _StopRequests(run)
    previous = {number: signal.signal(number, requests.on_signal) for number in stop_signals.heeded()}
    try:
        yield requests
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _report_failure(reports: Reports, logs: Path) -> None:
    """Reports on stderr which rank failed and its last output; also that a full disk may have lost output."""
    if refusal := rank_logs.refusal(logs):
        lost = "the ranks' last output is missing from their logs; free some space, then run the same command again"
        print(f"{logs}: {refusal}: {lost}", file=sys.stderr)
    rank = _to_blame(reports.codes, logs)
    if rank is None:
        print(f"the launcher ended before its ranks; their logs: {logs}", file=sys.stderr)
        for line in reports.last_lines:
            print(f"  {line}", file=sys.stderr)
        return
    code = reports.codes.get(rank)
    if code == _REFUSED:
        return  # the rank has printed the reason
    log = rank_logs.log_of(logs, rank)
    print(f"rank {rank} {_manner(code)}; its log: {log}", file=sys.stderr)
    if rank:  # rank 0's output has been shown already
        for line in rank_logs.last_lines(log, _LAST_LINES):
            print(f"  {line}", file=sys.stderr)


def _to_blame(codes: dict[int, int], logs: Path) -> int | None:
    """The first rank to end with an error if a signal killed it, else the first to report a failure.

    The latter may end later than others, whose failures follow from its own.
    """
    first = next((rank for rank, code in codes.items() if code), None)
    if first is not None and codes[first] < 0:
        return first
    failed = rank_logs.failed_first(logs)
    return first if failed is None else failed


def _manner(code: int | None) -> str:
    if code is None:
        return "failed"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
