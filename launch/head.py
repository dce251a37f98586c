"""The head of a run: makes the directory of an attempt's logs, shows rank 0's, takes requests to stop, and says how the
attempt ended.

An attempt has one head, however many nodes its ranks are on. DeepSpeed's launcher forwards no signals and
can leave ranks behind.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import counted
from data_pipeline.foundation.processes import announce, caught, until
from launch.agent_pool import Agent
from launch.attempt import REFUSED, Attempt, error_of, first_failed, how_it_failed, last_words
from pretrain.checkpoint.directory import all_steps
from pretrain.run import node_memory, rank_logs, status

_POLL_SECONDS = 0.1
_SECONDS_TO_LEAVE = 60.0  # for the other ranks, once one has exited with code 0
_SECONDS_FOR_THE_CAUSE = 0.3  # in which a rank that has died is told from those that failed because of it
_STDOUT, _STDERR = 1, 2
_SECONDS_BETWEEN_LOOKS = 0.2  # at the log of rank 0
_LOOKS_BETWEEN_PROBES = 25  # of the disk: 5 s
_DELAY_SECONDS = 1.0  # in which a failure becomes known, whose cause is to be shown before what follows from it
_SECONDS_FOR_THE_REST = 5.0  # of the log


def watch(
    start: Callable[[Path], Sequence[Agent]],
    run: Path,
    requests: "StopRequests",
    dead_rank_seconds: float,
    failed: float | None = None,
    another_follows: bool = False,
) -> Attempt:
    """Makes an attempt: starts the ranks with `start`, which gets the directory of the logs, and waits until they end.

    The first signal becomes a request to stop, which the ranks obey after their current step; the second signal kills
    them. When a rank has died or failed, the others have `dead_rank_seconds` to end by themselves, or less if
    `another_follows`: until the cause is known. When a node is lost, the others are killed. No process of the attempt
    outlives this call. `failed`: when the attempt before did, which is compared with when all ranks have taken a step.
    Raises FailedError if a node can't start its ranks.
    """
    attempt = Attempt(status.read(run), rank_logs.new_directory(run))
    status.clear_stop(run)  # left from an earlier attempt
    if requests.stop_signal is not None:  # or just created by a signal
        status.request_stop(run)
    with Follower(rank_logs.rank_log(attempt.logs, 0)) as follower:
        nodes = start(attempt.logs)
        attempt.nodes = [node.name for node in nodes for _ in range(node.ranks)]
        try:
            _until_ended(attempt, nodes, requests, dead_rank_seconds, failed, another_follows, follower)
        finally:
            attempt.read = time.time()
            attempt.ended = attempt.ended or attempt.read
            for node in nodes:
                node.end()
            for node in nodes:
                node.wait()
                attempt.heartbeats |= node.heartbeats
    attempt.shown = follower.shown
    if refused := [line for event in attempt.told if event.kind == "refused" for line in event.lines]:
        raise FailedError("\n".join(refused))
    return attempt


def _until_ended(
    attempt: Attempt,
    nodes: Sequence[Agent],
    requests: "StopRequests",
    dead_rank_seconds: float,
    failed: float | None,
    another_follows: bool,
    follower: "Follower",
) -> None:
    owners = [node for node in nodes for _ in range(node.ranks)]  # nodes have their ranks in order
    deadline = float("inf")
    while len(requests.signals) < 2:
        time.sleep(_POLL_SECONDS)
        news = [(node, event) for node in nodes for event in node.events()]
        attempt.told += (event for _, event in news)
        ended = attempt.codes.keys() | attempt.gone
        at_work = dict.fromkeys(node for rank, node in enumerate(owners) if rank not in ended)
        if attempt.broken:
            attempt.ended = attempt.ended or time.time()
        if attempt.signs or attempt.launcher:
            follower.hold()
        if failed is not None and sum(event.kind == "training" for event in attempt.told) == len(nodes):
            print(f"training again, {time.time() - failed:.1f} s after the failure", file=sys.stderr, flush=True)
            failed = None
        if not at_work:  # the launchers themselves would take seconds to notice
            break
        # a launcher that was killed leaves its ranks behind, which may be saving
        last = ("all ended",) if requests.signals else ("all ended", "launcher ended")
        hopeless = any(event.kind == "refused" or (event.kind in last and node in at_work) for node, event in news)
        if hopeless or _lost(attempt, at_work):
            break
        if ended or attempt.signs:
            patience = dead_rank_seconds if attempt.broken else _SECONDS_TO_LEAVE
            deadline = min(deadline, time.monotonic() + patience)
        elif signals := [event.number for _, event in news if event.kind == "signal"]:
            # only while all ranks live: once one has ended, DeepSpeed's launcher signals the others
            requests.ask(signals[0], "sent to DeepSpeed's launcher; saving and stopping")
        known = attempt.was_killed or (
            attempt.broken and time.time() - attempt.ended > _SECONDS_FOR_THE_CAUSE and attempt.has_said_why
        )
        # ranks fail when they miss those of a lost node, and that node is the one to name
        quiet = any(node.connection.quiet for node in at_work)
        if not quiet and (time.monotonic() > deadline or (another_follows and known)):
            break


def _lost(attempt: Attempt, at_work: Iterable[Agent]) -> bool:
    """Names the nodes that no longer answer although they have ranks."""
    for node in at_work:
        if (reason := node.connection.lost) and node.name not in attempt.lost:
            attempt.lost[node.name] = reason
            attempt.ended = attempt.ended or time.time()
            print(f"node {node.name} is lost: {reason}; ending the other ranks", file=sys.stderr, flush=True)
    return bool(attempt.lost)


class Follower:
    """Copies new content of `log` to stdout within the block, in a thread: a blocked terminal blocks nothing.

    A second late, so that `hold` comes in time. `shown` counts the bytes that were shown. Warns when the disk refuses
    more log lines.
    """

    def __init__(self, log: Path):
        self.shown = 0
        self._log = log
        self._refusal: str | None = None  # the disk's latest error
        self._done, self._held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def hold(self) -> None:
        """Shows nothing more: `show` does, once the cause of the failure has been shown."""
        self._held.set()

    def _follow(self) -> None:
        sizes: deque[tuple[float, int]] = deque()  # of the log, and when they were seen
        looks = 0
        while not self._done.wait(_SECONDS_BETWEEN_LOOKS):
            sizes.append((time.monotonic(), self._log.stat().st_size if self._log.exists() else 0))
            while sizes and sizes[0][0] <= time.monotonic() - _DELAY_SECONDS and not self._held.is_set():
                self.shown = show(self._log, self.shown, sizes.popleft()[1])
            looks += 1
            if looks % _LOOKS_BETWEEN_PROBES == 0:
                self._probe()
        if not self._held.is_set():
            self.shown = show(self._log, self.shown)

    def _probe(self) -> None:
        before, self._refusal = self._refusal, rank_logs.refusal(self._log.parent)
        if self._refusal and self._refusal != before:
            warning = f"warning: {self._log.parent}: {self._refusal}; the run goes on, but its logs are incomplete\n"
            with contextlib.suppress(OSError):
                os.write(_STDERR, warning.encode())

    def __enter__(self) -> "Follower":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(_SECONDS_FOR_THE_REST)


def show(log: Path, start: int, end: int | None = None) -> int:
    """Copies `log` from byte `start` to `end` (None: its end) to stdout; returns where it stopped."""
    with contextlib.suppress(OSError), log.open("rb") as file:  # not created yet, or stdout is closed
        while new := os.pread(file.fileno(), 65536 if end is None else min(65536, end - start), start):
            start += os.write(_STDOUT, new)
    return start


def result(attempt: Attempt, run: Path, requests: "StopRequests") -> int:
    """0 if the run finished, 75 if it stopped after saving, 2 if it was refused and 1 if it failed.

    Reports a failure on stderr, and shows what rank 0 wrote since, which is often a consequence.
    """
    code = _result(attempt, run, requests)
    show(rank_logs.rank_log(attempt.logs, 0), attempt.shown)
    return code


def _result(attempt: Attempt, run: Path, requests: "StopRequests") -> int:
    now = status.read(run)
    # ranks save and stop when the launcher signals them because a wrapper was killed: nobody has asked for that
    gone = attempt.gone.get(first) if (first := first_failed(attempt)) is not None else None
    killed = gone is not None and gone.kind == "wrapper killed"
    trusted = ("finished",) if killed else ("stopped", "finished")
    if now.attempt == rank_logs.attempt(attempt.logs) and now.state in trusted:
        return STOPPED if now.state == "stopped" else 0
    codes = attempt.codes
    agreed = set(codes.values()) if len(codes) == len(attempt.nodes) else set()
    if agreed in ({0}, {STOPPED}):  # a network file system may show other hosts an older status
        return agreed.pop()
    known = bool(codes) or (attempt.launcher is not None and attempt.launcher.code == 0)
    if known and not any(codes.values()) and now == attempt.before and now.state == "finished":
        return 0  # the run was already finished
    if len(requests.signals) > 1:
        print(lost_steps(attempt, run), file=sys.stderr, flush=True)
    elif not attempt.lost:
        _report_failure(attempt)
    return REFUSED if attempt.refused_its_configuration else 1


class StopRequests:
    """Turns the first signal to this process or a launcher into a request to stop.

    `signals` are this process's. `stop_signal` is the signal that the request came from.
    """

    def __init__(self, run: Path):
        self.signals: list[int] = []
        self.stop_signal: int | None = None
        self._run = run

    @property
    def by_scheduler(self) -> bool:
        """Whether the request came as SIGUSR1, with which schedulers warn that a job's time is nearly over."""
        return self.stop_signal == signal.SIGUSR1

    def wait(self, seconds: float) -> None:
        """Waits, at most until the first signal."""
        until(lambda: self.signals, seconds)

    def on_signal(self, number: int) -> None:
        if self.signals and number == signal.SIGHUP:
            return  # closing a terminal sends it more than once: the shell does, and the kernel
        self.signals.append(number)
        self.ask(
            number, "saving and stopping; a second signal ends the run at once, and steps since a checkpoint are lost"
        )

    def ask(self, number: int, message: str) -> None:
        if self.stop_signal is not None:
            return
        self.stop_signal = number
        announce(number, message)
        try:
            status.request_stop(self._run)
        except OSError as error:  # the run must not end unsaved because of it
            failed = f"{self._run}/{status.STOP} can't be created: {error.strerror}"
            announce(number, f"{failed}; signal a rank instead")


