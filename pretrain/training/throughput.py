"""Throughput: tokens per second and model FLOPs utilization (MFU).

MFU is the arithmetic that the examples of a step need (forward and backward, no recomputation, no padding), divided by
what the devices can compute in that time at their peak. The peak of a known GPU is the vendor's dense figure. The peak
of any other device is the fastest of several measured matmuls.
"""

import time

import torch

from data_pipeline.loading.batch_layout import BatchLayout
from data_pipeline.loading.batches import TrainingBatches
from data_pipeline.loading.prefetch import example_sizes
from pretrain import models
from pretrain.config import RunConfig
from pretrain.device_speed import gpu_of_device
from pretrain.models.flops import Sizes, count_flops
from pretrain.training.prepare import PreparedRun

_WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of the timed matmuls
_TIMES = 3  # of each matmul
_LONG = 0.01  # s: a matmul that takes as long keeps the device busy
_PLACES, _ROWS_COUNTED = 8, 32  # the lengths of 32 rows at 8 places of a run stand for all rows


def peak_flops(config: RunConfig, device: torch.device) -> float:
    """The peak FLOP/s of one rank's `device` in the arithmetic of the run."""
    if device.type == "cuda" and (gpu := gpu_of_device(torch.cuda.get_device_name(device))):
        return gpu.flops("tf32" if config.precision == "fp32" and config.compute.tf32 else config.precision)
    return measured_peak(torch.bfloat16 if config.precision == "bf16" else torch.float32, device)


def measured_peak(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of several matmuls, which get wider until they keep the device busy."""
    best = 0.0
    generator = torch.Generator(device).manual_seed(0)  # leaves the global generator as it is
    for width in _WIDTHS:
        matrix = torch.rand(width, width, device=device, generator=generator).to(dtype)
        times: list[float] = []
        for _ in range(1 + _TIMES):
            started = time.perf_counter()
            result = matrix @ matrix
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            times.append(time.perf_counter() - started)
        seconds = min(times[1:])  # the first chooses a kernel
        best = max(best, 2 * width**3 / seconds)
        if seconds > _LONG:
            break
    return best


def rows_per_step(config: RunConfig) -> float:
    """The mean number of rows per step over the run, whose batch may grow."""
    return config.batch.rows_before(config.run.max_steps) / config.run.max_steps


def flops_per_step(setup: PreparedRun) -> float:
    """The mean FLOPs of a step of the run, forward and backward, counted on its own rows."""
    model, rows = models.meta_model(setup.model), rows_per_step(setup.config)
    batches = TrainingBatches(setup.stream, BatchLayout(0, 1, _ROWS_COUNTED, 1))
    whole = setup.config.run.max_steps * rows
    row_offsets = [int(whole * (place + 0.5) / _PLACES) for place in range(_PLACES)]
    counted = sum(count_flops(model, Sizes(*example_sizes(batches[first].batch).tolist())) for first in row_offsets)
    return rows * counted / (_PLACES * _ROWS_COUNTED)
