"""What the machine is, and how fast it multiplies and copies."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.gpu.report import Report
from tests.gpu.workload import data_sheet_peak, product_rate, seconds_of

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
    source = torch.ones(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    copied = seconds_of(lambda: target.copy_(source), report.device, seconds)
    report.fact("copy_gb_per_second_read_and_written", 2 * size / copied / 1e9)
    if report.cuda:
        pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        copied = seconds_of(lambda: pinned.copy_(target[: size // 4], non_blocking=True), report.device, seconds)
        report.fact("copy_to_pinned_gb_per_second", size / 4 / copied / 1e9)
