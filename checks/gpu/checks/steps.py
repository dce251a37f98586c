"""Training steps of shipped runs: how fast in which form, what their kernels are, and what each part costs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks.gpu.report import Report
from checks.gpu.trace import OURS, Trace
from checks.gpu.workload import (
    BASE,
    LARGE,
    WARM,
    Workload,
    data_sheet_peak,
    measured_peak,
    seconds_of,
)
from data_pipeline.loading.prefetch import on_device
from pretrain.engine.ranks import process_group
from pretrain.models.t5 import RelativePositionBias

NOISE = 0.05  # of a time
TOP = 30  # kernels of the profile
STEPS = 5  # with dropout, in which both forms must have the same bits


def profile(report: Report) -> None:
    """A step of 128 rows at once: its kernels by kind, the longest of them, launches, and the share in which the GPU is
    idle. Compiled first."""
    work = Workload(report)
    least = 1e3 * work.flops / measured_peak(report)
    with process_group(cpu_threads=1, seconds=600):
        for form in ("compiled", "graph", "eager"):
            with report.part(form):
                _profile(report, work, form, least)


def _profile(report: Report, work: Workload, form: str, least: float) -> None:
    """`least`: ms that the products of the step take."""
    with work.stepping(work.config(form, work.rows)) as (_, step):
        ms = 1e3 * seconds_of(step, report.device, 0.0, WARM)
        trace = Trace.of(step, report.device)
        report.expect(f"{form}: it runs as asked for", not work.told, work.told)
    _tell(report, form, ms, trace)
    if report.cuda:
        launched, wanted = trace.graph_launches, int(form == "graph")
        report.expect(f"{form}: its micro-batch is one graph or none", launched == wanted, launched)
        busy, missing = trace.busy, set(OURS) - {one.ours for one in trace.kernels}
        report.expect(f"{form}: the products are in it", busy > least * (1 - NOISE), [busy, least])
        report.expect(f"{form}: no faster than the kernels", ms > busy * (1 - NOISE), [ms, busy])
        report.expect(f"{form}: this project's kernels run", not missing, sorted(missing))


def _tell(report: Report, form: str, ms: float, trace: Trace) -> None:
    """`ms`: of a step without a profiler, whose cost for each launch may leave the GPU idle."""
    kinds, names = trace.sums(lambda one: one.kind), trace.sums(lambda one: one.name)
    whole = sum(taken for taken, _ in kinds.values())
    report.row(
        "profile",
        form=form,
        ms=ms,
        kernels_ms=whole,
        busy_ms=trace.busy,
        idle_share=1 - trace.busy / ms,
        idle_share_profiled=1 - trace.busy / trace.length,
        kernels=len(trace.kernels),
        launches=trace.launches,
        graph_launches=trace.graph_launches,
        waits=trace.waits,
    )
    for kind, (taken, calls) in kinds.items():
        report.row("kinds", form=form, kind=kind, ms=taken, share=taken / whole, calls=calls)
    for name, (taken, calls) in list(names.items())[:TOP]:
        report.row("kernels", form=form, name=name[:120], ms=taken, share=taken / whole, calls=calls)


def steps(report: Report) -> None:
    """Each form with 128 and with 64 rows a micro-batch, the same bits with a graph and without it, and large."""
    from pretrain.engine.construction import forget_compiled  # with DeepSpeed, which chooses its accelerator then

    work, large = Workload(report), Workload(report, LARGE)
    measured = measured_peak(report)
    half = work.rows // 2

    def timed(of: Workload, run: str, rows: int, *forms: str) -> None:
        forget_compiled()  # what has seen two numbers of rows is compiled for any, which is slower
        for form in forms:
            with report.part(f"{run}, {rows}, {form}"):
                _measure(report, of, run, form, rows, measured)

    with process_group(cpu_threads=1, seconds=600):
        timed(work, BASE, work.rows, "compiled", "graph", "eager")
        with report.part("the same bits"):
            _same_bits(report, work)
        timed(large, LARGE, half, "graph", "compiled")
        timed(work, BASE, half, "graph", "compiled", "eager")


def _measure(report: Report, work: Workload, run: str, form: str, rows: int, measured: float) -> None:
    """Adds a row with the figures of a step."""
    with work.stepping(work.config(form, rows)) as (_, step):
        first = seconds_of(step, report.device, 0.0, warm=0)
        seconds = seconds_of(step, report.device, 0.05 if report.small else 1.5, WARM)
        rate, peak = work.flops / seconds, data_sheet_peak(report.device)
        report.row(
            "steps",
            run=run,
            form=form,
            micro_batch=rows,
            ms=seconds * 1e3,
            tokens_per_second=work.tokens / seconds,
            mfu_of_data_sheet=peak and rate / peak,
            mfu_of_measured=rate / measured,
            peak_gb=torch.cuda.max_memory_allocated() / 1e9 if report.cuda else None,
            first_steps_ms=first * 1e3,
        )
        report.expect(f"{run}, {rows}, {form}: it runs as asked for", not work.told, work.told)
        if report.cuda:
            faster = rate / measured > 1 + NOISE
            report.expect(f"{run}, {rows}, {form}: no faster than its products", not faster, rate / measured)


def _same_bits(report: Report, work: Workload) -> None:
    """Losses and weights of a few steps with dropout, without a graph, again, and with a graph; layers aren't compiled.
    What differs between the first two doesn't repeat by itself."""
    rows = work.rows // 8

    def taken(graph: bool) -> list[Tensor]:
        changes = ["model.dropout_rate=0.1", "compute.compile=false"]
        config = work.config("graph" if graph else "eager", rows, *changes)
        with work.stepping(config, work.batches(rows)[:2]) as (engine, step):
            losses = torch.tensor([step() for _ in range(STEPS)], dtype=torch.float64)
            return [losses, *(one.detach().cpu().clone() for one in engine.module.parameters())]

    def differing(one: list[Tensor], other: list[Tensor]) -> dict[str, Any]:
        unequal = sum(not torch.equal(*pair) for pair in zip(one[1:], other[1:], strict=True))
        return {"losses": float((one[0] - other[0]).abs().max()), "parameters": unequal}

    first = taken(False)
    report.fact("losses", first[0])
    report.row("bits", of="eager again", **(again := differing(first, taken(False))))
    report.row("bits", of="graph", **(graph := differing(first, taken(True))))
    report.expect("a graph has the bits of the eager step", not any(graph.values()) or any(again.values()), graph)


