"""How fast this machine's CPU trains, measured in half a second. Doesn't import PyTorch, for `launch` asks too."""

import time
from functools import cache

from data_pipeline.foundation.memory import available
from pretrain.config import RunConfig
from pretrain.gpus import Gpu
from pretrain.models.config.base import ModelConfig
from pretrain.models.config.size import size_of
from pretrain.run.hardware import threads_per_rank

NAME = "cpu"
_WIDTH, _SECONDS = 1024, 0.5  # of the products that are timed, and for how long
# The share of the rate of wide products that training reached on an AVX-512 Xeon, in processor seconds, fp32, rows of
# 512 and 114 tokens: 24 % at a width of 64, 28 % at 128, 48 % at 256 and 58 % at 512 (t5-v1.1-1m, 5m, 15m and small).
_MOST, _HALF_AT = 0.75, 160


@cache
def product_flops() -> float:
    """FLOP/s of all cores together in fp32 matrix products, by numpy."""
    import numpy as np

    matrix = np.random.default_rng(0).random((_WIDTH, _WIDTH), dtype=np.float32)
    best, begun = float("inf"), time.perf_counter()
    while (started := time.perf_counter()) - begun < _SECONDS:
        matrix @ matrix
        best = min(best, time.perf_counter() - started)
    return 2 * _WIDTH**3 / best


def share(width: int) -> float:
    """The share of `product_flops` that training a model of this width reaches: the wider, the more is products."""
    return _MOST * width / (width + _HALF_AT)


def this_cpu() -> Gpu:
    """This machine in the place of a GPU. bf16 counts like fp32: numpy has none that could be timed."""
    rate = product_flops() / 1e12
    gigabytes = available() / 2**30
    return Gpu(frozenset(), rate, rate, rate, gigabytes, memory_bandwidth=0, link=1, network=1)


def seconds_left(
    config: RunConfig, model: ModelConfig, lengths: tuple[int, int], step: int = 0, ranks: int = 1
) -> float:
    """Seconds from `step` to the end of a run on this CPU, on which are all `ranks`.

    `model` is the run's with its vocabulary, `lengths` those of a row's inputs and targets.
    """
    ends = [*(ramp.until_step for ramp in config.batch.ramp_up), config.run.max_steps]
    rows = 0
    for end in (min(end, config.run.max_steps) for end in ends):
        rows += max(0, end - step) * config.batch.rows(end - 1)
        step = max(step, end)
    cores = threads_per_rank(1)
    used = min(cores, ranks * (config.run.cpu_threads or cores))
    return rows * size_of(model).flops(*lengths) / (share(model.width) * product_flops() * used / cores)
