"""A plan as text for a terminal, and as JSON."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from textwrap import wrap

from data_pipeline.foundation.formatting import aligned, counted, duration
from pretrain.tools.plan.planner import GIB, RESERVED, Option, Planner
from pretrain.zero.memory import SAFE

_WIDTH = 80
_OTHERS = "Waiting for other GPUs isn't counted: published runs of T5 v1.1 reach 29% MFU on 64, 24% on 256, 18% on 512."


def as_json(planner: Planner, gpus: int, nodes: int) -> dict[str, object]:
    """Everything that `text` says, in bytes, seconds and FLOPs."""
    options = planner.options(gpus)
    return {
        "run": planner.config.run.name,
        "parameters": planner.parameters.count,
        "row": {key: value for key, value in asdict(planner.rows).items() if key != "count"},
        "flops_per_row": {**planner.flops, "all": sum(planner.flops.values())},
        "rows_from": planner.corpus_file,
        "gpu": planner.gpu_name,
        "gpus": gpus,
        "assumed": {"mfu": planner.mfu, "price_per_gpu_hour": planner.price, "usable_bytes": int(planner.usable)},
        "copied_bytes_per_node": planner.parameters.state // nodes,
        "memory_checkpoint_bytes_per_node": _in_memory(planner, nodes),
        "own": asdict(planner.own(options)),
        "options": [asdict(option) for option in options],
    }


def text(planner: Planner, gpus: int, nodes: int) -> str:
    """How long the run takes on `gpus` GPUs, and what fits there."""
    parts = _parts(planner, gpus, nodes)
    return "\n".join(line for part in parts for line in ([part] if "\n" in part else wrap(part, _WIDTH)))


def _parts(planner: Planner, gpus: int, nodes: int) -> Iterator[str]:
    """Sentences, and a table of several lines."""
    config, row, options = planner.config, planner.rows, planner.options(gpus)
    own = planner.own(options)
    name, where = config.run.name, "this CPU" if planner.on_cpu else f"{gpus} × {planner.gpu_name}"
    stage, cost = f"stage {own.setting.stage}", "" if planner.on_cpu else f", ${own.cost:,.0f}"
    least = "" if own.setting.offload == "none" else "at least "
    if own.rows:
        time = least + duration(3600 * own.hours) + cost
        yield f"{name} on {where}: {time} ({stage}, micro-batches of {own.rows})."
    else:
        yield f"{name} on {where}: not even one row fits at {stage}; what fits is below."
    if planner.corpus_file:
        yield f"{config.data.train[0].corpus} isn't built: its rows are taken from {planner.corpus_file}."
    yield (
        f"{name}: {planner.parameters.count:,} parameters, {config.model.family}, {config.precision}, "
        f"{config.optimizer.name}; {config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows of "
        f"{row.inputs} inputs and {row.targets} targets"
    )
    whole = sum(planner.flops.values())
    shares = ", ".join(f"{part} {flops / whole:.1%}" for part, flops in planner.flops.items())
    yield f"Arithmetic of a row, forward and backward: {whole / 1e9:,.1f} GFLOP ({shares})."
    if planner.on_cpu:
        yield (
            f"This CPU: {planner.gpu.fp32 * 1000:,.0f} GFLOP/s in wide fp32 products, measured now. Assumed: training "
            f"reaches {planner.mfu:.0%} of that (--mfu). Memory: {_gib(own.peak)} of {planner.gpu.memory:.1f} GiB free."
        )
        return
    yield (
        f"{where} on {counted(nodes, 'node')}. Exact: parameters, FLOPs. From the model's layers and DeepSpeed's "
        f"rules: memory. Assumed: {planner.mfu:.0%} MFU, ${planner.price:g} per GPU-hour. {_OTHERS}"
    )
    cells = ([cell(option) for cell in _COLUMNS.values()] for option in options)
    title = f"Memory of a GPU, GiB of {planner.gpu.memory:g}, and the run at {planner.mfu:.0%} MFU"
    yield "\n".join(["", title, *aligned([[*_COLUMNS], *cells])])
    yield (
        f"Rows: the largest micro-batch within {planner.usable / GIB:.1f} GiB, {SAFE:.0%} of the memory but "
        f"{RESERVED / GIB:g} GiB for CUDA and NCCL. Rec: layers recomputed (compute.activation_checkpointing). Acts: "
        "of one row, at their peak."
    )
    if wrapper := config.wrapper:
        yield f"Not counted: what the wrapper {wrapper.name} adds."
    copied, in_memory = _gib(planner.parameters.state // nodes), _in_memory(planner, nodes)
    of_shm = f"; those in memory take {_gib(in_memory)} GiB of /dev/shm" if in_memory else ""
    yield f"Checkpoints on disk are written from a copy: {copied} GiB of each node's memory{of_shm}."
    if least:
        yield "The optimizer's step on the CPU comes on top of each time."
    if any(option.rows for option in options):
        yield (
            "Next: set deepspeed.zero_optimization.stage and compute.activation_checkpointing, and "
            "batch.micro_batch_size: auto, which measures."
        )
    else:
        yield (
            "None of these fits. Try GPUs with more memory, or more of them, or "
            "deepspeed.zero_optimization.offload_optimizer.device=cpu."
        )


def _in_memory(planner: Planner, nodes: int) -> int:
    """Bytes of each node's memory for checkpoints there: its ranks' state twice and, if there are more, the next
    node's."""
    kept = planner.config.checkpoint.memory_every_steps
    return 2 * planner.parameters.state // nodes * (2 if nodes > 1 else 1) if kept else 0


def _gib(size: float) -> str:
    size /= GIB
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}"


def _if_fits(written: Callable[[Option], str]) -> Callable[[Option], str]:
    return lambda option: written(option) if option.rows else ""


_COLUMNS: Mapping[str, Callable[[Option], str]] = {
    "stage": lambda option: str(option.setting.stage),
    "rec": lambda option: "yes" if option.setting.checkpointing else "",
    "weights": lambda option: _gib(option.states.weights),
    "optim": lambda option: _gib(option.states.master_weights + option.states.moments),
    "grads": lambda option: _gib(option.states.gradients),
    "buffers": lambda option: _gib(option.states.buffers + option.states.reduction),
    "acts": lambda option: _gib(option.one_row),
    "rows": lambda option: str(option.rows or "none"),
    "peak": lambda option: _gib(option.peak),
    "host": lambda option: _gib(option.states.host) if option.states.host else "",
    "s/step": _if_fits(lambda option: f"{option.seconds:.3g}" if option.seconds < 1000 else f"{option.seconds:,.0f}"),
    "time": _if_fits(lambda option: duration(3600 * option.hours)),
}
