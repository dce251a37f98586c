"""JSON messages over TCP, one a line, between a head and its agents. Each notices when the other falls silent."""

import json
import socket
import time
from typing import Any

SECONDS_BETWEEN_BEATS = 2.0
SECONDS_OF_SILENCE = 30.0  # after which the other side counts as lost
_QUIET = 3 * SECONDS_BETWEEN_BEATS
_LONGEST = 2**24  # bytes of a message


class Wire:
    """One end of a connection. No call blocks. All times are of this machine's own clock."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._received, self._unsent = b"", b""
        self._heard = self._beaten = time.monotonic()
        self.closed: str | None = None  # why, once nothing more can be sent or received

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """The messages since the last call. Also sends what shows the other side that this one lives."""
        if time.monotonic() - self._beaten > SECONDS_BETWEEN_BEATS:
            self._beaten = time.monotonic()
            if not self._unsent:
                self._unsent = b"\n"
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
            self._heard = time.monotonic()
            self._received += received
        *lines, self._received = self._received.split(b"\n")
        try:
            return [json.loads(line) for line in lines if line]
        except ValueError:
            self.closed = "it sent no JSON"
            return []

    @property
    def lost(self) -> str | None:
        """Why the other side will answer no more; call `receive` before, which may have waited for long."""
        if self.closed is None and time.monotonic() - self._heard > SECONDS_OF_SILENCE:
            return f"no word from it for {SECONDS_OF_SILENCE:.0f} s"
        return self.closed

    @property
    def quiet(self) -> bool:
        return time.monotonic() - self._heard > _QUIET

    @property
    def address(self) -> str:
        """The other side's."""
        return str(self._socket.getpeername()[0])

    @property
    def own_address(self) -> str:
        return str(self._socket.getsockname()[0])

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
