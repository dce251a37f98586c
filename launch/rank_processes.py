"""The ranks of this machine under a launcher. DeepSpeed's writes neither a rank's log nor its exit code."""

import contextlib
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from data_pipeline.foundation.processes import ProcessGroup
from launch import rank_wrapper
from launch.protocol import Event
from pretrain.run import heartbeat, node_memory, watchdog
from pretrain.run.heartbeat import Heartbeat
from pretrain.run.rank_logs import SUPERVISED, last_lines, rank_log

_LAST_LINES, _LONGEST = 10, 2**16  # bytes of them


def wrapped(command: list[str]) -> list[str]:
    """`command` wrapped so that its output goes to the rank's log and the supervisor learns of its end."""
    return [sys.executable, "-I", "-S", rank_wrapper.__file__, SUPERVISED, heartbeat.DIRECTORY, *command]


class RankProcesses:
    """Runs `command`, a launcher of `ranks` ranks or a program without any, and reports their events.

    The launcher's own lines go to `log` if the disk has room. A program's end has its `number`.
    `run` is the directory of the ranks' run. A rank whose process is stopped for `hang_seconds` hangs; all of them may
    be, so that none would say so.
    """

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        ranks: int = 0,
        log: Path | None = None,
        number: int = 0,
        run: Path | None = None,
        hang_seconds: float | None = None,
    ):
        self.ranks, self._number = ranks, number
        self._hang_seconds = hang_seconds or watchdog.LEAST_SECONDS
        self._silent: dict[int, float] | None = None  # s, of each rank when one was first seen to hang
        self._directory = node_memory.for_ranks(run)
        environment = {**environment, heartbeat.DIRECTORY: str(self._directory)}
        if run and (node := node_memory.path(run)):
            environment[node_memory.DIRECTORY] = str(node)
        self._group = ProcessGroup()
        self._launcher = self._group.start(command, environment, output="pipe", tied=True, signals_blocked=True)
        self._log, self._output = log, b""
        self._above_ranks = {self._launcher.pid}  # the processes that aren't ranks: DeepSpeed's and the wrappers
        self._wrappers: dict[int, int] = {}  # those whose ranks haven't ended, by process
        self._known: set[str] = set()  # files of outcomes
        self._done: set[int] = set()
        self._launcher_ended = self._all_ended = self._trains = False

    def events(self) -> list[Event]:
        """The events since the last call; the launcher's end comes after all its reports."""
        code = self._launcher.code
        signals = [number for process in self._above_ranks if (number := heartbeat.pending(process))]
        news = self._news()
        gone = [wrapper for wrapper in self._wrappers if not _runs(wrapper)]
        news += self._news()  # what a wrapper tells last is there before its end
        killed = [rank for wrapper in gone if (rank := self._wrappers.pop(wrapper, None)) is not None]
        # first, since other ranks end because of it
        events = [*(Event("wrapper killed", rank) for rank in killed), *news]
        self._take_output()
        heartbeats = heartbeat.read(self._directory)
        if self._silent is None:
            stopped = (rank for rank, one in heartbeats.items() if one.stopped and one.silent > self._hang_seconds)
            events += (Event("rank hung", rank) for rank in stopped)
            if any(event.kind == "rank hung" for event in events):
                # DeepSpeed's launcher will signal the others soon, which may wake the one that hangs
                self._silent = {rank: one.silent for rank, one in heartbeats.items()}
        events += (Event("signal", number) for number in signals)
        training = sum(one.first_step is not None for one in heartbeats.values())
        if not self._trains and 0 < self.ranks == training:
            self._trains = True
            events.append(Event("training"))
        if code is not None and not self._launcher_ended:
            self._launcher_ended = True
            words = [line for line in self._output.decode(errors="replace").splitlines() if line]
            events.append(Event("launcher ended", self._number, code, tuple(words[-_LAST_LINES:])))
        if self._launcher_ended and not self._all_ended and not self._launcher.session_alive:
            self._all_ended = True
            events.append(Event("all ended"))
        return events

    def _news(self) -> list[Event]:
        """What ranks and wrappers have told since the last call."""
        return [event for told in heartbeat.messages(self._directory, self._known) if (event := self._event(told))]

    def _event(self, told: heartbeat.Message) -> Event | None:
        rank, kind, text = told
        if kind == "done":
            self._done.add(rank)
        elif kind == rank_wrapper.STARTED:
            parent, wrapper = map(int, text.split())
            self._above_ranks |= {parent, wrapper}
            self._wrappers[wrapper] = rank
        elif kind == rank_wrapper.ENDED:
            wrapper, code = map(int, text.split())
            self._above_ranks.discard(wrapper)
            self._wrappers.pop(wrapper, None)
            # read here, since other hosts may see the log's end late
            words = last_lines(rank_log(self._log.parent, rank)) if code and self._log else []
            return Event("rank ended" if code or rank in self._done else "rank left", rank, code, tuple(words))
        elif kind == "faulty":
            return Event("rank faulty", int(text))
        elif kind == "hung":
            return Event("rank hung", rank)
        else:
            return Event("rank failed", rank, lines=(text,))
        return None

    def _take_output(self) -> None:
        """What the launcher has printed since the last call goes to the log if the disk has room."""
        if printed := self._launcher.read():
            self._output = (self._output + printed)[-_LONGEST:]
            if self._log:
                with contextlib.suppress(OSError), self._log.open("ab") as log:
                    log.write(printed)

    def end(self) -> dict[int, Heartbeat]:
        """Ends all processes; returns the last heartbeats of ranks."""
        last, silent = {**self._without_heartbeat(), **heartbeat.read(self._directory)}, self._silent or {}
        self._group.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        return {rank: replace(one, silent=max(one.silent, silent.get(rank, 0.0))) for rank, one in last.items()}

    def _without_heartbeat(self) -> dict[int, Heartbeat]:
        """The ranks that run: what is shown for those that had no heartbeat yet, silent since they were started."""
        silent = time.monotonic() - self._launcher.started
        return {
            rank: Heartbeat(0, 0, silent, silent, None, _below_is_stopped(wrapper))
            for wrapper, rank in self._wrappers.items()
        }


def _runs(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    return False


def _below_is_stopped(process: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(child.status() == psutil.STATUS_STOPPED for child in psutil.Process(process).children())
    return False
