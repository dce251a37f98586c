"""What the machine is, and how fast it multiplies and copies."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from checks.gpu.report import Report
from checks.gpu.workload import data_sheet_peak, product_rate, seconds_of
from pretrain.hardware import gpu_of_device

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "numpy")


def machine(report: Report) -> None:
    cuda = report.cuda
    report.fact("python", platform.python_version())
    report.fact("cores", len(os.sched_getaffinity(0)))
    for name in PACKAGES:
        report.fact(name, _version(name))
    report.fact("nvcc", shutil.which("nvcc"))
    report.expect("deepspeed imports", _deepspeed_computes_on(report.device.type), report.device.type)
    if cuda:
        properties = torch.cuda.get_device_properties(report.device)
        report.fact("gpu", properties.name)
        report.fact("gpus", torch.cuda.device_count())
        report.fact("memory_gib", properties.total_memory / 2**30)
        report.fact("cuda", torch.version.cuda)
        report.fact("cudnn", torch.backends.cudnn.version())
        report.fact("nccl", ".".join(map(str, torch.cuda.nccl.version())))
        report.fact("tf32_by_default", torch.get_float32_matmul_precision() != "highest")
    _rates(report)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _deepspeed_computes_on(device: str) -> bool:
    from pretrain.zero.deepspeed_private import check_version, deepspeed

    check_version()
    return deepspeed.accelerator.get_accelerator().device_name() == device


def _rates(report: Report) -> None:
    """A step of T5 v1.1 base is made of products with 768 as inner or outer size, over 65,536 tokens."""
    square, rows, columns, size = 8192, 65_536, (768, 2304, 4096), 2**32
    if report.small:
        square, rows, columns, size = 256, 1024, (64, 192), 2**22
        report.skip("sizes", "smaller ones on a CPU")
    seconds = 0.05 if report.small else 0.5
    shapes = [(square, square, square), *((rows, 768, width) for width in columns)]
    rates = {}
    for shape in shapes:
        rates[" × ".join(map(str, shape))] = product_rate(*shape, report.device, seconds) / 1e12
    report.fact("bf16_products_tflops", rates)
    report.fact("data_sheet_tflops", (peak := data_sheet_peak(report.device)) and peak / 1e12)
    largest, *of_model = rates.items()
    if peak:  # tensor cores reach half of it in TF32, and other cores a fifteenth
        report.expect("products in bf16 on tensor cores", 0.5 < largest[1] * 1e12 / peak < 1.05, [largest[1], peak])
    source = torch.ones(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    copied = seconds_of(lambda: target.copy_(source), report.device, seconds)
    bandwidth = 2 * size / copied
    report.fact("copy_gb_per_second_read_and_written", bandwidth / 1e9)
    if report.cuda:
        gpu = gpu_of_device(torch.cuda.get_device_name(report.device))
        if gpu:
            share = bandwidth / 1e9 / gpu.memory_bandwidth
            report.expect("memory is as fast as its data sheet says", 0.5 < share < 1.05, share)
        for (name, rate), (_, inner, width) in zip(of_model, shapes[1:], strict=True):
            most = roofline(rows, inner, width, largest[1] * 1e12, bandwidth) / 1e12
            report.expect(f"{name} reaches half of its roofline", rate > most / 2, [rate, most])
        pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        copied = seconds_of(lambda: pinned.copy_(target[: size // 4], non_blocking=True), report.device, seconds)
        pageable = torch.empty_like(pinned, pin_memory=False)
        slower = seconds_of(lambda: pageable.copy_(target[: size // 4]), report.device, seconds)
        report.fact("copy_to_pinned_gb_per_second", size / 4 / copied / 1e9)
        report.fact("copy_to_pageable_gb_per_second", size / 4 / slower / 1e9)
        report.expect("pinned memory is faster", copied < slower, [copied, slower])


def roofline(rows: int, inner: int, columns: int, peak: float, bandwidth: float) -> float:
    """The most FLOP/s of a product in bf16 that reads both matrices once and writes the third (Williams et al. 2009).

    `peak` in FLOP/s, `bandwidth` in bytes/s.
    """
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    return min(peak, 2 * rows * inner * columns / moved * bandwidth)
