"""The process that forks the loader's workers."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, get_context, resource_tracker, util
from pathlib import Path
from typing import Any

from data_pipeline.foundation.processes import blocked

# A terminal or a scheduler sends these to all processes. The run stops on them, and needs its workers until then.
IGNORED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
REQUESTS = {*IGNORED, signal.SIGTERM}  # SIGTERM may also be meant for one worker
BATCHES = "data_pipeline.loading.batches"  # the module of the dataset whose items are batches


def start(module: str = BATCHES) -> None:
    """Starts the server unless it runs. It imports `module` and PyTorch, which takes seconds, and returns at once.

    Otherwise each worker would import them, which takes a second and 100 MB. The server and workers block `REQUESTS`.
    """
    with blocked(REQUESTS):
        get_context("forkserver").set_forkserver_preload([module])
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)  # ensure_running unblocks some of them
        forkserver.ensure_running()


def fork() -> None:
    """Starts the server as a fork of this process: it imports nothing again, and shares the memory of the modules.

    Only for a process that has no other threads, has used neither a GPU nor PyTorch's threads, and has no server yet.
    """
    importlib.import_module(BATCHES)
    resource_tracker.ensure_running()
    with _forked_instead_of_run():
        start()


@contextlib.contextmanager
def _forked_instead_of_run() -> Iterator[None]:
    """Within the block, multiprocessing makes a server of a fork of this process instead of a new interpreter."""
    run = util.spawnv_passfds
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = run


def _fork(path: bytes, arguments: Sequence[Any], kept: Sequence[int]) -> int:
    """Like `multiprocessing.util.spawnv_passfds`: the process's id. `arguments` end in the program of the server."""
    sys.stdout.flush()
    sys.stderr.flush()  # else each worker would write again what is buffered
    if process := os.fork():
        return process
    try:
        # as in a new interpreter: no other files, handlers or servers
        for file in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
            if file > 2 and file not in kept:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(file)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
        forkserver._forkserver.__init__()  # type: ignore[misc]
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        exec(arguments[-1], {})
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(0)
