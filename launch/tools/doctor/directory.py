"""The file system of a run directory: room, speed and locks, as this machine sees them."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from launch.tools.doctor.findings import Finding, Settings

_BYTES = 64 * 2**20
_LEAST_ROOM, _LEAST_SPEED = 5e9, 50e6
_SECONDS_TO_LOCK = 60.0
_SECONDS_TO_SEE = 20.0  # a network file system shows a new file late
_REFUSED = "choose another run.directory, or make room there"
_NOTHING_PREVENTS = "nothing prevents a second run in this directory; make sure that only one trains there"


def existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())


@contextlib.contextmanager
def locked_file(directory: Path) -> Iterator[Path | None]:
    """A new locked file in `directory` for the duration of the block; None if it can't be created or locked soon.

    A thread creates and locks it, because on a dead file system that never returns.
    """
    files: list[IO[bytes]] = []

    def create() -> None:
        with contextlib.suppress(OSError):  # the checks say what is wrong with the directory
            file = tempfile.NamedTemporaryFile(dir=existing(directory), prefix=".doctor-")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files.append(file)

    thread = threading.Thread(target=create, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_LOCK)
    try:
        yield Path(files[0].name) if files else None
    finally:
        for file in files:
            file.close()


def run_directory(settings: Settings) -> list[Finding]:
    """Writes files beside the run's."""
    if settings.directory is None:
        return []
    place = existing(Path(settings.directory))
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as folder:
            return [_written(place, Path(folder)), _locks(Path(folder), settings.locked)]
    except OSError as error:
        reason = error.strerror or str(error)
        return [Finding("run directory", "fault", f"{place}: {reason}", "a directory that can be written", _REFUSED)]


def _written(place: Path, folder: Path) -> Finding:
    content, begun = os.urandom(_BYTES), time.monotonic()
    with (folder / "content").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    speed, room = _BYTES / (time.monotonic() - begun), shutil.disk_usage(folder).free
    found = f"{place}: {room / 1e9:,.0f} GB free; writes {speed / 1e6:,.0f} MB/s"
    if room < _LEAST_ROOM:
        return Finding("run directory", "warning", found, "room for several checkpoints", _REFUSED)
    if speed < _LEAST_SPEED:
        slow = f"{_LEAST_SPEED / 1e6:.0f} MB/s or more"
        return Finding("run directory", "warning", found, slow, "checkpoints take long here; save less often")
    return Finding("run directory", "ok", found)


def _locks(folder: Path, locked: str | None) -> Finding:
    """`locked`: a file that another process, perhaps on another node, has created and locked."""
    with (folder / "lock").open("w") as one, (folder / "lock").open("w") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            wrong = "" if _is_locked(other) else "two files could be locked at once"
        except OSError as error:
            wrong = f"no file locks here ({error.strerror})"
    if locked and not wrong:
        deadline = time.monotonic() + _SECONDS_TO_SEE
        while not Path(locked).exists():
            if time.monotonic() > deadline:
                found = f"{locked}, which another node has just created, isn't seen here"
                remedy = "put run.directory on a file system that every node mounts"
                return Finding("file locks", "fault", found, "one file system for all nodes", remedy)
            time.sleep(0.2)
        with Path(locked).open() as file:
            wrong = "" if _is_locked(file) else "a lock that another process holds isn't seen here"
    if wrong:
        return Finding("file locks", "warning", wrong, "locks that hold on every node", _NOTHING_PREVENTS)
    return Finding("file locks", "ok", f"flock works{', also against other processes' if locked else ''}")


def _is_locked(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    return False
