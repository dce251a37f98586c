"""Errors that the user can correct: shown as a message, without a traceback."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

STOPPED = 75  # sysexits' EX_TEMPFAIL: a scheduler may start it again

OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_OF_FILES = (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR)
_ROOM = "free some space there, or choose another folder, and run the same command again"
_WAYS_OUT = {  # for a file that a command reads or writes
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or choose another path"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP), "choose another path"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "run the same command again; if that fails too, check the disk"),
}


class UserError(Exception):
    """A wrong argument, config or input. The message is one line; the command exits with `exit_code`, which is 2.

    Attributes:
        on_all_ranks: True if all ranks of a run raise it together, so that only one needs to print it.
    """

    exit_code = 2
    on_all_ranks = False


class FailedError(UserError):
    """The work could not be done, or damage was found; `exit_code` is 1."""

    exit_code = 1


class MissingPackage(UserError):
    """A file is undamaged, but the package that offers a hook, objective or source of the file isn't installed."""


class StoreError(UserError):
    """A remote store refuses a request: no credentials, no permission, no such bucket."""


class StoreDamage(StoreError):
    """A remote store sent bytes of a `file` whose checksum differs from the published one."""

    exit_code = 1

    def __init__(self, message: str, file: str = ""):
        super().__init__(message, file)
        self.file = file

    def __str__(self) -> str:
        return str(self.args[0])


class StoreUnavailable(StoreError):
    """A remote store hasn't answered within the waiting time. The user can run the same command again later."""

    exit_code = STOPPED


class WorkerDied(FailedError):
    """The worker of a unit died on every try. `file`: the input file that it read last; "" if none."""

    file = ""


class NodeUnfit(FailedError):
    """A node can't do any unit of a build. The message says why."""


class DamagedInput(FailedError):
    """An input file that can't be read to its end.

    `position` is the byte (of the stored file) or the record where reading stopped; `reason` says what was found.
    """

    def __init__(self, path: str, position: str, reason: str):
        super().__init__(f"{path}: damaged at {position}: {reason}")
        self.path, self.position, self.reason = path, position, reason

    def __reduce__(self):  # without it, an exception with several arguments can't be unpickled from a worker process
        return type(self), (self.path, self.position, self.reason)


def one_line(error: BaseException) -> str:
    """The message of `error` in one line of at most 300 characters; the error's type if it has no message."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


def may_be_of_node(error: BaseException) -> bool:
    """Whether another node may succeed: `error`, or an error that caused it, comes from the system or a store.

    An OSError without a number, such as gzip.BadGzipFile, comes from a file's content.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (StoreError, NodeUnfit)) or (isinstance(seen, OSError) and seen.errno is not None):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def of_files(error: OSError, place: Path, way_out: str) -> FailedError | None:
    """The failure in one line, if a disk is full or read-only or a file can't be read or replaced; else None.

    A full disk is named by `place`, unless the error names a file elsewhere.
    """
    if error.errno not in (*OF_DISKS, *_OF_FILES):
        return None
    where = error.filename2 or error.filename or place
    if error.errno in OF_DISKS and Path(str(where)).is_relative_to(place):
        where = place
    return FailedError(f"{where}: {os.strerror(error.errno)}; {way_out}")


def of_command(error: OSError) -> FailedError | None:
    """The failure of a command in one line, if `error` is of a full disk or names the file that the system refuses;
    else None."""
    way_out, where = _WAYS_OUT.get(error.errno or 0), error.filename2 or error.filename
    if way_out is None or (where is None and error.errno not in OF_DISKS):
        return None
    named = f"{os.fsdecode(where)}: " if isinstance(where, str | bytes | os.PathLike) else ""
    return FailedError(f"{named}{os.strerror(error.errno or 0)}; {way_out}")


@contextlib.contextmanager
def failing_in_one_line(place: Path, way_out: str) -> Iterator[None]:
    """Turns errors of disks and files into FailedError, as `of_files` does."""
    try:
        yield
    except OSError as error:
        if failed := of_files(error, place, way_out):
            raise failed from None
        raise


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns an error of the libraries safetensors and tokenizers that an error of the system has caused into the
    OSError."""
    try:
        yield
    except Exception as error:  # tokenizers has no class of its own
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
