"""What the machine is, what a launch costs on it, and how fast it multiplies and copies."""

import os
import platform
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from checks.gpu.report import Report
from checks.gpu.workload import data_sheet_peak, product_rate, seconds_of
from data_pipeline.base.packages import version_of

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "numpy")


def machine(report: Report) -> None:
    report.fact("python", platform.python_version())
    report.fact("cores", len(os.sched_getaffinity(0)))
    for name in PACKAGES:
        report.fact(name, version_of(name))
    if report.cuda:
        properties = torch.cuda.get_device_properties(report.device)
        report.fact("gpu", properties.name)
        report.fact("memory_gib", properties.total_memory / 2**30)
        report.fact("cuda", torch.version.cuda)
        report.fact("cudnn", torch.backends.cudnn.version())
    with report.part("launches"):
        launches(report)
    with report.part("rates"):
        rates(report)
    with report.part("deepspeed"):
        report.expect("deepspeed imports", _deepspeed_computes_on(report.device.type), report.device.type)


def _deepspeed_computes_on(device: str) -> bool:
    import deepspeed

    from pretrain.engine.deepspeed_private import check_version

    check_version()
    return deepspeed.accelerator.get_accelerator().device_name() == device


@triton.jit
def _add_one(X):
    tl.store(X, tl.load(X) + 1)


def launches(report: Report) -> None:
    """µs of a launch: the host's until it returns, and the GPU's for each of many small kernels in a row."""
    number = 50 if report.small else 1000
    x = torch.zeros(1, device=report.device)

    def eager() -> None:
        for _ in range(number):
            x.add_(1)

    def by_triton() -> None:
        for _ in range(number):
            _add_one[(1,)](x)

    for name, work in {"python": eager, "triton": by_triton, "graph": recorded(eager, report)}.items():
        before = float(x)
        work()
        report.expect(f"{name}: each launch adds one", float(x) == before + number, [before, float(x)])
        started = time.perf_counter()
        work()
        of_host = time.perf_counter() - started
        seconds = seconds_of(work, report.device, 0.05 if report.small else 0.3)
        report.row("launches", by=name, host_us=of_host / number * 1e6, us=seconds / number * 1e6)


def recorded(work: Callable[[], None], report: Report) -> Callable[[], object]:
    """What replays `work` as a CUDA graph; on a CPU, `work`."""
    if not report.cuda:
        report.skip("a graph's launches", "no GPU: they are those of Python")
        return work
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def rates(report: Report) -> None:
    """FLOP/s of the products of T5 v1.1 base and large over 65,536 tokens, whose widths are multiples of 768 and 1,024,
    and bytes/s that a copy reads and writes."""
    square, rows, size = 8192, 65_536, 2**32
    inner = {768: (768, 2304, 4096), 1024: (1024, 3072, 5632)}
    if report.small:
        square, rows, size, inner = 256, 1024, 2**22, {64: (64, 192)}
        report.skip("sizes", "smaller ones on a CPU")
    seconds = 0.02 if report.small else 0.3
    shapes = [(square, square, square), *((rows, one, width) for one, widths in inner.items() for width in widths)]
    found = {" × ".join(map(str, shape)): product_rate(*shape, report.device, seconds) / 1e12 for shape in shapes}
    report.fact("bf16_products_tflops", found)
    source = torch.ones(size, dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    copied = seconds_of(lambda: target.copy_(source), report.device, seconds)
    report.fact("copy_gb_per_second_read_and_written", 2 * size / copied / 1e9)
    if peak := data_sheet_peak(report.device):  # tensor cores reach half of it in TF32, and other cores a fifteenth
        report.fact("data_sheet_tflops", peak / 1e12)
        share = max(found.values()) * 1e12 / peak
        report.expect("products in bf16 on tensor cores", 0.5 < share < 1.05, share)
