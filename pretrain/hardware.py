"""This machine: the device that ranks compute on, its GPUs, CPU threads and ports, and how fast devices are.

GPUs' speeds are those of their data sheets, the CPU's as measured in half a second.
"""

import contextlib
import itertools
import os
import re
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil
import pynvml

from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.processes import available_memory

VISIBLE = "CUDA_VISIBLE_DEVICES"
ACCELERATOR = "DS_ACCELERATOR"  # DeepSpeed reads it too


def device_type() -> str:
    """The kind of device that this process computes on: "cuda" or "cpu".

    The CPU, even beside GPUs, where the environment has DS_ACCELERATOR=cpu. Raises UserError for another value.
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
    """The number of NVIDIA GPUs that this process may use. Doesn't import PyTorch, which takes seconds.

    0 where DS_ACCELERATOR=cpu asks for the CPU. The driver keeps a file for each GPU of the machine in `devices`; where
    it doesn't, as under WSL, its management library counts them. CUDA_VISIBLE_DEVICES selects among them by CUDA's
    rules: it lists indices or UUIDs and ends at the first entry that names no GPU. A GPU listed twice hides all GPUs.
    A process sees at most one MIG instance. Raises UserError where DS_ACCELERATOR=cuda asks for GPUs and none is there.
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
    """True if this CPU has instructions for products of bf16: AMX or AVX-512's on x86, those of Armv8.6."""
    if not description.exists():
        return False
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", description.read_text(), re.MULTILINE)
    return bool(flags) and not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(flags[0].split())


