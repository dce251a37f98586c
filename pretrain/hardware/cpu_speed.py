"""How fast this machine's CPU trains, measured in half a second."""

import os
import subprocess
import sys
from functools import cache

import psutil

from data_pipeline.foundation.processes import available_memory
from pretrain.hardware.gpus import Gpu
from pretrain.hardware.machine import threads_per_rank

NAME = "cpu"
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


def share(width: int) -> float:
    """The share of `product_flops` that training a model of this width reaches: the wider, the more is products."""
    return _MOST * width / (width + _HALF_AT)


def this_cpu() -> Gpu:
    """This machine in the place of a GPU. bf16 counts like fp32: numpy has none that could be timed."""
    rate = product_flops() / 1e12
    gigabytes = available_memory() / 2**30
    return Gpu(frozenset(), rate, rate, rate, gigabytes, memory_bandwidth=0, link=1, network=1)
