"""The process that forks the loader's workers."""

import signal
from multiprocessing import forkserver, get_context, resource_tracker

from data_pipeline.base.processes import SAFE_PATH, blocked, variables

# A terminal or a scheduler sends these to all processes. The run then stops, and needs its workers until it does.
IGNORED = {signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
REQUESTS = {*IGNORED, signal.SIGTERM}  # SIGTERM may also be meant for one worker
BATCHES = "data_pipeline.loading.batches"  # the module of the dataset whose items are batches


def start(module: str = BATCHES) -> None:
    """Starts the server unless it runs. `start` returns at once; the server takes seconds to import `module` and
    PyTorch.

    Without the server, each worker would import them, in a second and 100 MB. The server and the workers block
    `REQUESTS`.
    """
    with blocked(REQUESTS), variables(**SAFE_PATH):
        get_context("forkserver").set_forkserver_preload([module])
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)  # ensure_running unblocks some of them
        forkserver.ensure_running()
