"""A plan as tables for a terminal, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pretrain.tools.plan.fit import GIB, HEAD, RESERVED, Option, Planner
from pretrain.tools.plan.states import Setting
from pretrain.tools.plan.steps import EFFICIENCY
from pretrain.zero.memory import SAFE

WIDTH = 80


def as_json(planner: Planner, gpus: int) -> dict[str, Any]:
    """Everything that `show` prints, in bytes, seconds and FLOPs."""
    question, options = planner.question, planner.options(gpus)
    compared = {count: planner.best(count) for count in planner.counts(gpus)}
    cheapest = planner.cheapest(compared.values())
    return {
        "run": question.config.run.name,
        "parameters": planner.parameters.count,
        **({"parameters_of_teacher": planner.teacher.num_parameters()} if planner.teacher else {}),
        "row": {key: value for key, value in asdict(question.rows).items() if key != "count"},
        "flops_per_row": {**planner.flops, "all": sum(planner.flops.values())},
        "gpu": question.gpu_name,
        "gpus": gpus,
        "assumed": {
            "mfu": question.mfu,
            "price_per_gpu_hour": question.price,
            "network_gigabytes_per_second": question.network,
            "gpus_per_node": question.gpus_per_node,
            "link_efficiency": EFFICIENCY,
            "usable_bytes": int(planner.usable),
        },
        "options": [_option(option) for option in options],
        "gpu_counts": {count: _option(option) if option else None for count, option in compared.items()},
        "cheapest": _option(cheapest) if cheapest else None,
    }


def _option(option: Option) -> dict[str, Any]:
    states = asdict(option.states)
    found: dict[str, Any] = {
        **asdict(option.setting),
        "gpus": option.cluster.gpus,
        "nodes": option.cluster.nodes,
        "fits": option.step is not None,
        "micro_batch_size": option.rows or None,
        "memory": {
            **states,
            "activations_of_one_row": option.one_row.layers,
            "logits_of_one_row": option.one_row.logits,
            "peak": option.peak,
        },
    }
    if option.step is not None and option.traffic is not None:
        found["bytes_sent_per_step"] = option.traffic.bytes
        found["collectives_per_step"] = option.traffic.number
        found["latency_per_step"] = option.step.latency
        found["share_hidden"] = option.step.hidden
        found["seconds_per_step"] = option.step.seconds
        found["mfu"] = option.step.mfu
        found["hours"], found["cost"] = option.hours, option.cost
    return found


def _show_run(planner: Planner, console: Console) -> None:
    config, row = planner.question.config, planner.question.rows
    console.print(
        f"{config.run.name}: {planner.parameters.count:,} parameters, {config.model.family}, {config.precision}, "
        f"{config.optimizer.name}; {config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows of "
        f"{row.inputs} inputs and {row.targets} targets",
        highlight=False,
    )


def show(planner: Planner, gpus: int, console: Console) -> None:
    question = planner.question
    options = planner.options(gpus)
    nodes = options[0].cluster.nodes
    _show_run(planner, console)
    console.print(
        f"{gpus} × {question.gpu_name} on {_number(nodes, 'node')}. Exact: parameters, FLOPs, bytes sent. From the "
        f"model's layers and DeepSpeed's rules: memory. Assumed: {question.mfu:.0%} MFU while computing, "
        f"${question.price:g} per GPU-hour, {question.network:g} GB/s per GPU between nodes, links at "
        f"{EFFICIENCY:.0%}.",
        highlight=False,
    )
    console.print(_arithmetic(planner))
    console.print(_memory(planner, options))
    console.print(
        f"Rows: the largest micro-batch within {planner.usable / GIB:.1f} GiB, {SAFE:.0%} of the memory but "
        f"{RESERVED / GIB:g} GiB for CUDA and NCCL. Off: nothing, the optimizer (o), or weights too (o+w) in host "
        "memory. Rec: layers recomputed (compute.activation_checkpointing). Acts, logits: at the peak of one row.",
        highlight=False,
    )
    if planner.teacher is not None:
        console.print(
            f"The teacher's {planner.teacher.num_parameters():,} parameters, {_gib(planner.bytes_of_teacher)} GiB, are "
            "whole on each GPU and among its weights.",
            highlight=False,
        )
    console.print(_time(options))
    if any(option.step and option.setting.offload != "none" for option in options):
        console.print("≥: the optimizer's step on the CPU comes on top.")
    compared = [(count, planner.best(count)) for count in planner.counts(gpus)]
    console.print(_counts(compared))
    cheapest = planner.cheapest(option for _, option in compared)
    if cheapest is None:
        console.print("None of these fits and ends in time. Try GPUs with more memory, or more of them.")
        return
    within = f" and ends within {question.days:g} days" if question.days else ""
    console.print(
        f"Cheapest that fits{within}: {_number(cheapest.cluster.gpus, 'GPU')}, stage {cheapest.setting.stage}, "
        f"{_words(cheapest.setting)}, {_bound(cheapest)}${cheapest.cost:,.0f} in {_days(cheapest)}.",
        highlight=False,
    )
    console.print(
        "Next: set deepspeed.zero_optimization.stage and compute.activation_checkpointing, and "
        "batch.micro_batch_size: auto, which measures."
    )


def show_cpu(planner: Planner, gpus: int, console: Console) -> None:
    """A plan of the one setting that matters on a CPU: nothing is shared with other devices."""
    question = planner.question
    _show_run(planner, console)
    console.print(
        f"This CPU: {question.gpu.fp32 * 1000:,.0f} GFLOP/s in wide fp32 products, measured now. "
        f"Assumed: training reaches {question.mfu:.0%} of that (--mfu).",
        highlight=False,
    )
    console.print(_arithmetic(planner))
    option = planner.best(gpus)
    if option is None or option.step is None:
        console.print(f"Not even one row fits into the {question.gpu.memory:.1f} GiB that are free.", highlight=False)
        return
    console.print(
        f"A step takes {_figures(option.step.seconds)} s, the run {_days(option)}. Memory: {_gib(option.peak)} GiB "
        f"with {option.rows} rows in a micro-batch, of {question.gpu.memory:.1f} GiB free.",
        highlight=False,
    )
    if question.days and option.hours > 24 * question.days:
        console.print(f"That is more than {question.days:g} days: take a smaller model, fewer steps, or GPUs.")


def _arithmetic(planner: Planner) -> Table:
    title = "Arithmetic of a row, forward and backward" + (", the teacher's forward" if planner.teacher else "")
    table = _table(title, ("", "GFLOP", "share"))
    whole = sum(planner.flops.values())
    for part, flops in planner.flops.items():
        name = "output matrix" if part == HEAD else part
        table.add_row(name, f"{flops / 1e9:,.1f}", f"{flops / whole:.1%}")
    table.add_row("all", f"{whole / 1e9:,.1f}", "")
    return table


def _memory(planner: Planner, options: Sequence[Option]) -> Table:
    heads = ("stage", "off", "rec", "weights", "optim", "grads", "buffers", "acts", "logits", "rows", "peak", "host")
    table = _table(f"Memory of a GPU, GiB of {planner.question.gpu.memory:g}", heads)
    for option in options:
        states = option.states
        table.add_row(
            *_setting(option.setting),
            *(
                _gib(size)
                for size in (
                    states.weights,
                    states.masters + states.moments,
                    states.gradients,
                    states.buffers + states.reduction,
                    option.one_row.layers,
                    option.one_row.logits,
                )
            ),
            str(option.rows) if option.rows else "none",
            _gib(option.peak),
            _gib(states.host) if states.host else "",
        )
    return table


def _time(options: Sequence[Option]) -> Table:
    heads = ("stage", "off", "rec", "rows", "GB sent", "latency", "hidden", "s/step", "waits", "MFU", "days", "cost")
    table = _table("A step and the run, at the largest micro-batch", heads)
    for option in options:
        if option.step is None or option.traffic is None:
            continue
        table.add_row(
            *_setting(option.setting),
            str(option.rows),
            f"{option.traffic.bytes / 1e9:,.1f}",
            f"{option.step.latency:.4f}",
            f"{option.step.hidden:.0%}",
            f"{_bound(option)}{_figures(option.step.seconds)}",
            _figures(option.step.exposed),
            f"{option.step.mfu:.0%}",
            _figures(option.hours / 24),
            f"${option.cost:,.0f}",
        )
    return table


def _counts(compared: Sequence[tuple[int, Option | None]]) -> Table:
    heads = ("GPUs", "nodes", "stage", "off", "rec", "rows", "peak", "s/step", "MFU", "days", "GPU-h", "cost")
    table = _table("Other numbers of GPUs, each with its fastest setting", heads)
    for count, option in compared:
        if option is None or option.step is None:
            table.add_row(str(count), "", "nothing fits")
            continue
        table.add_row(
            str(count),
            str(option.cluster.nodes),
            *_setting(option.setting),
            str(option.rows),
            _gib(option.peak),
            f"{_bound(option)}{_figures(option.step.seconds)}",
            f"{option.step.mfu:.0%}",
            _figures(option.hours / 24),
            f"{option.hours * count:,.0f}",
            f"${option.cost:,.0f}",
        )
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), min_width=WIDTH - 4
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _setting(setting: Setting) -> tuple[str, str, str]:
    offload = {"none": "", "optimizer": "o", "optimizer and weights": "o+w"}[setting.offload]
    return str(setting.stage), offload, "yes" if setting.checkpointing else ""


def _words(setting: Setting) -> str:
    recomputing = "with recomputing" if setting.checkpointing else "without recomputing"
    return recomputing if setting.offload == "none" else f"{recomputing}, {setting.offload} in host memory"


def _bound(option: Option) -> str:
    return "" if option.setting.offload == "none" else "≥"


def _days(option: Option) -> str:
    return f"{option.hours:,.1f} hours" if option.hours < 48 else f"{option.hours / 24:,.1f} days"


def _gib(size: float) -> str:
    size /= GIB
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}"


def _figures(value: float) -> str:
    """Three significant figures."""
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= value < 1000 else f"{value:,.0f}"


def _number(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "s")
