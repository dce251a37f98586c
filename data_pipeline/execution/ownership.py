"""Ensures that one build at a time works on a corpus, and that no worker of an earlier build still writes to it.

Two files under `CORPUS/.stages` are locked with flock, which is released whenever and however its process ends:

- `driver` is locked by the running build. It names that build's host and process.
- `workers` holds the build's token. A worker holds a shared lock on it while it works. A new build waits until the file
  is unlocked, then writes its own token. A worker that finds a token other than its build's stops.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.foundation.atomic import lock
from data_pipeline.foundation.errors import FailedError, NodeUnfit, UserError

# Ray ends the workers of a dead driver within seconds; an NFS server releases the locks of a dead node after 90.
_SECONDS_FOR_FORMER_WORKERS = 120.0
_claimed: dict[Path, int] = {}  # descriptors: closing one releases its lock
_tokens: dict[Path, str] = {}


def claim(corpus: Path) -> None:
    """Claims `corpus` for this process until `release`. Waits for workers that a killed build left behind.

    Raises FailedError if another build is running, UserError if the corpus can't be written.
    """
    corpus = corpus.resolve()
    if corpus in _claimed:
        return
    path = corpus / ".stages" / "driver"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"output: {path} can't be written: {error.strerror}") from None
    try:
        lock(descriptor, f"{corpus}: a second build at the same time would damage the corpus; run only one")
    except BlockingIOError:
        holder = os.read(descriptor, 500).decode(errors="replace") or "one that has just started"
        os.close(descriptor)
        raise FailedError(f"{corpus}: another build is at work on it ({holder}); wait for it or stop it") from None
    with (corpus / ".stages" / "workers").open("a") as file:
        _wait_for_former_workers(file.fileno(), corpus)
    _claimed[corpus] = descriptor


def release(corpus: Path) -> None:
    """Ends this process's claim on `corpus`, if it has one, so that another process can build it."""
    corpus = corpus.resolve()
    _tokens.pop(corpus, None)
    if (descriptor := _claimed.pop(corpus, None)) is not None:
        os.close(descriptor)


def begin(corpus: Path) -> str:
    """The token of this process's build of `corpus`. From now on workers of earlier builds can't write."""
    corpus = corpus.resolve()
    claim(corpus)
    if corpus not in _tokens:
        os.ftruncate(_claimed[corpus], 0)
        os.pwrite(_claimed[corpus], f"host {socket.gethostname()}, process {os.getpid()}".encode(), 0)
        token = uuid.uuid4().hex
        with (corpus / ".stages" / "workers").open("a") as file:
            _wait_for_former_workers(file.fileno(), corpus)
            file.truncate(0)
            file.write(token)
        _tokens[corpus] = token
    return _tokens[corpus]


def _wait_for_former_workers(descriptor: int, corpus: Path) -> None:
    until = time.monotonic() + _SECONDS_FOR_FORMER_WORKERS
    while True:
        try:
            lock(descriptor, None)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise FailedError(
                    f"{corpus}: workers of an earlier build are still writing to it; stop them and rerun the command"
                ) from None
            time.sleep(0.1)


@contextlib.contextmanager
def at_work(corpus: Path, token: str) -> Iterator[None]:
    """Lets a worker write to `corpus` inside the block. Raises NodeUnfit if this isn't the directory of the build with
    the token, or another build has it now."""
    path = corpus / ".stages" / "workers"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open())
        except OSError as error:
            raise NodeUnfit(f"{path}: {error.strerror} on host {socket.gethostname()}") from None
        lock(file, None, shared=True, wait=True)
        if file.read() != token:
            raise NodeUnfit(f"{corpus} isn't the directory that this build writes to, or another build has taken over")
        yield
