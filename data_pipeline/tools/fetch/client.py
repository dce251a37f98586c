"""Polite requests to public servers: a user agent, a limited rate, the pauses that servers ask for, bounded retries."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import requests
import urllib3

from data_pipeline.foundation.code_version import package_version
from data_pipeline.foundation.errors import FailedError

Result = TypeVar("Result")
NETWORK_ERRORS = (OSError, urllib3.exceptions.HTTPError)  # raised by opening and reading; requests' are OSErrors

_TIMEOUT = 60.0  # seconds without receiving a byte
_LONGEST_WAIT = 60.0
_LONGEST_RETRY_AFTER = 900.0
_PROGRESS = 1 << 20  # new bytes after which failures are counted from zero again
_LARGEST_LIST = 1 << 28  # bytes
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
        about = f"data-pipeline fetch{'; ' + contact if contact else ''}"
        self._headers = {
            "User-Agent": f"encdec-pretrain/{package_version()} ({about})",
            "Accept-Encoding": "identity",  # with another encoding, a .gz would not arrive with the published bytes
        }
        self._lock, self._next_request = threading.Lock(), 0.0

    @contextlib.contextmanager
    def get(self, url: str, headers: dict[str, str] | None = None) -> Iterator[requests.Response]:
        """Waits as the rate limit requires, sends one request and yields the response, whose body isn't read yet.

        Raises TransientError or PermanentError if the request fails. Reading the response may raise NETWORK_ERRORS.
        """
        self._wait_for_rate()
        try:
            response = requests.get(url, headers={**self._headers, **(headers or {})}, stream=True, timeout=_TIMEOUT)
        except requests.RequestException as error:
            if isinstance(error, ValueError):  # among requests' errors, those of addresses
                raise PermanentError(f"not an address: {error}") from None
            raise TransientError(f"no answer: {describe(error)}") from None
        with response:
            if response.status_code not in (200, 206):
                raise _refusal(response)
            yield response

    def read(self, url: str) -> tuple[bytes, dict[str, dict[str, str]]]:
        """Reads a small file, such as a list, with retries. Returns its content and links; raises PermanentError."""

        def attempt() -> tuple[bytes, dict[str, dict[str, str]]]:
            with self.get(url) as response:
                try:
                    content = response.raw.read(_LARGEST_LIST + 1)
                except NETWORK_ERRORS as error:
                    raise TransientError(f"connection lost: {describe(error)}") from None
                if len(content) > _LARGEST_LIST:
                    raise PermanentError(f"expected a list, got more than {_LARGEST_LIST:,} bytes")
                return content, response.links

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
                    with self._lock:
                        self._next_request = max(self._next_request, time.monotonic() + wait)
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

    def _wait_for_rate(self) -> None:
        while not self.stop.is_set():
            with self._lock:
                wait = self._next_request - time.monotonic()
                if wait <= 0:
                    self._next_request = time.monotonic() + self._interval
                    return
            self.stop.wait(wait)  # then check again: a server may have asked for a pause meanwhile
        raise StoppedError


def describe(error: BaseException) -> str:
    """The reason of an error of the network or the disk in a few words: that of the error which it follows from."""
    while (origin := error.__cause__ or error.__context__) is not None:
        error = origin
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _refusal(response: requests.Response) -> Exception:
    code = response.status_code
    reason = f"HTTP status {code} ({response.reason or 'unknown'})"
    if code not in _TRANSIENT:
        return PermanentError(reason, code)
    try:
        wait = urllib3.Retry(retry_after_max=10**9).get_retry_after(
            response.raw
        )  # the header Retry-After has seconds or a date
    except urllib3.exceptions.InvalidHeader:
        wait = None
    return TransientError(reason, pause=code in _BUSY, wait=wait)
