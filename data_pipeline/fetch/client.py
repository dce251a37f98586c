"""Requests to public servers, politely: a name, a pace, the pauses that servers ask for, and bounded retries."""

import contextlib
import email.utils
import http.client
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from data_pipeline.foundation.errors import FailedError

Result = TypeVar("Result")
NETWORK_ERRORS = (OSError, http.client.HTTPException)  # what opening and reading raise: resets, timeouts, half answers

_TIMEOUT = 60.0  # seconds without a byte
_LONGEST_WAIT = 60.0
_LONGEST_RETRY_AFTER = 900.0
_PROGRESS = 1 << 20  # bytes further on that make a try count as new
_LARGEST_LIST = 1 << 28
_BUSY = {429, 503}
_TRANSIENT = {408, 425, 500, 502, 504, *_BUSY}


class TransientError(Exception):
    """What another try may mend. `pause`: whether all requests should wait; `wait`: the seconds the server named."""

    def __init__(self, reason: str, pause: bool = False, wait: float | None = None):
        super().__init__(reason)
        self.pause, self.wait = pause, wait


class PermanentError(Exception):
    """What no further try will mend. `status`: the HTTP status, where that is the reason."""

    def __init__(self, reason: str, status: int | None = None):
        super().__init__(reason)
        self.status = status


class StoppedError(Exception):
    """The client was told to stop."""


class Client:
    """What all connections of one command share. Safe for use from several threads.

    `requests_per_second`: at most so many, over all connections. `tries`: consecutive tries without progress before a
    file is given up; the wait before each doubles from `first_wait` seconds up to a minute. `contact`: how the servers'
    people can reach the user, sent with each request. `note`: takes a line about each retry. Setting `stop` ends every
    wait and download with StoppedError.

    Proxies are taken from the environment (https_proxy, no_proxy).
    """

    def __init__(
        self,
        requests_per_second: float = 2.0,
        tries: int = 12,
        first_wait: float = 1.0,
        contact: str = "",
        note: Callable[[str], None] = lambda line: None,
    ):
        self.tries, self.note, self.stop = tries, note, threading.Event()
        self._interval, self._first_wait = 1 / requests_per_second, first_wait
        self._name = user_agent(contact)
        self._lock, self._next_request = threading.Lock(), 0.0
        self._opener = urllib.request.build_opener()

    @contextlib.contextmanager
    def get(self, url: str, headers: dict[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The answer to one request when its turn has come, its bytes as stored (no decoding).

        Raises TransientError or PermanentError when there is none; reading it may raise NETWORK_ERRORS.
        """
        self._take_turn()
        # Encoded on the way, a .gz would no longer have the published bytes.
        every = {"User-Agent": self._name, "Accept-Encoding": "identity"}
        request = urllib.request.Request(url, headers={**every, **(headers or {})})
        try:
            response = self._opener.open(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise _as_problem(error) from None
        except (ValueError, http.client.InvalidURL) as error:
            raise PermanentError(f"not an address: {error}") from None
        except NETWORK_ERRORS as error:
            raise TransientError(f"no answer: {describe(error)}") from None
        with response:
            if response.status not in (200, 206):
                raise PermanentError(f"HTTP status {response.status}, expected 200 or 206", response.status)
            yield response

    def read(self, url: str) -> tuple[bytes, http.client.HTTPMessage]:
        """A whole small file, such as a list, and its headers; with retries. Raises PermanentError."""

        def attempt() -> tuple[bytes, http.client.HTTPMessage]:
            with self.get(url) as response:
                expected = response.length
                try:
                    content = response.read(_LARGEST_LIST + 1)
                except NETWORK_ERRORS as error:
                    raise TransientError(f"connection lost: {describe(error)}") from None
                if len(content) > _LARGEST_LIST:
                    raise PermanentError(f"expected a list, got more than {_LARGEST_LIST:,} bytes")
                if expected is not None and len(content) != expected:
                    raise TransientError(f"connection lost after {len(content):,} of {expected:,} bytes")
                return content, response.headers

        return self.keep_trying(attempt, url)

    def keep_trying(self, attempt: Callable[[], Result], what: str, position: Callable[[], int] = lambda: 0) -> Result:
        """The result of `attempt`, called again after each TransientError while tries are left.

        Tries are counted anew when `position()` (bytes had) has gone further than ever, by 1 MiB: a large file over a
        weak line arrives in many pieces, and a server that always breaks off at the same place is given up.
        Raises PermanentError.
        """
        failures, furthest = 0, position()
        while True:
            try:
                return attempt()
            except TransientError as problem:
                if position() >= furthest + _PROGRESS:
                    failures, furthest = 0, position()
                failures += 1
                if failures >= self.tries:
                    raise PermanentError(f"{problem}; given up after {failures} tries") from None
                wait = self._wait_before_next(problem, failures)
                self.note(f"{what}: {problem}; again in {wait:.1f} s")
                if problem.pause:
                    self._pause_all(wait)
                elif self.stop.wait(wait):
                    raise StoppedError from None

    def _wait_before_next(self, problem: TransientError, failures: int) -> float:
        if problem.wait is None:
            longest = min(_LONGEST_WAIT, self._first_wait * 2 ** (failures - 1))
            return longest * random.SystemRandom().uniform(0.5, 1)  # so that many clients don't come back together
        if problem.wait > _LONGEST_RETRY_AFTER:
            raise FailedError(f"{problem}; the server asks to come back in {problem.wait:,.0f} s: run again then")
        return problem.wait

    def _pause_all(self, seconds: float) -> None:
        with self._lock:
            self._next_request = max(self._next_request, time.monotonic() + seconds)

    def _take_turn(self) -> None:
        while not self.stop.is_set():
            with self._lock:
                wait = self._next_request - time.monotonic()
                if wait <= 0:
                    self._next_request = time.monotonic() + self._interval
                    return
            self.stop.wait(wait)  # then look again: a pause may have been asked for meanwhile
        raise StoppedError


def user_agent(contact: str = "") -> str:
    """Who asks; operators of public servers (Wikimedia's among them) refuse programs that don't say."""
    try:
        release = version("encdec-pretrain")
    except PackageNotFoundError:
        release = "0"
    return f"encdec-pretrain/{release} (data-pipeline fetch{'; ' + contact if contact else ''})"


def describe(error: BaseException) -> str:
    """The reason in an error of the network, in a few words."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _as_problem(error: urllib.error.HTTPError) -> Exception:
    reason = f"HTTP status {error.code} ({http.client.responses.get(error.code, 'unknown')})"
    if error.code in _TRANSIENT:
        return TransientError(reason, pause=error.code in _BUSY, wait=_retry_after(error.headers))
    return PermanentError(reason, error.code)


def _retry_after(headers: Message) -> float | None:
    """Seconds of the header Retry-After, which holds seconds or a date (RFC 9110, section 10.2.3)."""
    value = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
