"""The protocol between a head and its agents: JSON messages over TCP, one per line.

Both sides send heartbeats, so that each notices when the other is gone.
"""

import hmac
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from data_pipeline.foundation.command import STOPPED
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.json_file import parse_json

HEARTBEAT_SECONDS = 2.0
TIMEOUT_SECONDS = 30.0  # after which the other side counts as lost
_QUIET = 3 * HEARTBEAT_SECONDS
_LONGEST = 2**24  # bytes of a message
_LONGEST_HANDSHAKE = 4096


@dataclass(frozen=True)
class Handshake:
    """An agent's first message: its token and number, and the GPUs that it may use and a free port of its node."""

    token: str
    index: int
    host: str
    gpus: int
    port: int


def handshake(connected: socket.socket, token: str) -> Handshake | None:
    """The first message on a connection, which doesn't block; None if it hasn't all arrived.

    Whatever else has arrived stays unread. Raises FailedError if the other side is no agent with this `token`.
    """
    try:
        received = connected.recv(_LONGEST_HANDSHAKE, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError as error:
        raise FailedError(f"the connection broke ({error.strerror})") from None
    line, end, _ = received.partition(b"\n")
    if not end and 0 < len(received) < _LONGEST_HANDSHAKE:
        return None
    shown = parse_json(line, Handshake, "handshake")
    if not hmac.compare_digest(shown.token.encode(), token.encode()):
        raise FailedError("no agent of this head")
    connected.recv(len(line) + 1)
    return shown


@dataclass(frozen=True)
class Start:
    """Asks an agent to start `command`, whose environment is changed by `environment`: a program, or ranks.

    Events of a program have its `number`. `ranks`: how many of the node's `local_ranks` there are, whose output goes to
    the directory `logs`. `launcher` is the command that starts them, before that of a rank; without it there is one
    rank. `hang_seconds`: the run's `faults.hang_seconds`.
    """

    command: list[str]
    environment: dict[str, str]
    number: int = 0
    ranks: int = 0
    local_ranks: int = 0
    logs: str = ""
    launcher: Sequence[str] = ()
    hang_seconds: float | None = None


class Event(NamedTuple):
    """An agent's report about the processes that it has started.

    `number` is that of a rank or program, or the signal's. `code` is an exit code, negative for a signal that killed.
    `lines` are the last ones that the rank or program printed, unless `code` is 0, or the reason.
    """

    kind: Literal[
        "training",  # all ranks of the node have taken their first step
        "rank failed",  # the rank has met the error in `lines`, and may take a while to end
        "rank hung",  # it has made no progress for too long, because of itself or of a rank that it waits for
        "rank faulty",  # the arithmetic of the rank, which may be on another node, was found wrong
        "rank ended",
        "rank left",  # it has exited with code 0 before the end of its work
        "wrapper killed",  # the process above the rank was killed, so that nobody sees how the rank ends
        "signal",  # a stop signal was sent to a process above the ranks
        "launcher ended",  # the node's launcher, or a program
        "all ended",  # no process of the node's ranks is left
        "refused",  # the node can't start its ranks
    ]
    number: int = 0
    code: int = 0
    lines: tuple[str, ...] = ()

    @property
    def fails(self) -> bool:
        """Whether it is a sign that its rank fails."""
        ended_with_error = self.kind == "rank ended" and self.code not in (0, STOPPED)
        return ended_with_error or self.kind in ("rank failed", "rank hung", "rank left", "wrapper killed")


class Connection:
    """One end of a connection. No call blocks. All times are of this machine's own clock."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._received, self._unsent = b"", b""
        self._last_received = self._last_sent = time.monotonic()
        self.closed: str | None = None  # why, once nothing more can be sent or received

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """The messages since the last call. Also sends this side's heartbeat."""
        if time.monotonic() - self._last_sent > HEARTBEAT_SECONDS:
            self._last_sent = time.monotonic()
            self._unsent = self._unsent or b"\n"
        self._flush()
        while self.closed is None:
            try:
                received = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:
                self.closed = f"its connection broke ({error.strerror})"
                break
            if not received or len(self._received) > _LONGEST:
                self.closed = "its connection was closed"
            self._last_received = time.monotonic()
            self._received += received
        *lines, self._received = self._received.split(b"\n")
        try:
            return [json.loads(line) for line in lines if line]
        except ValueError:
            self.closed = "it sent no JSON"
            return []

    @property
    def lost(self) -> str | None:
        """Why the other side counts as lost; None while it answers. Call `receive` first, which updates this."""
        if self.closed is None and time.monotonic() - self._last_received > TIMEOUT_SECONDS:
            return f"no word from it for {TIMEOUT_SECONDS:.0f} s"
        return self.closed

    @property
    def quiet(self) -> bool:
        """Whether the other side hasn't answered for a while, so that it may be lost."""
        return time.monotonic() - self._last_received > _QUIET

    @property
    def address(self) -> str:
        """The other side's."""
        return str(self._socket.getpeername()[0])

    def close(self) -> None:
        self.closed = self.closed or "it has ended"
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent and self.closed is None:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.closed = f"its connection broke ({error.strerror})"
