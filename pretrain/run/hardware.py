"""The GPUs, CPU threads and ports of this machine."""

import contextlib
import itertools
import os
import socket
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that this process may use. Doesn't import PyTorch, which takes seconds.

    The driver keeps a file for each GPU of the machine in `devices`. CUDA_VISIBLE_DEVICES selects among them by CUDA's
    rules: it lists indices or UUIDs and ends at the first entry that names no GPU. A GPU listed twice hides all GPUs.
    A process sees at most one MIG instance.
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


def interface_of(address: str) -> str | None:
    """The network interface of this machine on the way to `address`; None for a loopback one or none."""
    import psutil  # slow to import, and `launch --help` needs this module

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if not own.startswith("127.") and any(one.address == own for one in addresses):
                return str(name)
    return None
