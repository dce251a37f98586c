"""Many published files at once, over a few connections."""

import contextlib
import queue
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from data_pipeline.foundation.atomic import remove_leftovers
from data_pipeline.foundation.errors import FailedError
from data_pipeline.foundation.formatting import human_size
from data_pipeline.foundation.locks import lock
from data_pipeline.foundation.progress import track
from data_pipeline.tools.fetch.client import Client, PermanentError, describe
from data_pipeline.tools.fetch.download import STATE, Download
from data_pipeline.tools.fetch.published import PublishedFile

_FAILURES_IN_A_ROW = 10  # then the rest would fail too; don't ask a server that refuses us 50,000 times


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
        return _Fetch([Download(file, folder, client) for file in files], client, recheck).run(connections)


class _Fetch:
    """Each download has a thread; the main thread starts them, counts what they report and shows how far they are."""

    def __init__(self, downloads: Sequence[Download], client: Client, recheck: bool):
        self._downloads, self._client, self._recheck = downloads, client, recheck
        self._finished: queue.SimpleQueue[tuple[Download, _Result]] = queue.SimpleQueue()

    def run(self, connections: int) -> Outcome:
        outcome, failures_in_a_row, number = Outcome(), 0, len(self._downloads)
        reports = self._reports(connections)
        try:
            for download, result in track(reports, number, "fetch", lambda _: 0, self._to_receive, self._received):
                if isinstance(result, PermanentError):
                    print(f"{download.file.path}: {result}", file=sys.stderr, flush=True)
                    outcome.failed[download.file.path] = str(result)
                    failures_in_a_row += 1
                    if failures_in_a_row >= _FAILURES_IN_A_ROW:
                        last = f"{download.file.url}: {result}"
                        raise FailedError(f"stopped: {_FAILURES_IN_A_ROW} files in a row failed, the last {last}")
                elif isinstance(result, Exception):
                    raise result
                else:
                    failures_in_a_row = 0
                    outcome.present += result == "present"
                    outcome.fetched += result == "fetched"
        finally:
            self._client.stop.set()
        outcome.received = self._received()
        return outcome

    def _reports(self, connections: int) -> Iterator[tuple[Download, "_Result"]]:
        """What became of each download, as they finish. A finished one makes room for the next."""
        waiting = iter(self._downloads)
        for download in islice(waiting, connections):
            self._start(download)
        for _ in self._downloads:
            yield self._finished.get()
            for download in islice(waiting, 1):
                self._start(download)

    def _start(self, download: Download) -> None:
        # A daemon: Ctrl-C doesn't wait for a server. The next command continues from the .part file.
        threading.Thread(target=lambda: self._finished.put((download, self._fetch(download))), daemon=True).start()

    def _fetch(self, download: Download) -> "_Result":
        try:
            if download.is_complete(self._recheck):
                return "present"
            download.run()
            return "fetched"
        except OSError as error:  # network errors were handled below, so this is the disk
            had = human_size(self._received())
            return FailedError(f"can't write {download.path}: {describe(error)} ({had} downloaded so far)")
        except Exception as error:
            return error

    def _received(self) -> int:
        return sum(download.received for download in self._downloads)

    def _to_receive(self) -> int:
        """The bytes of all files that weren't there before, estimated from the files whose size is known."""
        sizes = [download.size for download in self._downloads if download.size is not None]
        whole = sum(sizes) * len(self._downloads) // max(1, len(sizes))
        return whole - sum(download.present for download in self._downloads)


_Result = Literal["present", "fetched"] | Exception


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
