"""The process that forks the loader's workers."""

import signal
from multiprocessing import forkserver, get_context, resource_tracker

from data_pipeline.foundation.blocked_signals import blocked

# A terminal or a scheduler sends these to all processes. The run stops on them, and needs its workers until then.
IGNORED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
REQUESTS = {*IGNORED, signal.SIGTERM}  # SIGTERM may also be meant for one worker
BATCHES = "data_pipeline.loading.batches"  # the module of the dataset whose items are batches


def start(module: str = BATCHES) -> None:
    """Starts the server unless it runs. It imports `module` and PyTorch, which takes seconds, and returns at once.

    Else each worker would take a second and 100 MB to import them. The server and its workers block `REQUESTS`.
    """
    with blocked(REQUESTS):
        get_context("forkserver").set_forkserver_preload([module])
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)  # ensure_running unblocks some of them
        forkserver.ensure_running()
