"""What this machine has for ranks to run on."""

import os
import socket
from pathlib import Path


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    return len(devices) if visible is None else min(len(devices), len([part for part in visible.split(",") if part]))


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads for each of `local_ranks` processes."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
