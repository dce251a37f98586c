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

from checks.gpu.report import Report
from checks.gpu.workload import OPTIMIZERS, Workload, data_sheet_peak, free, product_rate, seconds_of
from pretrain.functional.arithmetic import linear
from pretrain.models import attention
from pretrain.models import model as model_module
from pretrain.zero.ranks import process_group

MICRO_BATCHES = (64, 16, 32, 128)
ROWS_OF_PEER = 16  # of transformers' micro-batch: it keeps (rows, heads, queries, keys) of every layer
NOISE = 0.05  # of a time
KERNELS = ("forward", "backward_queries", "backward_keys")
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
    seconds: dict[tuple[str, int, bool], float] = {}
    with process_group(cpu_threads=1, seconds=600):
        for case in cases:
            optimizer, micro_batch, compiled = case
            with report.part(f"{optimizer}, {micro_batch}, {'compiled' if compiled else 'eager'}"):
                seconds[case] = _measure(report, work, optimizer, micro_batch, compiled, measured)
            if case == ("adamw", first, False):
                with report.part("transformers"):
                    peer = _seconds_of_peer(report, work, 2 if report.small else ROWS_OF_PEER)
                    report.row("peers", peer="transformers, PyTorch's AdamW", step_ms=peer * 1e3)
                    if report.cuda:
                        report.expect("as fast as transformers", seconds[case] <= peer, [seconds[case], peer])
    if report.cuda:
        least = work.flops / measured
        for case, taken in seconds.items():
            report.expect(f"{case}: no faster than its products", taken >= least * (1 - NOISE), [taken, least])
        with report.part("compiled layers"):
            plain, compiled_ = (seconds["adamw", first, form] for form in (False, True))
            report.expect("as fast compiled", compiled_ <= plain * (1 + NOISE), [compiled_, plain])


def _seconds_of_peer(report: Report, work: Workload, rows: int) -> float:
    """Seconds of a step of transformers' T5 of the same shapes in a plain loop, all in bf16, with fused AdamW."""
    from transformers import T5Config, T5ForConditionalGeneration

    shapes = work.config().model
    config = T5Config(
        vocab_size=shapes.vocab_size,
        num_layers=shapes.num_encoder_layers,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        **{name: getattr(shapes, name) for name in ("d_model", "d_kv", "d_ff", "num_heads", "num_decoder_layers")},
    )
    model = T5ForConditionalGeneration(config).to(report.device, torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = work.batches(rows)

    def step() -> None:
        for batch in batches:
            model(input_ids=batch["encoder_input_ids"], labels=batch["labels"]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return seconds_of(step, report.device, 0.05 if report.small else 1.0)


def _measured_peak(report: Report) -> float:
    """FLOP/s of a large product."""
    width = 256 if report.small else 8192
    measured = product_rate(width, width, width, report.device, 0.05 if report.small else 0.3)
    report.fact("measured_tflops", measured / 1e12)
    report.fact("data_sheet_tflops", (peak := data_sheet_peak(report.device)) and peak / 1e12)
    return measured


def _measure(
    report: Report, work: Workload, optimizer: str, micro_batch: int, compiled: bool, measured: float
) -> float:
    """Adds a row with the figures of a step, and returns its seconds."""
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
    return seconds


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
        unprofiled = seconds_of(step, report.device, 0.0)
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
        working = busy(spans) / 1e6
        least = work.flops / _measured_peak(report)
        report.expect("the GPU works most of the time", working > unprofiled / 2, [working, unprofiled])
        report.expect("the products are in the profile", working > least * (1 - NOISE), [working, least])
        missing = [name for name in KERNELS if name not in by_name]
        report.expect("this project's kernels run", not missing, missing)


def busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of `spans`: kernels of several streams may overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def ablations(report: Report) -> None:
    """A step without one of its parts. What a part costs is the difference from the whole, and not negative."""
    work = Workload(report)
    micro_batch = 4 if report.small else MICRO_BATCHES[0]
    at_least = 0.05 if report.small else 1.0
    seconds: dict[str, float] = {}
    with process_group(cpu_threads=1, seconds=600):
        for name, without in ABLATIONS.items():
            with report.part(name), without(), work.stepping(micro_batch, work.config()) as (engine, step):
                if name == "without the optimizer":
                    engine.deepspeed.optimizer.optimizer.step = lambda *_: None
                seconds[name] = seconds_of(step, report.device, at_least)
        for name, backward in (("the model alone, forward", False), ("the model alone, forward and backward", True)):
            with report.part(name):
                seconds[name] = _model_alone(report, work, micro_batch, backward, at_least)
    for name, taken in seconds.items():
        report.row("steps", step=name, ms=1e3 * taken)
        if report.cuda:
            most = seconds["whole"] * (1 + NOISE)
            report.expect(f"{name}: no slower than the whole", taken <= most, [taken, most])


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

    def column(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        return logits[..., 0].float()

    def of_states(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        return column(linear(x, weight, bias))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "token_losses", column)  # on a CPU
        patch.setattr(model_module, "chunked_cross_entropy", of_states)  # on a GPU
        yield


ABLATIONS: dict[str, Callable[[], Any]] = {
    "whole": nullcontext,
    "without biases": _without_biases,
    "without the softmax of the loss": _without_loss,
    "without the optimizer": nullcontext,
}
