"""The head of a run: starts an attempt, shows rank 0's log, handles requests to stop, reports how the attempt ended.

An attempt has one head, for the ranks of all nodes.
"""

import contextlib
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.base.command import STOPPED
from data_pipeline.base.errors import FailedError
from data_pipeline.base.processes import announce, until
from launch.attempt import NO_RANK_FAILED, REFUSED, Attempt, error_of, first_failed, how_it_failed, last_words
from launch.nodes import Agent, wait_for_ends
from pretrain.run import rank_logs, status

_POLL_SECONDS = 0.1
_SECONDS_TO_LEAVE = 60.0  # for the other ranks, once one has exited with code 0
_STDOUT, _STDERR = 1, 2
_CHUNK = 65536  # bytes
_DELAY_SECONDS = 1.0  # of the log output, so that the cause of a failure is shown before its consequences
_LOOKS_BETWEEN_PROBES = 5  # of the disk
_SECONDS_FOR_THE_REST = 5.0  # to show the rest of the log


def watch(
    start: Callable[[Path], Sequence[Agent]],
    nodes: Sequence[str],
    run: Path,
    requests: "StopRequests",
    dead_rank_seconds: float,
    another_follows: bool = False,
) -> Attempt:
    """Makes an attempt: starts the ranks with `start`, which gets the directory of the logs, and waits until they end.

    `nodes` has the name of each rank's node. The first signal becomes a request to stop, which ranks obey after their
    current step; the second signal kills them. If a rank dies or fails, the others have `dead_rank_seconds` to end by
    themselves; if `another_follows`, only until the cause is known, unless a rank has refused the run file. If a node
    is lost, all ranks are killed. All processes of the attempt have ended when this returns. Raises FailedError if a
    node can't start its ranks.
    """
    attempt = Attempt(rank_logs.new_directory(run), nodes)
    with Follower(rank_logs.rank_log(attempt.logs, 0)) as follower:
        agents = start(attempt.logs)
        deadline = float("inf")
        try:
            while len(requests.signals) < 2:
                for agent in agents:
                    attempt.reported += agent.events()
                if attempt.broken:
                    attempt.ended = attempt.ended or time.time()
                    follower.hold()
                over = {*attempt.codes, *attempt.gone}
                names = {name for rank, name in enumerate(nodes) if rank not in over}
                at_work = [agent for agent in agents if agent.name in names]
                if not at_work or attempt.events("refused") or _lost(attempt, at_work):
                    break
                if over or attempt.broken:
                    patience = dead_rank_seconds if attempt.broken else _SECONDS_TO_LEAVE
                    deadline = min(deadline, time.monotonic() + patience)
                for number in attempt.events("signal"):
                    requests.ask(number, "sent to an agent; saving and stopping")
                # ranks may fail because a node is lost: wait until it counts as lost, to name the node
                quiet = any(agent.connection.quiet for agent in at_work)
                hurries = another_follows and not attempt.refused_its_configuration  # after which no attempt follows
                if not quiet and (time.monotonic() > deadline or (hurries and attempt.cause_is_known)):
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            attempt.read = time.time()
            attempt.ended = attempt.ended or attempt.read
            for agent in agents:
                agent.end()
            wait_for_ends(agents)
            for agent in agents:
                attempt.heartbeats |= agent.heartbeats
    attempt.shown = follower.shown
    if refused := attempt.events("refused").get(0):
        raise FailedError("\n".join(refused.lines))
    return attempt


def _lost(attempt: Attempt, at_work: Sequence[Agent]) -> bool:
    """Looks for agents that no longer answer; prints the nodes, and returns whether there are any."""
    attempt.lost = {agent.name: reason for agent in at_work if (reason := agent.lost)}
    for name, reason in attempt.lost.items():
        print(f"node {name} is lost: {reason}; ending the other ranks", file=sys.stderr, flush=True)
    return bool(attempt.lost)


class Follower(threading.Thread):
    """Copies new content of `log` to stdout within the block. It is a thread, so that a blocked terminal blocks nothing
    else.

    The copy is a second late, so that `hold` comes in time. Warns if the disk refuses log lines.

    Attributes:
        shown: number of bytes that were copied.
    """

    def __init__(self, log: Path):
        super().__init__(name="follower", daemon=True)
        self.shown = 0
        self._log = log
        self._refusal: str | None = None  # the disk's latest error
        self._done, self._held = threading.Event(), threading.Event()

    def hold(self) -> None:
        """Stops the copy; `show` copies the rest once the cause of the failure has been reported."""
        self._held.set()

    def run(self) -> None:
        size = looks = 0
        while not self._done.wait(_DELAY_SECONDS):
            if not self._held.is_set():
                self.shown = show(self._log, self.shown, size)
            with contextlib.suppress(OSError):  # the log doesn't exist yet, or a network disk doesn't answer
                size = self._log.stat().st_size
            looks += 1
            if looks % _LOOKS_BETWEEN_PROBES == 0:
                self._probe()
        if not self._held.is_set():
            self.shown = show(self._log, self.shown)

    def _probe(self) -> None:
        before, self._refusal = self._refusal, rank_logs.refusal(self._log.parent)
        if self._refusal and self._refusal != before:
            warning = f"warning: {self._log.parent}: {self._refusal}; the run continues, but its logs are incomplete\n"
            with contextlib.suppress(OSError):
                os.write(_STDERR, warning.encode())

    def __enter__(self) -> "Follower":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join(_SECONDS_FOR_THE_REST)