def parts(report: Report) -> None:
    """A compiled step of 128 rows without one of its parts, and with other optimizers. What a part costs is the
    difference from the whole."""
    work = Workload(report)
    at_least = 0.05 if report.small else 0.7

    def timed(
        name: str, *changes: str, prepare: Callable[[Any], object] = lambda _: None, one_target: bool = False
    ) -> None:
        batches = work.batches(work.rows)
        for batch in batches if one_target else ():
            batch["labels"].flatten()[1:] = -100
        config = work.config("compiled", work.rows, *changes)
        with report.part(name), work.stepping(config, batches) as (engine, step):
            prepare(engine)
            seconds = seconds_of(step, report.device, at_least, WARM)
            report.row("parts", step=name, ms=1e3 * seconds)
            if name == "whole":
                (batch,) = next(on_device([batches], report.device))
                alone = seconds_of(lambda: engine.measure(batch), report.device, at_least)
                report.row("parts", step="losses and gradients alone", ms=1e3 * alone)

    rate = "optimizer.learning_rate=1e-4"
    with process_group(cpu_threads=1, seconds=600):
        timed("whole")
        timed("one target: neither head nor loss", one_target=True)
        timed("without the bias's gradient", prepare=_detach_biases)
        timed("adafactor, as shipped", "optimizer.name=adafactor", rate)
        timed("muon", "optimizer.name=muon", rate)
        timed("adamw_scale", "optimizer.name=adamw_scale", rate)


def _detach_biases(engine: Any) -> None:
    found = [module for module in engine.module.modules() if isinstance(module, RelativePositionBias)]
    assert found
    for module in found:
        module.register_forward_hook(lambda _module, _inputs, diagonals: diagonals.detach())
