"""The needs of a run on GPUs of one kind: the largest micro-batch that fits, the time at a stated MFU, and the cost.

The plan comes as text for a terminal, and as JSON."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus import corpus_file_of
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.formatting import aligned, counted, duration
from data_pipeline.stages.tokenizer import expected
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.models import EncoderOnlyConfig
from pretrain.hardware import CPU, Gpu
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.tools.plan_memory import Offload, Parameters, Rows, Setting, States, activations, states
from pretrain.trainer.validate import with_tokenizer_ids
from pretrain.zero.memory import SAFE

GIB = 2**30
RESERVED = 1.5 * GIB  # of a GPU, for CUDA, its libraries' workspaces and NCCL's buffers
_MASKED = 0.15  # the share of tokens that BERT predicts


def resolve_rows(
    config: RunConfig, path: Path, inputs: int | None, targets: int | None
) -> tuple[RunConfig, Rows, str | None]:
    """`config` with the vocabulary of its model, one of its rows at full length, and the corpus file they are from, if
    they are from one.

    Lengths come from the options `inputs` and `targets`, else from the run file's objective, else from its first corpus
    if that is a local directory, else from the corpus file that builds it. Raises UserError for what none of them says.
    """
    directory, model, taken = Path(config.data.train[0].corpus), config.model, None
    corpus = open_corpus(str(directory)) if directory.is_dir() else None
    source = None if corpus else corpus_file_of(directory, [path.parent])
    planned = load(paths.config(source), [], CorpusConfig) if source else None
    objective = config.data.objective or (corpus.objective if corpus else planned and planned.rows.objective)
    problems: list[str] = []
    if corpus:
        model, problems = with_tokenizer_ids(model, corpus)
    elif model.vocab_size is None and planned and planned.tokenizer.path is None:
        model, taken = model.model_copy(update={"vocab_size": expected(planned.tokenizer).size}), source
    elif model.vocab_size is None:
        problems.append(f"model.vocab_size: not set, and {directory} isn't there to take it from; set it")
    if config.data.objective is None and not (inputs and targets):
        taken = taken or source
    shape = objective.shape if objective else (None, None)
    inputs, targets = inputs or shape[0], targets or shape[1]
    if "span_corruption" not in models.FAMILIES[model.family].objectives:
        targets = inputs
    if inputs is None or targets is None:
        problems.append(
            f"data.objective: not set, and {directory} isn't there to take it from; "
            "give --inputs and --targets, the tokens of a row (T5's are 512 and 114)"
        )
    elif model.longest_sequence is not None and max(inputs, targets) > model.longest_sequence:
        problems.append(f"model: takes sequences of {model.longest_sequence} tokens at most, got {inputs}, {targets}")
    if problems or inputs is None or targets is None:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    share = getattr(objective, "mask_ratio", _MASKED) if isinstance(model, EncoderOnlyConfig) else 1
    return config.model_copy(update={"model": model}), Rows(1, inputs, targets, math.ceil(share * targets)), taken


@dataclass(frozen=True)
class Option:
    """A setting on a number of GPUs. `rows` is the largest micro-batch that fits; 0: not even one row does. `one_row`
    and `peak` are bytes, of a row's activations and of all; `seconds` are those of a step in which no GPU waits."""

    setting: Setting
    states: States
    one_row: int
    rows: int
    peak: int
    seconds: float
    hours: float
    cost: float


