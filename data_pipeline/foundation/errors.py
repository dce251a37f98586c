"""Errors that the user can correct: shown as a message, without a traceback."""

STOPPED = 75  # sysexits' EX_TEMPFAIL: a scheduler may start it again


class UserError(Exception):
    """A wrong argument, config or input. The message is one line; the command exits with `exit_code`."""

    exit_code = 2


class FailedError(UserError):
    """The work could not be done, or damage was found."""

    exit_code = 1


class StoreError(UserError):
    """A remote store refuses a request: no credentials, no permission, no such bucket. No file is at fault."""


class StoreUnavailable(StoreError):
    """A remote store hasn't answered within the waiting time. The same command can be run again later."""

    exit_code = STOPPED


class WorkerDied(FailedError):
    """The process that did some work died on every try."""


class DamagedInput(FailedError):
    """An input file that can't be read to its end.

    `position` is the byte (of the stored file) or the record where reading stopped; `reason` says what was found.
    """

    def __init__(self, path: str, position: str, reason: str):
        super().__init__(f"{path}: damaged at {position}: {reason}")
        self.path, self.position, self.reason = path, position, reason

    def __reduce__(self):  # without it, an exception with several arguments can't be unpickled from a worker process
        return type(self), (self.path, self.position, self.reason)


def one_line(error: BaseException, most: int = 300) -> str:
    """The message of `error` in one line of at most `most` characters; the type of one without a message."""
    return " ".join(str(error).split())[:most].rstrip(".") or type(error).__name__