def local_gpu(local_rank: int, visible: int) -> int:
    """The GPU of the rank `local_rank` of this machine, among the `visible` ones.

    A rank that sees just one has that: schedulers may show each rank its own (`--gpus-per-task=1`). Raises UserError
    where there are fewer GPUs than ranks.
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
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else threads_per_rank(local_ranks)


def cores_beside(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores nearest to the device at a PCI address, say 0000:17:00.0; none if Linux doesn't say."""
    try:
        ranges = (devices / address / "local_cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in one.split("-")] for one in ranges if one]
    except (OSError, ValueError):
        return set()
    return {core for one in ends for core in range(one[0], one[-1] + 1)}


def bind_to(cores: set[int]) -> bool:
    """Runs this process, and the threads and processes that it will start, on those of `cores` that it may use. Returns
    whether that changes anything; if it may use none of them, it doesn't."""
    allowed = os.sched_getaffinity(0)
    if not cores & allowed or allowed <= cores:
        return False
    os.sched_setaffinity(0, cores & allowed)
    return True


def free_port() -> int:
    """A TCP port of this machine that nothing listens on. It lies below the ports that Linux hands out by itself
    (32768 and up), so that no other program gets it before a rank listens there."""
    while True:
        port = secrets.choice(range(20_000, 32_768))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def network_interface_to(address: str) -> str | None:
    """The network interface of this machine on the way to `address`; None for a loopback one or none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if not own.startswith("127.") and any(one.address == own for one in addresses):
                return str(name)
    return None


Arithmetic = Literal["bf16", "tf32", "fp32"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, by the vendor's data sheet.

    - `words`: a device is this GPU if all of them are words of its name in CUDA.
    - `bf16`, `tf32`, `fp32`: TFLOP/s without sparsity: of tensor cores in bf16 and in TF32, and of fp32 without them.
    - `memory`: GiB (the data sheets call them GB). `memory_bandwidth`: GB/s.
    - `link`: GB/s that a GPU can send to the others of its node, in one direction: half of what the data sheets give
      for NVLink or PCIe. Bridges that join only pairs of PCIe cards don't count.
    - `network`: GB/s that a GPU can send to other nodes in a typical cluster. For SXM it is the network of NVIDIA's own
      servers (DGX A100: 200 Gb/s for each GPU; DGX H100 and H200: 400 Gb/s); for PCIe cards, half of that.
    """

    words: str
    bf16: float
    tf32: float
    fp32: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float

    def flops(self, arithmetic: Arithmetic) -> float:
        """Peak FLOP/s."""
        return getattr(self, arithmetic) * 1e12


# The documents of NVIDIA that have these figures. Most were compared by way of pages that quote them, but those of the
# NVL models and of GH200 were not. Where a sheet gives arithmetic with sparsity only, this is half of it.
# - A100: data sheet 1758950, which has the SXM and PCIe models: 312 TFLOP/s; 1,555, 1,935 or 2,039 GB/s; NVLink 600 and
#   PCIe 4.0 64 GB/s in both directions together.
# - H100 and H200 SXM, H100 PCIe: white paper "H100 Tensor Core GPU Architecture", which gives dense figures (989.4, 756
#   TFLOP/s); memory from the data sheets (3.35, 4.8 and 2 TB/s; product brief PB-11133 for PCIe); NVLink 900 GB/s; PCIe
#   5.0 128 GB/s.
# - H100 NVL and H200 NVL: their data sheets: 1,671 TFLOP/s with sparsity, 3.9 and 4.8 TB/s. The bridges of 600 and
#   900 GB/s join two cards, or four H200.
# - GH200: data sheet of the model with 96 GB: 4 TB/s, and arithmetic as of H100 SXM.
# - L40S: data sheet: 362.05 TFLOP/s, 864 GB/s, PCIe 4.0, no NVLink.
# - Networks: user guide of DGX A100 (DU-09821: eight ConnectX-6 of 200 Gb/s), reference architecture of DGX BasePOD
#   (DGX H100 and H200: eight ConnectX-7 of 400 Gb/s).
_HOPPER = {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}
_HOPPER_NVL = {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}
_A100 = {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}

# A name in CUDA belongs to the first GPU whose words it has.
GPUS: dict[str, Gpu] = {
    "gh200": Gpu("GH200", **_HOPPER, memory=96, memory_bandwidth=4000, link=450, network=50),
    "h200-nvl": Gpu("H200 NVL", **_HOPPER_NVL, memory=141, memory_bandwidth=4800, link=64, network=25),
    "h200": Gpu("H200", **_HOPPER, memory=141, memory_bandwidth=4800, link=450, network=50),
    "h100-nvl": Gpu("H100 NVL", **_HOPPER_NVL, memory=94, memory_bandwidth=3900, link=64, network=25),
    "h100-pcie": Gpu(
        "H100 PCIe", bf16=756.0, tf32=378.0, fp32=51.0, memory=80, memory_bandwidth=2000, link=64, network=25
    ),
    "h100-sxm": Gpu("H100", **_HOPPER, memory=80, memory_bandwidth=3350, link=450, network=50),
    "a100-80gb-pcie": Gpu("A100 80GB PCIe", **_A100, memory=80, memory_bandwidth=1935, link=32, network=12.5),
    "a100-80gb": Gpu("A100 80GB", **_A100, memory=80, memory_bandwidth=2039, link=300, network=25),
    "a100-40gb-pcie": Gpu("A100 PCIE 40GB", **_A100, memory=40, memory_bandwidth=1555, link=32, network=12.5),
    "a100-40gb": Gpu("A100", **_A100, memory=40, memory_bandwidth=1555, link=300, network=25),
    "l40s": Gpu("L40S", bf16=362.0, tf32=183.0, fp32=91.6, memory=48, memory_bandwidth=864, link=32, network=12.5),
}


def gpu_named(name: str) -> Gpu:
    """The GPU with this key of GPUS. Raises UserError, which lists the keys."""
    if name not in GPUS:
        raise UserError(f"--gpu: {name!r} isn't known; choose {', '.join(sorted(GPUS))}")
    return GPUS[name]


def gpu_of_device(device: str) -> Gpu | None:
    """The GPU that CUDA calls `device`; None for an unknown one, and for a slice of a GPU (MIG)."""
    words = set(re.split(r"\W+", device))
    if "MIG" in words:
        return None
    return next((gpu for gpu in GPUS.values() if words.issuperset(gpu.words.split())), None)


CPU = "cpu"
_WIDTH, _SECONDS = 512, 0.3  # of the products that are timed, and for how long
_PRODUCTS = """
import sys, time
import numpy as np
width, seconds = int(sys.argv[1]), float(sys.argv[2])
matrix = np.random.default_rng(0).random((width, width), dtype=np.float32)
best, begun = float("inf"), time.process_time()
while (started := time.process_time()) - begun < seconds:
    matrix @ matrix
    best = min(best, time.process_time() - started)
print(best)
"""
# The share of the rate of wide products that training reached on an AVX-512 Xeon, in processor seconds, fp32, rows of
# 512 and 114 tokens: 19 % at a width of 64, 22 % at 128, 39 % at 256 and 46 % at 512 (t5-v1.1-1m, 5m, 15m and small).
_MOST, _HALF_AT = 0.6, 150


@cache
def product_flops() -> float:
    """FLOP/s of all cores together in fp32 matrix products: of one core, by its processor time, times the cores.

    This is the rate of an idle machine. With numpy's own threads, a product on a busy machine would take ten times as
    long, since the threads wait for each other.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", _PRODUCTS, str(_WIDTH), str(_SECONDS)],
        env={**os.environ, **one_thread},
        capture_output=True,
        text=True,
        check=True,
    )
    return 2 * _WIDTH**3 / float(done.stdout) * min(threads_per_rank(1), psutil.cpu_count(logical=False) or 1)


def cpu_share(width: int) -> float:
    """The share of `product_flops` that training a model of this width reaches: the wider, the more is products."""
    return _MOST * width / (width + _HALF_AT)


def this_cpu() -> Gpu:
    """This machine in the place of a GPU. bf16 counts like fp32: numpy has none that could be timed."""
    rate = product_flops() / 1e12
    gigabytes = available_memory() / 2**30
    return Gpu(CPU, rate, rate, rate, gigabytes, memory_bandwidth=0, link=1, network=1)
