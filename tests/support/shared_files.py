"""A file system that several hosts share, each through a mount of its own: FUSE on top of a directory.

`python tests/support/shared_files.py DIRECTORY MOUNTPOINT OPTIONS COMMAND…` runs COMMAND with the directory mounted,
visible to it alone: it is one host. OPTIONS are words. With "cached", the host believes for ever what it has learned of
a file, of its size, or of its absence, whatever others do to it, as on NFS for a while. With "no-locks", flock fails,
as on Lustre without its mount option `flock`. Without COMMAND, it serves the mount.
"""

import contextlib
import ctypes.util
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNPROTECTED = "nothing prevents a second run in this directory; make sure that only one trains there"
_NOW = 2**30 - 1  # UTIME_NOW, as utimensat(2) writes it
_EVER = 1_000_000.0  # s
OPTIONS = {"foreground": True, "nothreads": True, "allow_other": True, "default_permissions": True, "fsname": "shared"}


@dataclass(frozen=True)
class Mount:
    """`mountpoint` shows `directory` to this process and all that are on no host of their own."""

    directory: Path
    mountpoint: Path
    options: str

    def host(self) -> list[str]:
        """What, before a command, makes it run on a host of its own."""
        own = [sys.executable, __file__, str(self.directory), str(self.mountpoint), self.options]
        return ["unshare", "--mount", "--propagation", "private", *own]


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Mount]:
    """Within the block, the new directory `mounted` in `folder` shows the new directory `files`."""
    mount = Mount(folder / "files", folder / "mounted", options)
    mount.directory.mkdir()
    mount.mountpoint.mkdir()
    server = _mounted(mount.directory, mount.mountpoint, options)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount.mountpoint], check=True)
        server.wait()


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def _mounted(directory: Path, mountpoint: Path, options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, __file__, str(directory), str(mountpoint), options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while not mountpoint.is_mount():
        assert server.poll() is None, "not mounted"
        time.sleep(0.02)
    return server


def _serve(directory: str, mountpoint: str, options: list[str]) -> None:
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

        def release(self, path: str, fh: int) -> int:
            return os.close(fh) or 0

    def passed(name: str) -> Callable[..., object]:
        return lambda self, path, *given: getattr(os, name)(directory + path, *given) or 0

    for name in ("readlink", "mkdir", "rmdir", "unlink", "chmod", "chown"):
        setattr(Passed, name, passed(name))
    if "no-locks" in options:

        def flock(self: object, path: str, fh: int, operation: int) -> int:
            raise mfusepy.FuseOSError(errno.ENOSYS)

        Passed.flock = flock
    timeouts = {f"{kind}_timeout": _EVER * ("cached" in options) for kind in ("attr", "entry", "negative")}
    mfusepy.FUSE(Passed(), mountpoint, **OPTIONS, **timeouts)


if __name__ == "__main__":
    directory, mountpoint, options, *command = sys.argv[1:]
    if not command:
        sys.exit(_serve(directory, mountpoint, options.split()))
    if Path(mountpoint).is_mount():  # the view of those that are on no host
        subprocess.run(["umount", "--lazy", mountpoint], check=True)
    _mounted(Path(directory), Path(mountpoint), options)
    os.execvp(command[0], command)