@dataclass
class Planner:
    """Finds what fits on GPUs of one kind, how long a run takes there, and what it costs.

    - `rows`: one row of the run. `price`: dollars for a GPU and an hour.
    - `mfu`: the share of its peak that a GPU reaches.
    - `corpus_file`: the one that row or vocabulary are from, if the corpus isn't built.
    """

    config: RunConfig
    rows: Rows
    gpu_name: str
    gpu: Gpu
    mfu: float
    price: float
    corpus_file: str | None = None

    def __post_init__(self) -> None:
        batch = self.config.batch.model_copy(update={"micro_batch_size": None})  # a plan looks for the largest
        self.config = self.config.model_copy(update={"batch": batch})
        model, row = models.outline(self.config.model), self.rows
        self.parameters = Parameters.of(model, self.config)
        self.flops = flops_by_part(
            model, Sizes.of_example(row.inputs, row.targets if model.decoder_reads_targets else row.predicted)
        )
        self.usable = SAFE * (self.gpu.memory * GIB - RESERVED)
        self.on_cpu = self.gpu_name == CPU

    def options(self, gpus: int) -> list[Option]:
        """Every stage with and without recomputing, on `gpus` GPUs; each offloads what the run file offloads. Raises
        UserError if the GPUs can't share the run's batches."""
        if problems := BatchPlan(self.config.batch, gpus).problems():
            raise UserError("\n".join(f"--gpus: {problem}; choose {self._near(gpus)}" for problem in problems))
        zero = self.config.deepspeed.zero_optimization
        moved = {*zero.offloaded_to("cpu"), *zero.offloaded_to("nvme")}
        sharded: Offload = "optimizer and weights" if "offload_param" in moved else "optimizer"
        offload: dict[int, Offload] = {1: "optimizer", 2: "optimizer", 3: sharded} if moved else {}
        return [
            self._option(Setting(stage, offload.get(stage, "none"), checkpointing), gpus)
            for stage in (1, 2, 3)
            for checkpointing in (False, True)
        ]

    def own(self, options: list[Option]) -> Option:
        """The setting of the run file."""
        own = self.config.zero_stage, self.config.compute.activation_checkpointing
        return next(one for one in options if (one.setting.stage, one.setting.checkpointing) == own)

    def activations(self, rows: int, checkpointing: bool) -> int:
        """Bytes at the peak of a pass over a micro-batch of `rows`."""
        compute, on_gpu, batch = self.config.compute, not self.on_cpu, replace(self.rows, count=rows)
        model, precision = self.config.model, self.config.precision
        return activations(model, batch, precision, checkpointing, on_gpu, on_gpu, compute.attention).peak

    def _option(self, setting: Setting, gpus: int) -> Option:
        config, checkpointing = self.config, setting.checkpointing
        held = states(self.parameters, setting, gpus, config.precision, config.deepspeed.zero_optimization)
        share = BatchPlan(config.batch, gpus).micro_batch

        def peak(rows: int) -> int:
            return held.peak(self.activations(rows, checkpointing))

        sizes = (rows for rows in range(share, 0, -1) if share % rows == 0)
        rows = next((rows for rows in sizes if peak(rows) <= self.usable), 0)
        of_row = sum(self.flops.values()) + checkpointing * (sum(self.flops.values()) - self.flops["head"]) / 3
        rate = gpus * self.mfu * self.gpu.flops("bf16" if config.precision == "bf16" else "fp32")
        seconds = config.batch.global_batch_size * of_row / rate
        hours = self._steps() * seconds / 3600
        one_row = self.activations(1, checkpointing)
        return Option(setting, held, one_row, rows, peak(rows or 1), seconds, hours, hours * gpus * self.price)

    def _steps(self) -> float:
        """The run's steps, as steps of its full batch."""
        batch, steps = self.config.batch, self.config.run.max_steps
        last = min(batch.ramp_up[-1].until_step if batch.ramp_up else 0, steps)
        return sum(batch.rows(number) for number in range(last)) / batch.global_batch_size + steps - last

    def _near(self, gpus: int) -> str:
        """The nearest numbers of GPUs that can share the batches."""
        batch = self.config.batch
        sharing = [one for one in range(1, batch.global_batch_size + 1) if not BatchPlan(batch, one).problems()]
        below = [one for one in sharing if one < gpus][-1:]
        return " or ".join(map(str, below + [one for one in sharing if one > gpus][:1]))


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
