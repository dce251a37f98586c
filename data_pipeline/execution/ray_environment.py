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
    # By default Ray runs its workers at a low priority, and a build beside any other program hardly progresses. Users
    # who want that can start the command with `nice`, which its workers inherit.
    os.environ.setdefault("RAY_worker_niceness", "0")
