"""What this machine has for ranks to run on."""

import itertools
import os
import socket
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use, without PyTorch, which takes seconds to import.

    `devices`: where the driver has a file for each GPU of the machine. CUDA_VISIBLE_DEVICES chooses among them as CUDA
    reads it: indices, or UUIDs, up to the first entry that names no GPU. A GPU that is named twice hides all. A process
    sees one MIG instance at most.
    """
    number = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*"))
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return number
    kind = next((kind for kind in ("GPU-", "MIG-") if chosen.startswith(kind)), "")
    named = list(itertools.takewhile(lambda one: _names_a_gpu(one, kind, number), map(str.strip, chosen.split(","))))
    if len(set(named)) < len(named):
        return 0
    return min(len(named), 1 if kind == "MIG-" else number)


def _names_a_gpu(entry: str, kind: str, number: int) -> bool:
    return entry.startswith(kind) if kind else entry.isdecimal() and int(entry) < number


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads for each of `local_ranks` processes."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
