"""`pretrain plan`: estimates the largest micro-batch that fits, the time at a given MFU, and the cost of a run on GPUs
of one kind."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from data_pipeline.base import paths
from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import aligned, duration
from data_pipeline.base.progress import set_activity
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus import corpus_file_of
from data_pipeline.stages.tokenizer import expected
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.models import EncoderOnlyConfig
from pretrain.device_speed import Gpu
from pretrain.engine.memory import SAFE
from pretrain.engine.sharding import Sharding
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.tools.plan_memory import FP32, Parameters, Rows, States, activations, states
from pretrain.training.prepare import with_tokenizer_ids
from pretrain.training.throughput import rows_per_step

GIB = 2**30
RESERVED = 1.5 * GIB  # of a GPU, for CUDA, its libraries' workspaces and NCCL's buffers
_WRAPPED = TextWrapper(80, break_on_hyphens=False, break_long_words=False)


def resolve_rows(config: RunConfig, path: Path) -> tuple[RunConfig, Rows, str | None]:
    """`config` with the vocabulary of its model, a row of the run at full length, and the corpus file that these are
    from, if any.

    Lengths come from the run file's objective, else from its first corpus if it is a local directory, else from the
    corpus file that builds this corpus. Raises UserError for facts that none of them has.
    """
    directory = Path(config.data.train[0].corpus.removeprefix("file://"))
    model, objective = config.model, config.data.objective
    corpus_file, problems = None, list[str]()
    if directory.is_dir():
        corpus = open_corpus(str(directory))
        model, problems = with_tokenizer_ids(model, corpus)
        objective = objective or corpus.objective
    elif (objective is None or model.vocab_size is None) and (corpus_file := corpus_file_of(directory, [path.parent])):
        planned = load(paths.config(corpus_file), [], CorpusConfig)
        if model.vocab_size is None and getattr(planned.tokenizer, "path", None) is None:
            model = model.model_copy(update={"vocab_size": expected(planned.tokenizer).size})
        objective = objective or planned.rows.objective
    if model.vocab_size is None:
        problems.append(f"model.vocab_size: not set, and {directory}, which would give it, is not found; set it")
    if objective is None:
        problems.append(f"data.objective: not set, and {directory}, which would give it, is not found; set it")
    elif model.longest_sequence is not None and max(objective.shape) > model.longest_sequence:
        problems.append(f"model: takes sequences of {model.longest_sequence} tokens at most, got {objective.shape}")
    if problems or objective is None:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))
    inputs, targets = objective.shape
    share = getattr(objective, "mask_ratio", 1) if isinstance(model, EncoderOnlyConfig) else 1
    return config.model_copy(update={"model": model}), Rows(1, inputs, targets, math.ceil(share * targets)), corpus_file


@dataclass(frozen=True)
class Option:
    """A ZeRO stage, with or without layers recomputed in the backward pass.

    Attributes:
        one_row: bytes of a row's activations.
        rows: the largest micro-batch that fits; 0: not even one row fits.
        peak: bytes at the peak of a step.
        seconds: of a step.
        communication: the seconds of a step in which gradients and weights are exchanged and nothing is computed.
        hours: of the run.
    """

    stage: int
    recomputed: bool
    states: States
    one_row: int
    rows: int
    peak: int
    seconds: float
    communication: float
    hours: float


@dataclass
class Plan:
    """A run on GPUs of one kind: what fits, how long it takes, and what it costs.

    Attributes:
        rows: a row of the run.
        mfu: the share of its peak FLOP/s that a GPU reaches.
        price: dollars per GPU-hour.
        corpus_file: the corpus file that row or vocabulary are from, if the corpus isn't built.

    Raises UserError if the GPUs can't share the run's batches.
    """

    config: RunConfig
    rows: Rows
    gpu_name: str
    gpu: Gpu
    gpus: int
    mfu: float
    price: float
    nodes: int = 1
    corpus_file: str | None = None

    def __post_init__(self) -> None:
        batch = self.config.batch.model_copy(update={"micro_batch_size": None})  # a plan looks for the largest
        plan = BatchPlan(batch, self.gpus)
        if problems := plan.problems():
            raise UserError("\n".join(f"--gpus: {problem}" for problem in problems))
        self.share = plan.share
        model, row = models.meta_model(self.config.model), self.rows
        self.parameters = Parameters.of(model, self.config)
        self.flops = flops_by_part(
            model, Sizes.of_example(row.inputs, row.targets if model.decoder_reads_targets else row.predicted)
        )
        self.usable = SAFE * (self.gpu.memory * GIB - RESERVED)

    @cached_property
    def options(self) -> list[Option]:
        """Every stage with and without recomputing. Each offloads as the run file says."""
        set_activity("fitting micro-batches into memory")
        return [self._option(stage, recomputed) for stage in (1, 2, 3) for recomputed in (False, True)]

    @cached_property
    def own(self) -> Option:
        """The option of the run file."""
        return self._option(self.config.zero_stage, self.config.compute.activation_checkpointing)

    @property
    def cost(self) -> float:
        """Dollars."""
        return self.own.hours * self.gpus * self.price

    @property
    def mfu_in_all(self) -> float:
        """MFU with the communication of the run file's option."""
        return self.mfu * (1 - self.own.communication / self.own.seconds)

    def activations(self, rows: int, recomputed: bool) -> int:
        """Bytes at the peak of a pass over a micro-batch of `rows`; `data.packing_ratio` rows are packed into one."""
        row, pack = self.rows, min(rows, self.config.data.packing_ratio)
        batch = Rows(-(-rows // pack), pack * row.inputs, pack * row.targets, pack * row.predicted, pack)
        return activations(self.config.model, batch, self.config.precision, recomputed, "triton")[0]

    def _option(self, stage: int, recomputed: bool) -> Option:
        config, flops = self.config, sum(self.flops.values())
        sharding = Sharding.of(config, self.gpus, stage)
        held = states(self.parameters, sharding, config.precision, config.deepspeed.zero_optimization)

        def peak(rows: int) -> int:
            return held.peak(self.activations(rows, recomputed))

        sizes = (rows for rows in range(self.share, 0, -1) if self.share % rows == 0)
        rows = next((rows for rows in sizes if peak(rows) <= self.usable), 0)
        of_row = flops + recomputed * (flops - self.flops["head"]) / 3
        rate = self.gpus * self.mfu * self.gpu.flops("bf16" if config.precision == "bf16" else "fp32")
        passes = 1 if sharding.local else self.share // (rows or 1)
        communication = self.communication(stage, passes)
        rows_of_run = config.run.max_steps * rows_per_step(config)
        return Option(
            stage,
            recomputed,
            held,
            one_row=self.activations(1, recomputed),
            rows=rows,
            peak=peak(rows or 1),
            seconds=config.batch.global_batch_size * of_row / rate + communication,
            communication=communication,
            hours=(rows_of_run * of_row / rate + config.run.max_steps * communication) / 3600,
        )

    def communication(self, stage: int, passes: int) -> float:
        """Seconds of communication in a step that reduces gradients `passes` times, if nothing is computed meanwhile.

        Gradients are reduced and scattered in fp32. Weights are gathered once a step, at stage 3 in each forward and
        backward pass. In a ring, each GPU sends (n − 1) / n of these bytes through its link; a node's share goes out
        through the network of all its GPUs at once.
        """
        if self.gpus == 1:
            return 0.0
        width = 2 if self.config.precision == "bf16" else FP32
        gathered = 2 * passes if stage == 3 else 1
        sent = (FP32 * passes + width * gathered) * self.parameters.count * (self.gpus - 1) / self.gpus
        slowest = self.gpu.link
        if self.nodes > 1:
            slowest = min(slowest, self.gpu.network * self.gpus / self.nodes)
        return sent / (1e9 * slowest)

    @property
    def held_by_checkpoints(self) -> int:
        """Bytes of each node's memory: the copy that a checkpoint is written from."""
        return self.parameters.state // self.nodes


def text(plan: Plan) -> str:
    """The plan as text: how long the run takes, the assumptions, and what fits."""
    return "\n".join(part if "\n" in part else _WRAPPED.fill(part) for part in _parts(plan))


def _parts(plan: Plan) -> Iterator[str]:
    """The sentences of the plan, and its table, which has several lines."""
    config, row, own = plan.config, plan.rows, plan.own
    name, where = config.run.name, f"{plan.gpus} × {plan.gpu_name}"
    if own.rows:
        time = duration(3600 * own.hours) + (f", ${plan.cost:,.0f}" if plan.price else "")
        yield f"{name} on {where}: {time} (stage {own.stage}, micro-batches of {own.rows})."
    else:
        yield f"{name} on {where}: not even one row fits at stage {own.stage}."
    if plan.corpus_file:
        yield f"Rows are taken from {plan.corpus_file}: {config.data.train[0].corpus} isn't built."
    yield (
        f"{name}: {plan.parameters.count:,} parameters, {config.model.family}, {config.precision}, "
        f"{config.optimizer.name}; {config.run.max_steps:,} steps of {config.batch.global_batch_size:,} rows of "
        f"{row.inputs} inputs and {row.targets} targets"
    )
    flops = sum(plan.flops.values())
    shares = ", ".join(f"{part} {of_part / flops:.1%}" for part, of_part in plan.flops.items())
    yield f"Arithmetic of a row, forward and backward: {flops / 1e9:,.1f} GFLOP ({shares})."
    price = f", ${plan.price:g} per GPU-hour" if plan.price else ""
    yield f"Assumed: {plan.mfu:.0%} MFU of each GPU by itself{price}."
    if own.communication:
        yield (
            f"Communication: {own.communication:.3g} s of a step of {own.seconds:.3g} s, at the links' "
            f"rated speed, if it doesn't overlap with arithmetic: {plan.mfu_in_all:.0%} MFU in all."
        )
    title = f"Memory of a rank, GiB of {plan.gpu.memory:.3g}, and the run at {plan.mfu:.0%} MFU"
    yield "\n".join(["", title, *aligned([_HEADINGS, *map(_cells, plan.options)])])
    yield (
        f"Rows: the largest micro-batch within {plan.usable / GIB:.1f} GiB, {SAFE:.0%} of the memory but "
        f"{RESERVED / GIB:g} GiB for CUDA and NCCL. Rec: layers recomputed (compute.activation_checkpointing). Acts: "
        "of one row, at their peak."
    )
    if own.states.host:
        yield "Host: GiB of a rank's host memory. The optimizer's step there comes on top of each time."
    if config.wrapper:
        yield f"Not counted: what the wrapper {config.wrapper.name} adds."
    yield f"Checkpoints take {_gib(plan.held_by_checkpoints)} GiB of each node's memory."
    size, checkpoint, steps = plan.parameters.state, config.checkpoint, config.run.max_steps
    kept_every = math.lcm(checkpoint.every_steps, checkpoint.keep_every_steps or 0)  # 0: none is kept apart
    apart = f" and every {kept_every:,} steps" if kept_every else ""
    count = min(checkpoint.keep_last, -(-steps // checkpoint.every_steps))
    count += steps // kept_every if kept_every else 0
    yield (
        f"On disk a checkpoint takes {_gib(size)} GiB; the run keeps the last {checkpoint.keep_last}{apart}: "
        f"{_gib(size * (count + 1))} GiB with the one that is written."
    )


def table(plans: Sequence[Plan]) -> str:
    """Plans of a run on different numbers of GPUs as text: a line each, for the run file's stage."""
    first = plans[0]
    rows = [["GPUs", "nodes", "rows each", "s/step", "MFU", "time", *(["cost"] if first.price else [])]]
    for plan in plans:
        own, numbers = plan.own, [f"{plan.gpus:,}", f"{plan.nodes:,}", f"{plan.share:,}"]
        if own.rows:
            cost = [f"${plan.cost:,.0f}"] if first.price else []
            time = [_seconds(own.seconds), f"{plan.mfu_in_all:.0%}", duration(3600 * own.hours), *cost]
        else:
            time = ["doesn't fit"] + [""] * (len(rows[0]) - len(numbers) - 1)
        rows.append([*numbers, *time])
    recomputed = ", layers recomputed" if first.own.recomputed else ""
    lines = [f"{first.config.run.name} on {first.gpu_name}, stage {first.own.stage}{recomputed}:", *aligned(rows)]
    lines.append(_WRAPPED.fill(f"Assumed: {first.mfu:.0%} MFU of each GPU by itself; communication comes on top."))
    return "\n".join(lines)


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: sizes in bytes, times in seconds, `cost` in dollars. `run` is the run file's option; its
    `rows` is 0 if not even one row fits."""
    shared = ("gpus", "nodes", "mfu", "price", "cost", "mfu_in_all", "corpus_file")
    return {
        "name": plan.config.run.name,
        "gpu": plan.gpu_name,
        **{name: getattr(plan, name) for name in shared},
        "parameters": plan.parameters.count,
        "flops_per_row": sum(plan.flops.values()),
        "rows_per_gpu": plan.share,
        "usable_bytes": plan.usable,
        "checkpoint_bytes": plan.parameters.state,
        "run": _option_as_json(plan.own),
        "options": [_option_as_json(one) for one in plan.options],
    }


def _option_as_json(option: Option) -> dict[str, Any]:
    found = asdict(option)
    return {**found, "hours": None, "seconds": None} if not option.rows else found


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:,.0f}"


def _gib(size: float) -> str:
    size /= GIB
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}"


_HEADINGS = ["stage", "rec", "weights", "optim", "grads", "buffers", "acts", "rows", "peak", "host", "s/step", "time"]


def _cells(option: Option) -> list[str]:
    held = option.states
    return [
        str(option.stage),
        "yes" if option.recomputed else "",
        _gib(held.weights),
        _gib(held.master_weights + held.moments),
        _gib(held.gradients),
        _gib(held.buffers + held.reduction),
        _gib(option.one_row),
        str(option.rows or "none"),
        _gib(option.peak),
        _gib(held.host) if held.host else "",
        _seconds(option.seconds) if option.rows else "",
        duration(3600 * option.hours) if option.rows else "",
    ]
