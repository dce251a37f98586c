"""The protocol between a head and its agents: a JSON message a line, through the stdin and stdout of ssh or srun.

Both sides send heartbeats, so that each notices if the other side is gone.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from data_pipeline.base.command import STOPPED

HEARTBEAT_SECONDS = 2.0
TIMEOUT_SECONDS = 30.0  # without a message, after which the other side counts as lost
MOST_RANKS = 1024  # of a machine, which has fewer cores and GPUs
_QUIET = 3 * HEARTBEAT_SECONDS
_MARK = b"message: "  # begins a message: a login shell or a container may print other lines
_LINES_SAID = 3


@dataclass(frozen=True)
class Machine:
    """A node: its address in the network of the nodes, its number of GPUs, and a free port."""

    address: str
    gpus: int
    port: int


@dataclass(frozen=True)
class Start:
    """Asks an agent to start a program, or ranks.

    Attributes:
        command: the command of the program, or of a rank.
        environment: changes of the environment of `command`.
        number: the number that events of a program have.
        ranks: the ranks of the node; empty for a program.
        logs: the directory for the output of the ranks.
        hang_seconds: the run's `faults.hang_timeout_seconds`.
    """

    command: list[str]
    environment: dict[str, str]
    number: int = 0
    ranks: Sequence[int] = ()
    logs: str = ""
    hang_seconds: float | None = None


class Event(NamedTuple):
    """An agent's report about the processes that it has started.

    Attributes:
        number: the number of the rank or program, or of the signal.
        code: the exit code; negative for a signal that killed the process.
        lines: the last lines that the rank or program printed if it failed; for `refused`, the reason.
    """

    kind: Literal[
        "failed",  # the rank has the error in `lines`, and may take a while to end
        "hung",  # the rank has made no progress for too long; it may wait for another rank
        "faulty",  # the arithmetic of the rank, which may be on another node, is wrong
        "ended",
        "left",  # the rank has exited with code 0 before its work was done
        "program ended",
        "signal",  # the agent got a stop signal
        "refused",  # the node can't start its ranks
    ]
    number: int = 0
    code: int = 0
    lines: Sequence[str] = ()

    @property
    def fails(self) -> bool:
        """Whether the event means that its rank fails."""
        ended_with_error = self.kind == "ended" and self.code not in (0, STOPPED)
        return ended_with_error or self.kind in ("failed", "hung", "left")


class Connection:
    """One end of a connection. No call blocks, and no clocks of two machines are compared.

    `read` returns what has arrived; it raises EOFError or OSError once the connection is closed. `write` returns how
    many bytes it has sent.

    Attributes:
        other_lines: the last lines that arrived and aren't messages.
    """

    def __init__(self, read: Callable[[], bytes], write: Callable[[bytes], int]):
        self._read, self._write = read, write
        self._received, self._unsent = b"", b""
        self._last_received = self._last_sent = time.monotonic()
        self.closed = False
        self.other_lines: deque[str] = deque(maxlen=_LINES_SAID)

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += _MARK + json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """The messages since the last call. Also sends this side's heartbeat."""
        if time.monotonic() - self._last_sent > HEARTBEAT_SECONDS:
            self._last_sent = time.monotonic()
            self._unsent = self._unsent or b"\n"
        self._flush()
        try:
            if received := self._read():
                self._last_received = time.monotonic()
                self._received += received
        except (EOFError, OSError):
            self.closed = True
        *lines, self._received = self._received.split(b"\n")
        messages = []
        for line in lines:
            printed, mark, message = line.partition(_MARK)
            try:
                messages += [json.loads(message)] if mark else []
            except ValueError:  # mixed with a line that ssh or srun prints at its end
                printed = line
            if words := printed.decode(errors="replace").strip():
                self.other_lines.append(words)
        return messages

    @property
    def silent(self) -> float:
        """Seconds since the last message of the other side."""
        return time.monotonic() - self._last_received

    @property
    def quiet(self) -> bool:
        """Whether the other side may be lost: it has been silent for a few heartbeats."""
        return self.silent > _QUIET

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._write(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