def show(log: Path, start: int, end: int | None = None) -> int:
    """Copies `log` from byte `start` to `end` (None: its end) to stdout; returns where it stopped.

    On a terminal, long lines are wrapped, and an incomplete line waits for the next call.
    """
    width = shutil.get_terminal_size().columns if os.isatty(_STDOUT) else 0
    with contextlib.suppress(OSError), log.open("rb") as file:  # the log doesn't exist yet, or stdout is closed
        while new := os.pread(file.fileno(), _CHUNK if end is None else min(_CHUNK, end - start), start):
            if not width:
                start += os.write(_STDOUT, new)
                continue
            whole = new[: new.rfind(b"\n") + 1] or (new if end is None or len(new) == _CHUNK else b"")
            if not whole:
                break
            shown = "".join(wrapped(line, width) for line in whole.decode(errors="replace").splitlines(keepends=True))
            _write_all(shown.encode())
            start += len(whole)
    return start


def wrapped(line: str, width: int) -> str:
    """`line`, wrapped at spaces to at most `width` characters a line; its line end stays as it is."""
    text = line.rstrip("\r\n")
    if len(text) <= width:
        return line
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    parts = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(parts) + line[len(text) :]


def _write_all(content: bytes) -> None:
    while content:
        content = content[os.write(_STDOUT, content) :]


def result(attempt: Attempt, run: Path, requests: "StopRequests") -> int:
    """0 if the run has finished, 75 if it has saved and stopped, 2 if it was refused, 1 if it has failed.

    Reports a failure on stderr, and then shows the rest of rank 0's log, which is often a consequence.
    """
    code = _result(attempt, run, requests)
    show(rank_logs.rank_log(attempt.logs, 0), attempt.shown)
    return code


def _result(attempt: Attempt, run: Path, requests: "StopRequests") -> int:
    now, codes = status.read(run), attempt.codes
    state = now.state if now.attempt == rank_logs.attempt(attempt.logs) else None
    if state == "finished":
        return 0
    if state == "stopped":
        return STOPPED
    if len(codes) == len(attempt.nodes) and set(codes.values()) in ({0}, {STOPPED}):
        return codes[0]  # on a network file system, the status may be an older one
    if len(requests.signals) < 2 and not attempt.lost:
        _report_failure(attempt)
    return REFUSED if attempt.refused_its_configuration else 1


class StopRequests:
    """The requests to stop a run, from now on: a file RUN/stop that an earlier start has left is removed.

    The first signal to this process or to an agent becomes a request, which creates RUN/stop.

    Attributes:
        signals: the signals that this process got.
        stop_signal: the signal that became the request.
    """

    def __init__(self, run: Path):
        self.signals: list[int] = []
        self.stop_signal: int | None = None
        self._run = run
        status.clear_stop(run)

    @property
    def made(self) -> bool:
        """Whether the run is to stop: because of a signal, or because a user has created RUN/stop."""
        return self.stop_signal is not None or status.stop_requested(self._run)

    @property
    def by_scheduler(self) -> bool:
        """Whether the request came as SIGUSR1, by which schedulers warn that a job's time is nearly over."""
        return self.stop_signal == signal.SIGUSR1

    def interrupted(self, stop_at_step: int | None) -> bool:
        """Whether the scheduler or `run.max_hours`, not the user, has stopped a run that has saved."""
        if self.stop_signal is not None:
            return self.by_scheduler
        now = status.read(self._run)
        return not now.stop_file and (stop_at_step is None or (now.step or 0) < stop_at_step)

    def wait(self, seconds: float, poll: Callable[[], object] = lambda: None) -> None:
        """Waits, and calls `poll` again and again; a request to stop ends the wait."""

        def over() -> bool:
            poll()
            return self.made

        until(over, seconds)

    def on_signal(self, number: int) -> None:
        """Handles a signal to this process, for `caught`."""
        if self.signals and number == signal.SIGHUP:
            return  # both the shell and the kernel send it when a terminal closes
        self.signals.append(number)
        self.ask(number, "saving and stopping; a second signal ends the run at once, unsaved")

    def ask(self, number: int, message: str) -> None:
        if self.stop_signal is not None:
            return
        self.stop_signal = number
        announce(number, message)
        try:
            status.request_stop(self._run)
        except OSError as error:  # the run must not end unsaved because of a full disk
            failed = f"{self._run}/{status.STOP} can't be created: {error.strerror}"
            announce(number, f"{failed}; signal a rank instead")


def _report_failure(attempt: Attempt) -> None:
    """Reports on stderr which rank failed, its last output, and whether a full disk has lost output."""
    logs = attempt.logs
    if refusal := rank_logs.refusal(logs):
        lost = "the ranks' last output is missing from their logs; free some space, then run the same command again"
        print(f"{logs}: {refusal}: {lost}", file=sys.stderr)
    rank = first_failed(attempt)
    if rank is None:
        print(f"{NO_RANK_FAILED}; the ranks' logs: {logs}", file=sys.stderr)
        return
    if attempt.refused_its_configuration and attempt.codes.get(0) == attempt.codes.get(rank) == REFUSED:
        return  # rank 0 has printed the reason
    error = "" if attempt.was_killed(rank) or attempt.events("hung") else error_of(attempt, rank)
    because = f": {error}" if error else ""
    print(f"{how_it_failed(attempt, rank)}{because}; its log: {rank_logs.rank_log(logs, rank)}", file=sys.stderr)
    if rank:  # rank 0's output has been shown already
        for line in last_words(attempt, rank):
            print(f"  {line}", file=sys.stderr)
