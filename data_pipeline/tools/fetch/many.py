"""Many published files at once, over a few connections."""

import contextlib
import queue
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.foundation.atomic import remove_leftovers
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.locks import lock
from data_pipeline.tools.fetch.client import Client, PermanentError, StoppedError, describe
from data_pipeline.tools.fetch.download import STATE, Download
from data_pipeline.tools.fetch.meter import DownloadMeter
from data_pipeline.tools.fetch.published import PublishedFile

_FAILURES_IN_A_ROW = 10  # then the rest would fail too; don't ask a server that refuses us 50,000 times
_POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """The number of files `fetched` now and already `present`, bytes `received`, and the files that `failed`."""

    fetched: int = 0
    present: int = 0
    received: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # path -> reason


def fetch_files(
    files: Sequence[PublishedFile], folder: Path, client: Client, connections: int = 4, recheck: bool = False
) -> Outcome:
    """Downloads `files` below `folder`, except those already there. Called again, it continues where it stopped.

    A file that can't be fetched is listed in the outcome, and the others are still fetched. With `recheck`, it compares
    the content of files already there, not just their size and time. Only one process may fetch to a folder. Raises
    FailedError when nothing more can be fetched: the disk is full, a server asks for a long pause, or ten files in a
    row failed.
    """
    if len({file.path for file in files}) < len(files):
        raise FailedError("the list names a file twice")
    with _sole_user(folder):
        remove_leftovers(folder / STATE)
        return _Fetch(files, folder, client, recheck).run(connections)


class _Fetch:
    def __init__(self, files: Sequence[PublishedFile], folder: Path, client: Client, recheck: bool):
        self._folder, self._client, self._recheck = folder, client, recheck
        self._files, self._meter = files, DownloadMeter("fetch", len(files))
        self._todo: queue.SimpleQueue[PublishedFile] = queue.SimpleQueue()
        for file in files:
            self._todo.put(file)
            self._meter.expect(file.path, file.size)
        self._lock, self._outcome = threading.Lock(), Outcome()
        self._failures_in_a_row = 0
        self._fatal: BaseException | None = None

    def run(self, connections: int) -> Outcome:
        self._client.note = self._meter.note
        # Daemon threads: Ctrl-C doesn't wait for a server. The next command continues from the .part files.
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(connections, len(self._files)))]
        try:
            with self._meter.showing():
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(_POLL_SECONDS)
                        self._meter.show()
        finally:
            self._client.stop.set()
        if self._fatal:
            raise self._fatal
        self._outcome.received = self._meter.bytes_received
        return self._outcome

    def _work(self) -> None:
        while not self._client.stop.is_set():
            try:
                file = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                self._fetch(file)
            except StoppedError:
                return
            except Exception as error:
                self._end(error)

    def _fetch(self, file: PublishedFile) -> None:
        download = Download(file, self._folder, self._client, self._meter)
        try:
            present = download.is_complete(self._recheck)
            if present:
                self._meter.add(size := (self._folder / file.path).stat().st_size)
                self._meter.expect(file.path, size)
            else:
                download.run()
        except PermanentError as error:
            self._count_failure(file, str(error))
            return
        except OSError as error:  # network errors were handled below, so this is the disk
            had = human_size(self._meter.bytes_done)
            raise FailedError(
                f"{self._folder}: can't write {file.path}: {describe(error)} ({had} downloaded so far)"
            ) from None
        self._meter.finish_file()
        with self._lock:
            self._failures_in_a_row = 0
            self._outcome.present += present
            self._outcome.fetched += not present

    def _count_failure(self, file: PublishedFile, reason: str) -> None:
        self._meter.note(f"{file.path}: {reason}")
        with self._lock:
            self._outcome.failed[file.path] = reason
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= _FAILURES_IN_A_ROW:
                self._end(
                    FailedError(f"stopped: {_FAILURES_IN_A_ROW} files in a row failed, the last {file.url}: {reason}")
                )

    def _end(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._client.stop.set()


@contextlib.contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    """Keeps a second command out of `folder`: both would write to the same .part files."""
    try:
        (folder / STATE).mkdir(parents=True, exist_ok=True)
        file = (folder / STATE / "lock").open("w")
    except OSError as error:
        raise FailedError(f"{folder}: can't write there: {describe(error)}") from None
    with file:
        try:
            lock(file, f"{folder}: a second fetch would spoil its files; make sure that only one writes there")
        except BlockingIOError:
            raise FailedError(f"{folder}: another fetch is writing here; wait for it, or name another folder") from None
        yield


def check_room(files: Sequence[PublishedFile], folder: Path) -> None:
    """Raises FailedError if the disk has no room for what is missing of the files of known size."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    here = sum(path.stat().st_size for file in files for path in _places(file, folder) if path.exists())
    needed, free = sum(file.size or 0 for file in files) - here, shutil.disk_usage(existing).free
    if needed > free:
        raise FailedError(f"{folder}: {human_size(needed)} are still to be fetched, only {human_size(free)} are free")


def _places(file: PublishedFile, folder: Path) -> tuple[Path, Path]:
    return folder / file.path, folder / STATE / f"{file.path}.part"
