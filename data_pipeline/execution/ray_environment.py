"""The settings that Ray reads from the environment when it is imported."""

import os

from data_pipeline.execution.attempts import RETRIES

# Ray prints pages about every lost worker and raylet; our own messages have what matters.
_OF_LOST_WORKERS = (
    "retries remaining|worker died|killed due to (memory pressure|the node running low on memory)"
    r"|how to address the out of memory issue|Raylet is terminated|has been marked dead because|^\s*$"
)


def prepare() -> None:
    """Sets them, unless the user has. Has no effect once Ray is imported."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _OF_LOST_WORKERS)
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    # By default Ray lowers the priority of its workers to that of background work, so that beside any other program a
    # build hardly moves. The user who wants that starts the command with `nice`, which its workers inherit.
    os.environ.setdefault("RAY_worker_niceness", "0")
