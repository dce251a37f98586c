"""Training steps of T5 v1.1 base: how fast with which micro-batch and optimizer, and where the time goes."""

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from pretrain.models import attention, encoder_decoder
from pretrain.zero.ranks import process_group
from tests.gpu.report import Report
from tests.gpu.workload import OPTIMIZERS, Workload, data_sheet_peak, free, product_rate, seconds_of

MICRO_BATCHES = (64, 16, 32, 128)
TOP = 30  # kernels of the profile
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


def throughput(report: Report) -> None:
    """AdamW plain and compiled, the other optimizers, the other micro-batches, and at last those compiled."""
    work = Workload(report)
    measured = _measured_peak(report)
    micro_batches = (4, 2) if report.small else MICRO_BATCHES
    first, *others = micro_batches
    cases = [("adamw", first, False), ("adamw", first, True)]
    cases += [(name, first, False) for name in OPTIMIZERS if name != "adamw"]
    cases += [("adamw", size, compiled) for compiled in (False, True) for size in others]
    if report.small:
        cases = [case for case in cases if not case[2]]
        report.skip("compiled layers", "the compiler takes too long for a check on a CPU")
        report.skip("memory, launches and synchronizations", "no GPU")
    with process_group(cpu_threads=1, seconds=600):
        for optimizer, micro_batch, compiled in cases:
            with report.part(f"{optimizer}, {micro_batch}, {'compiled' if compiled else 'eager'}"):
                _measure(report, work, optimizer, micro_batch, compiled, measured)


def _measured_peak(report: Report) -> float:
    """FLOP/s of a large product."""
    width = 256 if report.small else 8192
    measured = product_rate(width, width, width, report.device, 0.05 if report.small else 0.3)
    report.fact("measured_tflops", measured / 1e12)
    report.fact("data_sheet_tflops", (peak := data_sheet_peak(report.device)) and peak / 1e12)
    return measured


def _measure(report: Report, work: Workload, optimizer: str, micro_batch: int, compiled: bool, measured: float) -> None:
    free(report.device)
    with work.stepping(micro_batch, work.config(optimizer, compiled)) as (_, step):
        started = time.perf_counter()
        step()
        step()
        if report.cuda:
            torch.cuda.synchronize()
        warm = time.perf_counter() - started
        seconds = seconds_of(step, report.device, 0.05 if report.small else 1.5)
        rate = work.flops / seconds
        row: dict[str, Any] = {
            "optimizer": optimizer,
            "micro_batch": micro_batch,
            "compiled": compiled,
            "step_ms": seconds * 1e3,
            "tokens_per_second": work.tokens / seconds,
            "mfu_of_measured": rate / measured,
            "first_two_steps_s": warm,
        }
        if report.cuda:
            if peak := data_sheet_peak(report.device):
                row["mfu_of_data_sheet"] = rate / peak
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            row["syncs"] = _syncs(step)
            events = _profiled(step, report).events()
            row["launches"] = sum(event.name in LAUNCHES for event in events)
    report.row("steps", **row)


def _syncs(step: Callable[[], None]) -> int:
    """How often one step makes the host wait for the GPU, as PyTorch counts it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in seen)


def _profiled(step: Callable[[], None], report: Report) -> torch.profiler.profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if report.cuda else [])]
    with torch.profiler.profile(activities=activities) as profiled:
        step()
        if report.cuda:
            torch.cuda.synchronize()
    return profiled


def profile(report: Report) -> None:
    """One step: the kernels that take most of it, and the share of the time in which the GPU does nothing."""
    work = Workload(report)
    micro_batch = 4 if report.small else MICRO_BATCHES[0]
    if not report.cuda:
        report.skip("idle share", "no GPU: these are the operations of a CPU")
    with process_group(cpu_threads=1, seconds=600), work.stepping(micro_batch, work.config()) as (_, step):
        for _ in range(3):
            step()
        profiled = _profiled(step, report)
        by_name: dict[str, list[float]] = {}
        spans = []
        for event in profiled.events():
            if report.cuda and event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                spans.append((event.time_range.start, event.time_range.end))
                by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
            elif not report.cuda:
                by_name.setdefault(event.name, []).append(event.self_cpu_time_total)
    whole = sum(map(sum, by_name.values()))
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]:
        report.row("kernels", name=name[:120], ms=sum(times) / 1e3, share=sum(times) / whole, calls=len(times))
    if spans:
        length = max(end for _, end in spans) - min(start for start, _ in spans)
        report.fact("step_ms", length / 1e3)
        report.fact("idle_share", 1 - busy(spans) / length)


def busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of `spans`: kernels of several streams may overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def ablations(report: Report) -> None:
    """A step without one of its parts. What a part costs is the difference from the whole."""
    work = Workload(report)
    micro_batch = 4 if report.small else MICRO_BATCHES[0]
    at_least = 0.05 if report.small else 1.0
    with process_group(cpu_threads=1, seconds=600):
        for name, without in ABLATIONS.items():
            if without is _without_loss and not hasattr(encoder_decoder, "configured_losses"):
                report.skip(name, "the loss and its product are one")
                continue
            with report.part(name), without(), work.stepping(micro_batch, work.config()) as (engine, step):
                if name == "without the optimizer":
                    engine.deepspeed.optimizer.optimizer.step = lambda *_: None
                report.row("steps", step=name, ms=1e3 * seconds_of(step, report.device, at_least))
        for name, backward in (("the model alone, forward", False), ("the model alone, forward and backward", True)):
            with report.part(name):
                report.row("steps", step=name, ms=1e3 * _model_alone(report, work, micro_batch, backward, at_least))


def _model_alone(report: Report, work: Workload, micro_batch: int, backward: bool, at_least: float) -> float:
    """Seconds of the micro-batches of a step through the bare model, without DeepSpeed."""
    from pretrain import models

    model = models.build(work.config().model).to(report.device, torch.bfloat16).train()
    batches = work.batches(micro_batch)

    def passes() -> None:
        for batch in batches:
            with nullcontext() if backward else torch.no_grad():
                loss = model(**batch)["labels"].sum()
            if backward:
                loss.backward()
        model.zero_grad(set_to_none=False)

    seconds = seconds_of(passes, report.device, at_least)
    free(report.device)
    return seconds


@contextmanager
def _without_biases() -> Iterator[None]:
    """Attention without biases and masks: all that is left is what the fastest kernels do."""
    attend = attention.attend
    signature = inspect.signature(attend)

    def plain(*arguments: Any, **options: Any) -> torch.Tensor:
        bound = signature.bind(*arguments, **options)
        bound.arguments["bias"] = None
        return attend(*bound.args, **bound.kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend", plain)
        yield


@contextmanager
def _without_loss() -> Iterator[None]:
    """The logits are made, but their softmax isn't: the loss is the sum of one column."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_decoder, "configured_losses", lambda logits, *_: logits[..., 0].float())
        yield


ABLATIONS: dict[str, Callable[[], Any]] = {
    "whole": nullcontext,
    "without biases": _without_biases,
    "without the softmax of the loss": _without_loss,
    "without the optimizer": nullcontext,
}
