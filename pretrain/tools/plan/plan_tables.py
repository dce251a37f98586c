"""A plan as tables for a terminal, and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from data_pipeline.foundation.formatting import counted, duration
from pretrain.tools.plan.planner import GIB, HEAD, RESERVED, Option, Planner
from pretrain.tools.plan.step_time import EFFICIENCY
from pretrain.zero.memory import SAFE

WIDTH = 80
Columns = Mapping[str, Callable[[Option], str]]


def as_json(planner: Planner, gpus: int) -> dict[str, object]:
    """Everything that `show` prints, in bytes, seconds and FLOPs."""
    question, options = planner.question, planner.options(gpus)
    compared = {count: planner.best(count) for count in planner.counts(gpus)}
    cheapest = planner.cheapest(compared.values())
    return {
        "run": question.config.run.name,
        "parameters": planner.parameters.count,
        "row": {key: value for key, value in asdict(question.rows).items() if key != "count"},
        "flops_per_row": {**planner.flops, "all": sum(planner.flops.values())},
        "rows_from": question.corpus_file,
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
        "copied_bytes_per_node": planner.copied_bytes(gpus),
        "memory_checkpoint_bytes_per_node": planner.memory_checkpoint_bytes(gpus),
        "own": _option(planner.own(gpus)),
        "options": [_option(option) for option in options],
        "gpu_counts": {count: _option(option) if option else None for count, option in compared.items()},
        "cheapest": _option(cheapest) if cheapest else None,
    }


def _option(option: Option) -> dict[str, object]:
    found: dict[str, object] = {
        **asdict(option.setting),
        "gpus": option.cluster.gpus,
        "nodes": option.cluster.nodes,
        "fits": option.step is not None,
        "micro_batch_size": option.rows or None,
        "memory": {
            **asdict(option.states),
            "activations_of_one_row": option.one_row.layers,
            "logits_of_one_row": option.one_row.logits,
            "peak": option.peak,
        },
    }
    if option.step is not None and option.traffic is not None:
        found |= {
            "bytes_sent_per_step": option.traffic.bytes,
            "share_hidden": option.step.hidden,
            "seconds_per_step": option.step.seconds,
            "mfu": option.step.mfu,
            "hours": option.hours,
            "cost": option.cost,
        }
    return found


def _show_run(planner: Planner, console: Console) -> None:
    config, row = planner.question.config, planner.question.rows
    console.print(
        f"{config.run.name}: {planner.parameters.count:,} parameters, {config.model.family}, {config.precision}, "
        f"{config.optimizer.name}; {config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows of "
        f"{row.inputs} inputs and {row.targets} targets",
        highlight=False,
    )


def _show_answer(planner: Planner, gpus: int, console: Console) -> None:
    """Prints how long the run file itself takes and what it costs, and whether another stage would be much faster."""
    question, own = planner.question, planner.own(gpus)
    stage = f"stage {own.setting.stage}"
    answer = f"not even one row fits at {stage}; what fits is below."
    if own.step is not None:
        answer = f"{_bound(own)}{_duration(own)}, {_bound(own)}${own.cost:,.0f} ({stage}, micro-batches of {own.rows})."
    console.print(f"{question.config.run.name} on {gpus} × {question.gpu_name}: {answer}", highlight=False)
    if faster := planner.faster_stage(gpus):
        console.print(
            f"warning: deepspeed.zero_optimization.stage={faster.setting.stage} would be "
            f"{own.hours / faster.hours:.1f} times faster: {_duration(faster)}, ${faster.cost:,.0f}",
            highlight=False,
        )


def _show_corpus_file(planner: Planner, console: Console) -> None:
    if file := planner.question.corpus_file:
        corpus = planner.question.config.data.train[0].corpus
        console.print(f"{corpus} isn't built: its rows are taken from {file}.", highlight=False)


def show(planner: Planner, gpus: int, console: Console) -> None:
    """Prints how long the run takes on `gpus` GPUs, what fits there, and the same for other numbers of GPUs."""
    question = planner.question
    options = planner.options(gpus)
    nodes = options[0].cluster.nodes
    _show_answer(planner, gpus, console)
    _show_corpus_file(planner, console)
    _show_run(planner, console)
    console.print(
        f"{gpus} × {question.gpu_name} on {counted(nodes, 'node')}. Exact: parameters, FLOPs, bytes sent. From the "
        f"model's layers and DeepSpeed's rules: memory. Assumed: {question.mfu:.0%} MFU while computing, "
        f"${question.price:g} per GPU-hour, {question.network:g} GB/s per GPU between nodes, links at "
        f"{EFFICIENCY:.0%}.",
        highlight=False,
    )
    console.print(_arithmetic(planner))
    console.print(_table(f"Memory of a GPU, GiB of {question.gpu.memory:g}", _SETTING | _MEMORY, options))
    console.print(
        f"Rows: the largest micro-batch within {planner.usable / GIB:.1f} GiB, {SAFE:.0%} of the memory but "
        f"{RESERVED / GIB:g} GiB for CUDA and NCCL. Off: nothing, the optimizer (o), or weights too (o+w) in host "
        "memory. Rec: layers recomputed (compute.activation_checkpointing). Acts, logits: at the peak of one row.",
        highlight=False,
    )
    if wrapper := planner.config.wrapper:
        console.print(f"Not counted: what the wrapper {wrapper.name} adds.")
    console.print(
        f"Checkpoints on disk are written from a copy: {_gib(planner.copied_bytes(gpus))} GiB of each node's memory.",
        highlight=False,
    )
    if in_memory := planner.memory_checkpoint_bytes(gpus):
        console.print(
            f"Checkpoints in memory (checkpoint.memory_every_steps): {_gib(in_memory)} GiB of each node's /dev/shm.",
            highlight=False,
        )
    fitting = [option for option in options if option.rows]
    console.print(_table("A step and the run, at the largest micro-batch", _SETTING | _TIME, fitting))
    if any(map(_bound, fitting)):
        console.print("≥: the optimizer's step on the CPU comes on top.")
    compared = {count: planner.best(count) for count in planner.counts(gpus)}
    table = _table("Other numbers of GPUs, each with its fastest setting", _COUNTS, [])
    for count, best in compared.items():
        table.add_row(*(cell(best) for cell in _COUNTS.values()) if best else (str(count), "", "nothing fits"))
    console.print(table)
    cheapest = planner.cheapest(compared.values())
    if cheapest is None:
        console.print("None of these fits and ends in time. Try GPUs with more memory, or more of them.")
        return
    within = f" and ends within {question.days:g} days" if question.days else ""
    setting = cheapest.setting
    recomputing = "with recomputing" if setting.checkpointing else "without recomputing"
    offloaded = "" if setting.offload == "none" else f", {setting.offload} in host memory"
    console.print(
        f"Cheapest that fits{within}: {counted(cheapest.cluster.gpus, 'GPU')}, stage {setting.stage}, "
        f"{recomputing}{offloaded}, {_bound(cheapest)}${cheapest.cost:,.0f} in {_duration(cheapest)}.",
        highlight=False,
    )
    console.print(
        "Next: set deepspeed.zero_optimization.stage and compute.activation_checkpointing, and "
        "batch.micro_batch_size: auto, which measures."
    )


def show_cpu(planner: Planner, gpus: int, console: Console) -> None:
    """A plan of the one setting that matters on a CPU: nothing is shared with other devices."""
    question, option = planner.question, planner.best(gpus)
    fits = option is not None and option.step is not None
    answer = _duration(option) if option and fits else "not even one row fits into the free memory"
    console.print(f"{question.config.run.name} on this CPU: {answer}.", highlight=False)
    _show_corpus_file(planner, console)
    _show_run(planner, console)
    console.print(
        f"This CPU: {question.gpu.fp32 * 1000:,.0f} GFLOP/s in wide fp32 products, measured now. "
        f"Assumed: training reaches {question.mfu:.0%} of that (--mfu).",
        highlight=False,
    )
    console.print(_arithmetic(planner))
    if option is None or option.step is None:
        console.print(f"Not even one row fits into the {question.gpu.memory:.1f} GiB that are free.", highlight=False)
        return
    console.print(
        f"A step takes {_figures(option.step.seconds)} s, the run {_duration(option)}. Memory: {_gib(option.peak)} GiB "
        f"with {option.rows} rows in a micro-batch, of {question.gpu.memory:.1f} GiB free.",
        highlight=False,
    )
    if question.days and option.hours > 24 * question.days:
        console.print(f"That is more than {question.days:g} days: take a smaller model, fewer steps, or GPUs.")


def _arithmetic(planner: Planner) -> Table:
    table = _table("Arithmetic of a row, forward and backward", dict.fromkeys(("", "GFLOP", "share"), str), [])
    whole = sum(planner.flops.values())
    for part, flops in planner.flops.items():
        table.add_row("output matrix" if part == HEAD else part, f"{flops / 1e9:,.1f}", f"{flops / whole:.1%}")
    table.add_row("all", f"{whole / 1e9:,.1f}", "")
    return table


def _table(title: str, columns: Columns, options: Sequence[Option]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), min_width=WIDTH - 4
    )
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for option in options:
        table.add_row(*(cell(option) for cell in columns.values()))
    return table


def _bound(option: Option) -> str:
    """The sign of a lower bound, which the time of an offloaded optimizer is."""
    return "" if option.setting.offload == "none" else "≥"


def _duration(option: Option) -> str:
    return duration(3600 * option.hours)


def _gib(size: float) -> str:
    size /= GIB
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}"


def _figures(value: float) -> str:
    """Three significant figures."""
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= value < 1000 else f"{value:,.0f}"


def _seconds(option: Option) -> str:
    assert option.step is not None, "only of options that fit"
    return f"{_bound(option)}{_figures(option.step.seconds)}"


_SETTING: dict[str, Callable[[Option], str]] = {
    "stage": lambda option: str(option.setting.stage),
    "off": lambda option: {"none": "", "optimizer": "o", "optimizer and weights": "o+w"}[option.setting.offload],
    "rec": lambda option: "yes" if option.setting.checkpointing else "",
}
_MEMORY: dict[str, Callable[[Option], str]] = {
    "weights": lambda option: _gib(option.states.weights),
    "optim": lambda option: _gib(option.states.master_weights + option.states.moments),
    "grads": lambda option: _gib(option.states.gradients),
    "buffers": lambda option: _gib(option.states.buffers + option.states.reduction),
    "acts": lambda option: _gib(option.one_row.layers),
    "logits": lambda option: _gib(option.one_row.logits),
    "rows": lambda option: str(option.rows or "none"),
    "peak": lambda option: _gib(option.peak),
    "host": lambda option: _gib(option.states.host) if option.states.host else "",
}
_TIME: dict[str, Callable[[Option], str]] = {
    "rows": lambda option: str(option.rows),
    "GB sent": lambda option: f"{option.traffic.bytes / 1e9:,.1f}" if option.traffic else "",
    "hidden": lambda option: f"{option.step.hidden:.0%}" if option.step else "",
    "s/step": _seconds,
    "waits": lambda option: _figures(option.step.exposed) if option.step else "",
    "MFU": lambda option: f"{option.step.mfu:.0%}" if option.step else "",
    "time": _duration,
    "cost": lambda option: f"${option.cost:,.0f}",
}
_COUNTS: dict[str, Callable[[Option], str]] = {
    "GPUs": lambda option: str(option.cluster.gpus),
    "nodes": lambda option: str(option.cluster.nodes),
    **_SETTING,
    "rows": _TIME["rows"],
    "peak": _MEMORY["peak"],
    "s/step": _seconds,
    "MFU": _TIME["MFU"],
    "time": _TIME["time"],
    "GPU-h": lambda option: f"{option.hours * option.cluster.gpus:,.0f}",
    "cost": _TIME["cost"],
}
