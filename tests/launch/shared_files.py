"""A file system that several hosts share, each through a mount of its own: FUSE on top of a directory.

`python tests/launch/shared_files.py DIRECTORY MOUNTPOINT [--cached SECONDS] [--no-locks] -- COMMAND…` runs COMMAND with
the directory mounted, visible to it alone: it is one host. With `--cached`, the host believes for that long what it has
learned of a file, of its size, or of its absence, whatever others do to it, as on NFS. With `--no-locks`, flock fails,
as on Lustre without its mount option `flock`.
"""

import argparse
import contextlib
import ctypes.util
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

UNPROTECTED = "nothing prevents a second run in this directory; make sure that only one trains there"
_NOW = 2**30 - 1  # UTIME_NOW, as utimensat(2) writes it
OPTIONS = {"foreground": True, "nothreads": True, "allow_other": True, "default_permissions": True, "fsname": "shared"}


class Mount:
    """`mountpoint` shows `directory` to this process and all that are on no host of their own."""

    def __init__(self, directory: Path, mountpoint: Path, *options: str):
        self.directory, self.mountpoint, self.options = directory, mountpoint, options

    def host(self) -> list[str]:
        """What, before a command, makes it run on a host of its own."""
        own = [sys.executable, __file__, str(self.directory), str(self.mountpoint), *self.options, "--"]
        return ["unshare", "--mount", "--propagation", "private", *own]

    def __enter__(self) -> "Mount":
        self._server = _mounted(self.directory, self.mountpoint, self.options)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self.mountpoint], check=True)
        self._server.wait()


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Mount]:
    """Within the block, the new directory `mounted` in `folder` shows the new directory `files`."""
    for name in ("files", "mounted"):
        (folder / name).mkdir()
    with Mount(folder / "files", folder / "mounted", *options) as mount:
        yield mount


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def _mounted(directory: Path, mountpoint: Path, options: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, __file__, "--serve", str(directory), str(mountpoint), *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while not mountpoint.is_mount():
        assert server.poll() is None, "not mounted"
        time.sleep(0.02)
    return server


def _serve(directory: str, mountpoint: str, cached: float, locks: bool) -> None:
    ends_with_parent = 1, signal.SIGKILL  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(*ends_with_parent)
    os.environ.setdefault("FUSE_LIBRARY_PATH", ctypes.util.find_library("fuse3") or "")
    import mfusepy  # looks for the library at once

    class Passed(mfusepy.Operations):  # type: ignore[misc]
        """Each call is one on the file of the same name below `directory`."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            status = os.lstat(directory + path)
            names = ("mode", "nlink", "uid", "gid", "size", "rdev", "blocks", "blksize")
            times = {f"st_{name}": getattr(status, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
            return {f"st_{name}": getattr(status, f"st_{name}") for name in names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(directory + path)]  # noqa: PTH208

        def rename(self, old: str, new: str, flags: int = 0) -> int:
            return os.rename(directory + old, directory + new) or 0  # noqa: PTH104

        def link(self, target: str, source: str) -> int:
            return os.link(directory + source, directory + target) or 0

        def symlink(self, target: str, source: str) -> int:
            return os.symlink(source, directory + target) or 0  # noqa: PTH211

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            return os.truncate(directory + path, length) or 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            now = time.time_ns()
            os.utime(directory + path, ns=tuple(now if one == _NOW else one for one in times or (now, now)))
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            status = os.statvfs(directory + path)
            return {name: getattr(status, name) for name in dir(status) if name.startswith("f_") and name != "f_fsid"}

        def open(self, path: str, flags: int) -> int:
            return os.open(directory + path, flags & ~os.O_APPEND)  # the kernel gives each write its place

        def create(self, path: str, mode: int, fi: object = None) -> int:
            return os.open(directory + path, os.O_RDWR | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            return os.fsync(fh) or 0

        def release(self, path: str, fh: int) -> int:
            return os.close(fh) or 0

    def passed(name: str) -> Callable[..., object]:
        return lambda self, path, *given: getattr(os, name)(directory + path, *given) or 0

    for name in ("readlink", "mkdir", "rmdir", "unlink", "chmod", "chown"):
        setattr(Passed, name, passed(name))
    if not locks:

        def flock(self: object, path: str, fh: int, operation: int) -> int:
            raise mfusepy.FuseOSError(errno.ENOSYS)

        Passed.flock = flock
    timeouts = {f"{kind}_timeout": cached for kind in ("attr", "entry", "negative")}
    mfusepy.FUSE(Passed(), mountpoint, **OPTIONS, **timeouts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--cached", type=float, default=0.0)
    parser.add_argument("--no-locks", action="store_true")
    parser.add_argument("directory")
    parser.add_argument("mountpoint")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    given = parser.parse_args(own)
    if given.serve:
        _serve(given.directory, given.mountpoint, given.cached, not given.no_locks)
    else:
        options = ["--cached", str(given.cached), *(["--no-locks"] if given.no_locks else [])]
        if Path(given.mountpoint).is_mount():  # the view of those that are on no host
            subprocess.run(["umount", "--lazy", given.mountpoint], check=True)
        _mounted(Path(given.directory), Path(given.mountpoint), tuple(options))
        os.execvp(sys.argv[len(own) + 2], sys.argv[len(own) + 2 :])
