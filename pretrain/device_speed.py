"""The speed of devices: of GPUs by their data sheets, of this machine's CPU by a measurement of 0.3 s."""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import Literal

import psutil

from data_pipeline.base.errors import UserError
from data_pipeline.base.processes import PYTHON
from pretrain.hardware import threads_per_rank

GPU_MFU = 0.31  # nanoT5's on one A100
GPUS_PER_NODE = 8  # in common servers
Arithmetic = Literal["bf16", "tf32", "fp32"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, by the vendor's data sheet.

    Attributes:
        words: a device is this GPU if its name in CUDA has all of these words.
        bf16, tf32: TFLOP/s of tensor cores, without sparsity.
        fp32: TFLOP/s without tensor cores.
        memory: GiB (the data sheets call them GB).
        link: GB/s from a GPU to the others of its node: half of the data sheet's figure for NVLink or PCIe, which adds
            up both directions. Bridges between pairs of PCIe cards don't count.
        network: GB/s from a GPU to other nodes in a typical cluster. SXM: the network of NVIDIA's own servers (DGX
            A100: 200 Gb/s per GPU; DGX H100, H200 and B200: 400 Gb/s). PCIe cards: half of that.
    """

    words: str
    bf16: float
    tf32: float
    fp32: float
    memory: float
    link: float
    network: float

    def flops(self, arithmetic: Arithmetic) -> float:
        """Peak FLOP/s."""
        return getattr(self, arithmetic) * 1e12


# NVIDIA's documents with these figures; where a sheet gives arithmetic with sparsity only, this is half of it.
# - A100: data sheet 1758950. H100 and H200 SXM, H100 PCIe: white paper "H100 Tensor Core GPU Architecture"; memory from
#   their data sheets and product brief PB-11133. L40S: its data sheet. These were compared by way of pages that quote
#   them; the data sheets of H100 NVL, H200 NVL and GH200 (96 GB) were not.
# - B200: HGX B200 in NVIDIA's "Blackwell Architecture Technical Brief" (arithmetic, NVLink of 1.8 TB/s); 180 GB
#   and eight ConnectX-7 a node, as in systems entered for MLPerf. Compared by way of pages that quote them.
# - Networks: user guide of DGX A100 (DU-09821: eight ConnectX-6 of 200 Gb/s), reference architecture of DGX BasePOD
#   (DGX H100 and H200: eight ConnectX-7 of 400 Gb/s).
_HOPPER = 989.4, 494.7, 66.9
_HOPPER_NVL = 835.5, 417.5, 60.0
_A100 = 312.0, 156.0, 19.5

# The attributes in order. A device is the first GPU whose words its name has.
GPUS: dict[str, Gpu] = {
    "b200": Gpu("B200", 2250.0, 1100.0, 80.0, 180, 900, 50),
    "gh200": Gpu("GH200", *_HOPPER, 96, 450, 50),
    "h200-nvl": Gpu("H200 NVL", *_HOPPER_NVL, 141, 64, 25),
    "h200": Gpu("H200", *_HOPPER, 141, 450, 50),
    "h100-nvl": Gpu("H100 NVL", *_HOPPER_NVL, 94, 64, 25),
    "h100-pcie": Gpu("H100 PCIe", 756.0, 378.0, 51.0, 80, 64, 25),
    "h100-sxm": Gpu("H100", *_HOPPER, 80, 450, 50),
    "a100-80gb-pcie": Gpu("A100 80GB PCIe", *_A100, 80, 32, 12.5),
    "a100-80gb": Gpu("A100 80GB", *_A100, 80, 300, 25),
    "a100-40gb-pcie": Gpu("A100 PCIE 40GB", *_A100, 40, 32, 12.5),
    "a100-40gb": Gpu("A100", *_A100, 40, 300, 25),
    "l40s": Gpu("L40S", 362.0, 183.0, 91.6, 48, 32, 12.5),
}


def gpu_named(name: str) -> Gpu:
    """The GPU with this key of GPUS. Raises UserError, which lists the keys."""
    if name not in GPUS:
        raise UserError(
            f"--gpu: {name!r} isn't known; choose {', '.join(sorted(GPUS))}, or give --gpu-tflops, --gpu-memory and "
            "--gpu-bandwidth"
        )
    return GPUS[name]


def gpu_of_ones_own(name: str, tflops: float | None, memory: float | None, bandwidth: float | None) -> Gpu:
    """A GPU that GPUS lacks. `tflops`: in the run's precision; `memory`: GiB; `bandwidth`: GB/s to another GPU, in the
    same node or not. Raises UserError if one of them is missing."""
    if tflops is None or memory is None or bandwidth is None:
        raise UserError("--gpu-tflops, --gpu-memory, --gpu-bandwidth: give all three or none")
    return Gpu(name, tflops, tflops, tflops, memory, link=bandwidth, network=bandwidth)


def gpu_of_device(device: str) -> Gpu | None:
    """The GPU that CUDA calls `device`; None for an unknown one, and for a slice of a GPU (MIG)."""
    words = set(re.split(r"\W+", device))
    if "MIG" in words:
        return None
    return next((gpu for gpu in GPUS.values() if words.issuperset(gpu.words.split())), None)


_WIDTH, _SECONDS = 512, 0.3  # width of the timed matmuls, and for how long they run
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
# Fitted to the share of `product_flops` that training reached on an AVX-512 Xeon, in CPU seconds, fp32, rows of 512 and
# 114 tokens: 19 % at a width of 64, 22 % at 128, 39 % at 256 and 46 % at 512 (t5-v1.1-1m, 5m, 15m and small).
_MOST, _HALF_AT = 0.6, 150


@cache
def product_flops() -> float:
    """FLOP/s of all cores together in fp32 matmuls, on an idle machine: the rate of one core times the cores.

    One core is timed in CPU seconds. On a busy machine, numpy's own threads would wait for each other, and a matmul
    would take ten times as long.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [*PYTHON, "-c", _PRODUCTS, str(_WIDTH), str(_SECONDS)],
        env={**os.environ, **one_thread},
        capture_output=True,
        text=True,
        check=True,
    )
    return 2 * _WIDTH**3 / float(done.stdout) * min(threads_per_rank(1), psutil.cpu_count(logical=False) or 1)


def cpu_share(width: int) -> float:
    """The share of `product_flops` that training a model of this width reaches. Wider models spend more of their time
    in matmuls."""
    return _MOST * width / (width + _HALF_AT)
