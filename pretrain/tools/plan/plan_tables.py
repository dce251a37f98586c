"""A plan as text for a terminal, and as JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap

from data_pipeline.foundation.formatting import aligned, counted, duration
from pretrain.tools.plan.planner import EFFICIENCY, GIB, RESERVED, Option, Planner, memory_checkpoint_bytes
from pretrain.zero.memory import SAFE

_WIDTH = 80
Columns = Mapping[str, Callable[[Option], str]]


def as_json(planner: Planner, gpus: int) -> dict[str, object]:
    """Everything that `text` says, in bytes, seconds and FLOPs."""
    options = planner.options(gpus)
    compared = {count: planner.best(count) for count in planner.counts(gpus)}
    cheapest, nodes = planner.cheapest(compared.values()), options[0].nodes
    return {
        "run": planner.config.run.name,
        "parameters": planner.parameters.count,
        "row": {key: value for key, value in asdict(planner.rows).items() if key != "count"},
        "flops_per_row": {**planner.flops, "all": sum(planner.flops.values())},
        "rows_from": planner.corpus_file,
        "gpu": planner.gpu_name,
        "gpus": gpus,
        "assumed": {
            "mfu": planner.mfu,
            "price_per_gpu_hour": planner.price,
            "network_gigabytes_per_second": planner.network,
            "gpus_per_node": planner.gpus_per_node,
            "link_efficiency": EFFICIENCY,
            "usable_bytes": int(planner.usable),
        },
        "copied_bytes_per_node": planner.parameters.state // nodes,
        "memory_checkpoint_bytes_per_node": _in_memory(planner, nodes),
        "own": asdict(planner.own(gpus)),
        "options": [asdict(option) for option in options],
        "gpu_counts": {count: asdict(option) if option else None for count, option in compared.items()},
        "cheapest": asdict(cheapest) if cheapest else None,
    }


def text(planner: Planner, gpus: int) -> str:
    """How long the run takes on `gpus` GPUs, what fits there, and the same for other numbers of GPUs."""
    return "\n".join(
        line for part in _parts(planner, gpus) for line in ([part] if "\n" in part else wrap(part, _WIDTH))
    )


def _parts(planner: Planner, gpus: int) -> Iterator[str]:
    """Sentences, and tables of several lines."""
    config, row, own = planner.config, planner.rows, planner.own(gpus)
    nodes, memory = own.nodes, planner.gpu.memory
    name, where = config.run.name, "this CPU" if planner.on_cpu else f"{gpus} × {planner.gpu_name}"
    stage = f"stage {own.setting.stage}"
    if own.rows:
        yield f"{name} on {where}: {_price(planner, own)} ({stage}, micro-batches of {own.rows})."
    else:
        yield f"{name} on {where}: not even one row fits at {stage}; what fits is below."
    if faster := planner.faster_stage(gpus):
        yield (
            f"warning: deepspeed.zero_optimization.stage={faster.setting.stage} would be "
            f"{own.hours / faster.hours:.1f} times faster: {_price(planner, faster)}"
        )
    if planner.corpus_file:
        yield f"{config.data.train[0].corpus} isn't built: its rows are taken from {planner.corpus_file}."
    yield (
        f"{name}: {planner.parameters.count:,} parameters, {config.model.family}, {config.precision}, "
        f"{config.optimizer.name}; {config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows of "
        f"{row.inputs} inputs and {row.targets} targets"
    )
    whole = sum(planner.flops.values())
    parts = ", ".join(f"{part} {flops / whole:.1%}" for part, flops in planner.flops.items())
    yield f"Arithmetic of a row, forward and backward: {whole / 1e9:,.1f} GFLOP ({parts})."
    if planner.on_cpu:
        yield (
            f"This CPU: {planner.gpu.fp32 * 1000:,.0f} GFLOP/s in wide fp32 products, measured now. Assumed: training "
            f"reaches {planner.mfu:.0%} of that (--mfu). Memory: {_gib(own.peak)} of {memory:.1f} GiB free."
        )
        if planner.days and own.hours > 24 * planner.days:
            yield f"That is more than {planner.days:g} days: take a smaller model, fewer steps, or GPUs."
        return
    yield (
        f"{where} on {counted(nodes, 'node')}. Exact: parameters, FLOPs, bytes sent. From the model's layers and "
        f"DeepSpeed's rules: memory. Assumed: {planner.mfu:.0%} MFU while computing, ${planner.price:g} per GPU-hour, "
        f"{planner.network:g} GB/s per GPU between nodes, links at {EFFICIENCY:.0%}."
    )
    options = planner.options(gpus)
    yield _table(f"Memory of a GPU, GiB of {memory:g}", _MEMORY, options)
    yield (
        f"Rows: the largest micro-batch within {planner.usable / GIB:.1f} GiB, {SAFE:.0%} of the memory but "
        f"{RESERVED / GIB:g} GiB for CUDA and NCCL. Rec: layers recomputed (compute.activation_checkpointing). Acts: "
        "of one row, at their peak."
    )
    if wrapper := config.wrapper:
        yield f"Not counted: what the wrapper {wrapper.name} adds."
    copied = (
        f"Checkpoints on disk are written from a copy: {_gib(planner.parameters.state // nodes)} GiB of each node's"
    )
    in_memory = _in_memory(planner, nodes)
    yield copied + (f" memory; those in memory take {_gib(in_memory)} GiB of /dev/shm." if in_memory else " memory.")
    fitting = [option for option in options if option.rows]
    if fitting:
        yield _table("A step and the run, at the largest micro-batch", _TIME, fitting)
    if own.setting.offload != "none":
        yield "The optimizer's step on the CPU comes on top of each time."
    compared = [option for count in planner.counts(gpus) if (option := planner.best(count))]
    if compared:
        yield _table("Other numbers of GPUs, each with its fastest setting", _COUNTS, compared)
    cheapest = planner.cheapest(compared)
    if cheapest is None:
        yield (
            "None of these fits and ends in time. Try GPUs with more memory, or more of them, or "
            "deepspeed.zero_optimization.offload_optimizer.device=cpu."
        )
        return
    within = f" and ends within {planner.days:g} days" if planner.days else ""
    recomputing = "with recomputing" if cheapest.setting.checkpointing else "without recomputing"
    yield (
        f"Cheapest that fits{within}: {counted(cheapest.gpus, 'GPU')}, stage {cheapest.setting.stage}, {recomputing}, "
        f"{_price(planner, cheapest)}. Next: set deepspeed.zero_optimization.stage and "
        "compute.activation_checkpointing, and batch.micro_batch_size: auto, which measures."
    )


def _in_memory(planner: Planner, nodes: int) -> int:
    kept = planner.config.checkpoint.memory_every_steps
    return memory_checkpoint_bytes(planner.parameters, nodes) if kept else 0


def _price(planner: Planner, option: Option) -> str:
    least = "" if option.setting.offload == "none" else "at least "
    return least + _duration(option) + ("" if planner.on_cpu else f", ${option.cost:,.0f}")


def _table(title: str, columns: Columns, options: Sequence[Option]) -> str:
    cells = ([cell(option) for cell in columns.values()] for option in options)
    return "\n".join(["", title, *aligned([[*columns], *cells])])


def _duration(option: Option) -> str:
    return duration(3600 * option.hours)


def _gib(size: float) -> str:
    size /= GIB
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}"


def _figures(value: float) -> str:
    """Three significant figures."""
    return f"{value:#.3g}".rstrip(".") if 1e-3 <= value < 1000 else f"{value:,.0f}"


_SETTING: Columns = {
    "stage": lambda option: str(option.setting.stage),
    "rec": lambda option: "yes" if option.setting.checkpointing else "",
}
_MEMORY: Columns = {
    **_SETTING,
    "weights": lambda option: _gib(option.states.weights),
    "optim": lambda option: _gib(option.states.master_weights + option.states.moments),
    "grads": lambda option: _gib(option.states.gradients),
    "buffers": lambda option: _gib(option.states.buffers + option.states.reduction),
    "acts": lambda option: _gib(option.one_row),
    "rows": lambda option: str(option.rows or "none"),
    "peak": lambda option: _gib(option.peak),
    "host": lambda option: _gib(option.states.host) if option.states.host else "",
}
_TIME: Columns = {
    **_SETTING,
    "rows": lambda option: str(option.rows),
    "GB sent": lambda option: f"{option.sent / 1e9:,.1f}",
    "s/step": lambda option: _figures(option.seconds),
    "waits": lambda option: _figures(option.waits),
    "MFU": lambda option: f"{option.mfu:.0%}",
    "time": _duration,
    "cost": lambda option: f"${option.cost:,.0f}",
}
_COUNTS: Columns = {
    "GPUs": lambda option: str(option.gpus),
    "nodes": lambda option: str(option.nodes),
    **_SETTING,
    "rows": _TIME["rows"],
    "peak": _MEMORY["peak"],
    "s/step": _TIME["s/step"],
    "MFU": _TIME["MFU"],
    "time": _duration,
    "GPU-h": lambda option: f"{option.hours * option.gpus:,.0f}",
    "cost": _TIME["cost"],
}
