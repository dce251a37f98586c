"""Polite requests to public servers: a user agent, a limited rate, the pauses that servers ask for, bounded retries."""

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
NETWORK_ERRORS = (
    OSError,
    http.client.HTTPException,
)  # raised by opening and reading: resets, timeouts, incomplete answers

_TIMEOUT = 60.0  # seconds without receiving a byte
_LONGEST_WAIT = 60.0
_LONGEST_RETRY_AFTER = 900.0
_PROGRESS = 1 << 20  # new bytes after which failures are counted from zero again
_LARGEST_LIST = 1 << 28
_BUSY = {429, 503}
_TRANSIENT = {408, 425, 500, 502, 504, *_BUSY}


class TransientError(Exception):
    """A failure that a retry may cure. `pause`: all requests must wait; `wait`: seconds, if the server named any."""

    def __init__(self, reason: str, pause: bool = False, wait: float | None = None):
        super().__init__(reason)
        self.pause, self.wait = pause, wait


class PermanentError(Exception):
    """A failure that no retry will cure. `status`: the HTTP status, if that is the reason."""

    def __init__(self, reason: str, status: int | None = None):
        super().__init__(reason)
        self.status = status


class StoppedError(Exception):
    """The client's `stop` was set."""


class Client:
    """An HTTP client shared by all connections of one command. It is thread-safe.

    `requests_per_second` limits all connections together. After `tries` consecutive tries without progress a file is
    given up; the wait before each retry doubles from `first_wait` seconds up to a minute. `contact` is sent with each
    request, so that the operators of a server can reach the user. `note` is called with a line about each retry.
    Setting `stop` ends every wait and download with StoppedError. Proxies are taken from the environment (https_proxy,
    no_proxy).
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
        """Waits as the rate limit requires, sends one request and yields the response, whose bytes aren't decoded.

        Raises TransientError or PermanentError if the request fails. Reading the response may raise NETWORK_ERRORS.
        """
        self._take_turn()
        # With another encoding, a .gz would not arrive with the published bytes.
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
        """Reads a small file, such as a list, with retries. Returns its content and headers; raises PermanentError."""

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
        """The result of `attempt`, which is called again after each TransientError while tries are left.

        Failures are counted from zero again when `position()`, the bytes received, exceeds its earlier maximum by
        1 MiB. So a large file over a weak line may arrive in many pieces, and a server that always breaks off at the
        same place is given up. Raises PermanentError.
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
            return longest * random.SystemRandom().uniform(0.5, 1)  # so that many clients don't all retry at once
        if problem.wait > _LONGEST_RETRY_AFTER:
            raise FailedError(
                f"{problem}; the server asks for a pause of {problem.wait:,.0f} s; run the same command again then"
            )
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
            self.stop.wait(wait)  # then check again: a server may have asked for a pause meanwhile
        raise StoppedError


def user_agent(contact: str = "") -> str:
    """The User-Agent header. Public servers (Wikimedia's among them) refuse programs without one."""
    try:
        release = version("encdec-pretrain")
    except PackageNotFoundError:
        release = "0"
    return f"encdec-pretrain/{release} (data-pipeline fetch{'; ' + contact if contact else ''})"


def describe(error: BaseException) -> str:
    """The reason of a network error in a few words."""
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
    """The seconds to wait by the header Retry-After, which has seconds or a date (RFC 9110, section 10.2.3)."""
    value = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d{1,9}", value):
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