@contextlib.contextmanager
def stop_requests(run: Path) -> Iterator[StopRequests]:
    """Within the block, signals become requests to stop the run."""
    requests = StopRequests(run)
    with caught(requests.on_signal):
        yield requests


def lost_steps(attempt: Attempt, run: Path) -> str:
    """What a second signal has cost: the steps since the last checkpoint, with the one that the ranks were taking."""
    node = node_memory.path(run)
    saved = max([*all_steps(run), *(all_steps(node) if node else [])], default=0)
    last = max((heartbeat.step for heartbeat in attempt.heartbeats.values()), default=0)
    steps = f"{counted(last - saved, 'step')}" if last > saved else "steps"
    if saved:
        return f"ended at once: the {steps} since the checkpoint of step {saved:,} are lost"
    return f"ended at once: all {steps} are lost, since there is no checkpoint"


def _report_failure(attempt: Attempt) -> None:
    """Reports on stderr which rank failed and its last output; also that a full disk may have lost output."""
    logs = attempt.logs
    if refusal := rank_logs.refusal(logs):
        lost = "the ranks' last output is missing from their logs; free some space, then run the same command again"
        print(f"{logs}: {refusal}: {lost}", file=sys.stderr)
    rank = first_failed(attempt)
    if rank is None:
        print(f"the launcher ended before its ranks; their logs: {logs}", file=sys.stderr)
        for line in attempt.launcher.lines if attempt.launcher else ():
            print(f"  {line}", file=sys.stderr)
        return
    if attempt.codes.get(rank) == REFUSED and attempt.refused_its_configuration:
        return  # the rank has printed the reason
    words = last_words(attempt, rank)
    own = rank in attempt.failed or attempt.codes.get(rank, 1) > 0
    error = error_of(attempt, rank) if own and not attempt.hung and rank not in attempt.gone else ""
    because = f": {error}" if error else ""
    print(f"{how_it_failed(attempt, rank)}{because}; its log: {rank_logs.rank_log(logs, rank)}", file=sys.stderr)
    if rank:  # rank 0's output has been shown already
        for line in words:
            print(f"  {line}", file=sys.stderr)
