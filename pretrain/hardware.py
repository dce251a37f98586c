"""This machine: the device that ranks compute on, its GPUs, CPU threads and ports."""

import contextlib
import functools
import itertools
import os
import re
import secrets
import socket
import sys
from pathlib import Path

import pynvml

from data_pipeline.base.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ACCELERATOR = "DS_ACCELERATOR"  # DeepSpeed reads it too
_WAITS, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # how libgomp's threads wait; the second takes precedence
_SPIN_COUNT = "1000"  # docs/results/operations.md compares it with other values


def device_type() -> str:
    """The kind of device that this process computes on: "cuda" if there is a GPU, else "cpu".

    DS_ACCELERATOR in the environment overrides this. Raises UserError if it is neither cpu nor cuda, or if it is cuda
    and PyTorch finds no GPU.
    """
    requested = _requested()
    if requested == "cpu":
        return requested
    import torch  # 1.5 s and 210 MB, and the launcher needs this module

    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{ACCELERATOR}: cuda, but PyTorch {torch.__version__} finds no GPU; set cpu, or leave it out")
    return "cuda" if torch.cuda.is_available() else "cpu"


def _requested() -> str | None:
    """The value of DS_ACCELERATOR, if it has one."""
    requested = os.environ.get(ACCELERATOR) or None
    if requested not in (None, "cpu", "cuda"):
        raise UserError(f"{ACCELERATOR}: {requested!r}; expected cpu or cuda")
    return requested


def count_gpus(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that this process may use; 0 if DS_ACCELERATOR=cpu asks for the CPU.

    The driver keeps a file for each GPU of the machine in `devices`; under WSL, where it keeps none, NVML counts the
    GPUs. CUDA_VISIBLE_DEVICES selects among the GPUs by CUDA's rules: the variable lists indices or UUIDs, and its list
    ends at the first entry that names no GPU. A GPU listed twice hides all GPUs. A process sees at most one MIG
    instance. PyTorch isn't imported. Raises UserError if DS_ACCELERATOR=cuda asks for GPUs and there is no GPU.
    """
    requested = _requested()
    if requested == "cpu":
        return 0
    visible = _visible_gpus(devices)
    if requested == "cuda" and not visible:
        raise UserError(f"{ACCELERATOR}: cuda, but this machine has no GPU that is visible; set cpu, or leave it out")
    return visible


def _visible_gpus(devices: Path) -> int:
    number = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia*")) or _counted_by_driver()
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


def _counted_by_driver() -> int:
    """GPUs by NVML; 0 without the library or the driver."""
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0


def cpu_multiplies_bf16(description: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this CPU has instructions for products of bf16: AMX or AVX-512 on x86, BF16 on Armv8.6."""
    if not description.exists():
        return False
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", description.read_text(), re.MULTILINE)
    return bool(flags) and not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags[0].split())


def local_gpu(local_rank: int, visible: int) -> int:
    """The GPU of the rank `local_rank` of this machine, among the `visible` GPUs.

    A rank that sees one GPU has that GPU: schedulers may show each rank its own (`--gpus-per-task=1`). Raises UserError
    if there are fewer GPUs than ranks.
    """
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise UserError(f"LOCAL_RANK {local_rank}: only {visible} GPUs are visible; start one rank for each GPU")
    return local_rank


def threads_per_rank(local_ranks: int) -> int:
    """CPU threads for each of `local_ranks` processes: the cores that this process may use, divided among them."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def rank_threads(local_ranks: int) -> int:
    """CPU threads of one of `local_ranks` processes: OMP_NUM_THREADS, or else its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) else threads_per_rank(local_ranks)


@functools.cache
def limit_spinning() -> bool:
    """Has PyTorch's waiting CPU threads spin for a moment only, in this process and in those that it starts.

    Spinning takes cores from other programs, and from the threads that compute. The environment stays as it is on a
    machine with GPUs, and where the user has set how threads wait. PyTorch reads the environment when it is imported,
    so `import pretrain` calls this function, and later calls do nothing. Returns False if PyTorch was imported before,
    so that threads of this process spin.
    """
    with contextlib.suppress(UserError):  # a wrong DS_ACCELERATOR is reported where the device is used
        if not count_gpus() and not os.environ.get(_WAITS) and not os.environ.get(_SPINS):
            os.environ[_SPINS] = _SPIN_COUNT
            return "torch" not in sys.modules
    return True


@functools.cache
def tell_of_spinning() -> None:
    """Prints a line to stderr, once, if `limit_spinning` came too late for this process."""
    if not limit_spinning():
        print(
            "pretrain: PyTorch was imported first, so its waiting threads spin, which slows this process down while "
            f"other programs use the CPU; import pretrain before torch, or set {_SPINS}={_SPIN_COUNT}",
            file=sys.stderr,
        )


def free_port() -> int:
    """A TCP port of this machine that nothing listens on. The port is below those that Linux hands out by itself (32768
    and up), so that no other program gets it before a rank listens there."""
    while True:
        port = secrets.choice(range(20_000, 32_768))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
