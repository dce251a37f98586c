"""The protocol between a head and its agents: JSON messages, one a line, through the stdin and stdout of ssh or srun.

Both sides send heartbeats, so that each notices when the other is gone.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from data_pipeline.foundation.command import STOPPED

HEARTBEAT_SECONDS = 2.0
TIMEOUT_SECONDS = 30.0  # after which the other side counts as lost
_QUIET = 3 * HEARTBEAT_SECONDS
_MARK = b"message: "  # before a message: a login shell or a container may print lines of its own
_LINES_SAID = 3


@dataclass(frozen=True)
class Machine:
    """What an agent reports about its node: the address in the network of the nodes, the number of GPUs, a free
    port."""

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
        ranks: the ranks of the node; none for a program.
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
        "failed",  # the rank has met the error in `lines`, and may take a while to end
        "hung",  # it has made no progress for too long, because of itself or of a rank that it waits for
        "faulty",  # the arithmetic of the rank, which may be on another node, was found wrong
        "ended",
        "left",  # it has exited with code 0 before the end of its work
        "program ended",
        "signal",  # a stop signal was sent to the agent
        "refused",  # the node can't start its ranks
    ]
    number: int = 0
    code: int = 0
    lines: Sequence[str] = ()

    @property
    def fails(self) -> bool:
        """True if the event is a sign that its rank fails."""
        ended_with_error = self.kind == "ended" and self.code not in (0, STOPPED)
        return ended_with_error or self.kind in ("failed", "hung", "left")


class Connection:
    """One end of a connection. No call blocks. All times are of this machine's own clock.

    `read` returns what has arrived, and raises EOFError or OSError once nothing more can. `write` returns how many
    bytes it took. `said` has the last lines that arrived and are no messages.
    """

    def __init__(self, read: Callable[[], bytes], write: Callable[[bytes], int]):
        self._read, self._write = read, write
        self._received, self._unsent = b"", b""
        self._last_received = self._last_sent = time.monotonic()
        self.closed = False
        self.said: deque[str] = deque(maxlen=_LINES_SAID)

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
            except ValueError:  # mixed with what ssh or srun print as they end
                printed = line
            if words := printed.decode(errors="replace").strip():
                self.said.append(words)
        return messages

    @property
    def silent(self) -> float:
        """For how many seconds the other side has sent nothing."""
        return time.monotonic() - self._last_received

    @property
    def quiet(self) -> bool:
        """Whether the other side hasn't answered for a while, so that it may be lost."""
        return self.silent > _QUIET

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._write(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
