"""The store of a corpus in a folder that all nodes see, on a local disk or a shared file system.

One build at a time works on a corpus, and no worker of an earlier build still writes to it. Two files under
`CORPUS/.stages` are locked with flock, so that the lock ends with its process:

- The running build's driver locks `driver`, which names its host and process.
- `workers` has the build's token. A worker holds a shared lock on the file while it works. A new build waits until the
  file is unlocked, then writes a new token. A worker that finds another build's token stops.
"""

import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from data_pipeline.base.atomic import atomic_path, flush, lock, remove_leftovers, sha256
from data_pipeline.base.errors import FailedError, NodeUnfit, UserError
from data_pipeline.base.store import ReadRanges, Store, in_threads

# Ray ends the workers of a dead driver within seconds; an NFS server releases the locks of a dead node after 90.
_SECONDS_FOR_FORMER_WORKERS = 120.0
_STAGES = ".stages"


class LocalStore(Store):
    def __init__(self, root: Path):
        self.root = root
        self._claimed: int | None = None  # a descriptor: closing it releases its lock
        self._token = ""
        self._is_at_work = False

    def __str__(self) -> str:
        return str(self.root)

    def __reduce__(self) -> tuple[type, tuple[Path]]:  # a worker may have another working directory
        return LocalStore, (self.root.resolve(),)

    @property
    def disk(self) -> Path:
        return self.root

    def at(self, name: str) -> str:
        return str(self.root / name)

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.opened(name) as read:
            return read(ranges)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[ReadRanges]:
        descriptor = os.open(self.root / name, os.O_RDONLY)
        try:
            yield lambda ranges: [_read(descriptor, start, stop) for start, stop in ranges]
        finally:
            os.close(descriptor)

    def readable(self, name: str) -> str:
        return str(self.root / name)

    @contextlib.contextmanager
    def local(self, names: Iterable[str]) -> Iterator[Path]:
        yield self.root

    @contextlib.contextmanager
    def put(self, name: str) -> Iterator[Path]:
        flushed_later = self._is_at_work and name.startswith(f"{_STAGES}/")  # by `append`
        with atomic_path(self.root / name, flush_folder=not flushed_later) as path:
            yield path

    def checksum(self, name: str) -> tuple[int, str]:
        return (self.root / name).stat().st_size, sha256(self.root / name)

    def names(self, folder: str = "", deep: bool = True) -> list[str]:
        found = []
        for place, below, names in os.walk(self.root / folder):
            within = Path(place).relative_to(self.root)
            found += [str(within / name) for name in names]
            if not deep:
                below.clear()
        return found

    def folders(self, folder: str) -> list[str]:
        path = self.root / folder
        return [one.name for one in path.iterdir() if one.is_dir()] if path.exists() else []

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        sizes = in_threads(self._size, names)
        return {name: size for name, size in zip(names, sizes, strict=True) if size is not None}

    def _size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except OSError:
            return None

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def lines(self, name: str) -> Iterator[bytes]:
        with contextlib.suppress(FileNotFoundError), (self.root / name).open("rb") as file:
            for line in file:  # one at a time: the records of a crawl take a gigabyte
                yield line[:-1] if line.endswith(b"\n") else b""

    def append(self, name: str, lines: bytes, files: Collection[str]) -> None:
        path = self.root / name
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            flush(path.parent.parent)
        with path.open("ab", buffering=0) as file:
            for folder in sorted({path.parent, *((self.root / one).parent for one in files)}):
                flush(folder)
            before = file.tell()
            try:
                while lines:
                    lines = lines[file.write(lines) :]
                flush(path)
            except OSError:
                file.truncate(before)  # of a full disk: the same lines may be appended again
                raise

    def replace_lines(self, name: str, lines: bytes) -> None:
        self.write(name, lines)

    def claim(self) -> None:
        """Also waits for workers that a killed build left behind."""
        if self._claimed is not None:
            return
        path = self.root / _STAGES / "driver"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flush(self.root)  # files that survive a power cut without `.stages` would seem to be the user's
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"output: {path} can't be written: {error.strerror}") from None
        with contextlib.ExitStack() as unclaimed:
            unclaimed.callback(os.close, descriptor)
            try:
                lock(descriptor, f"{self.root}: a second build at the same time would damage the corpus; run only one")
            except BlockingIOError:
                holder = os.read(descriptor, 500).decode(errors="replace") or "one that has just started"
                other = f"another build is at work on it ({holder})"
                raise FailedError(f"{self}: {other}; wait for it or stop it") from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"host {socket.gethostname()}, process {os.getpid()}".encode(), 0)
            with (self.root / _STAGES / "workers").open("a") as file:
                self._wait_for_former_workers(file.fileno())
            unclaimed.pop_all()
        self._claimed = descriptor

    def release(self) -> None:
        self._token = ""
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def begin(self) -> str:
        self.claim()
        if not self._token:
            self._token = uuid.uuid4().hex
            with (self.root / _STAGES / "workers").open("a") as file:
                self._wait_for_former_workers(file.fileno())
                file.truncate(0)
                file.write(self._token)
        return self._token

    def _wait_for_former_workers(self, descriptor: int) -> None:
        until = time.monotonic() + _SECONDS_FOR_FORMER_WORKERS
        while True:
            try:
                lock(descriptor, None)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    reason = "workers of an earlier build are still writing to it; stop them and rerun the command"
                    raise FailedError(f"{self}: {reason}") from None
                time.sleep(0.1)

    @contextlib.contextmanager
    def at_work(self, token: str) -> Iterator[None]:
        path = self.root / _STAGES / "workers"
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(path.open())
            except OSError as error:
                raise NodeUnfit(f"{path}: {error.strerror} on host {socket.gethostname()}") from None
            lock(file, None, shared=True, wait=True)
            if file.read() != token:
                raise NodeUnfit(
                    f"{self} isn't the directory that this build writes to, or another build has taken over"
                )
            self._is_at_work = True
            try:
                yield
            finally:
                self._is_at_work = False

    def remove_leftovers(self, folders: Iterable[str]) -> None:
        remove_leftovers(self.root, {*folders, _STAGES})


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """The bytes of an open file from `start` to `stop`; fewer at its end."""
    parts = []
    while content := os.pread(descriptor, stop - start, start):  # the kernel reads 2 GiB at most
        parts.append(content)
        start += len(content)
    return b"".join(parts)
