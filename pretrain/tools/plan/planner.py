"""The needs of a run on GPUs of one kind: the largest micro-batch that fits, the time at a stated MFU, and the cost.

A collective takes the time of its bytes at `EFFICIENCY` of the slowest link on its way. What it takes to begin one, and
to pass from GPU to GPU, isn't counted: steps of many small messages, as of stage 3 on hundreds of GPUs, take longer.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.corpus import open_corpus
from data_pipeline.corpus.corpus_file import corpus_file_of
from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.stages.tokenizer import expected
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.models import EncoderOnlyConfig
from pretrain.hardware import cpu_speed as cpu
from pretrain.hardware.gpus import Gpu
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.tools.plan.activations import Rows, activations
from pretrain.tools.plan.zero_memory import Offload, Parameters, Setting, States, Traffic, states, traffic
from pretrain.trainer.validate import with_tokenizer_ids
from pretrain.zero.memory import SAFE

GIB = 2**30
RESERVED = 1.5 * GIB  # of a GPU, for CUDA, its libraries' workspaces and NCCL's buffers
EFFICIENCY = 0.8  # the share of a link's data-sheet bandwidth that large collectives of NCCL reach
FASTER = 1.3  # so many times faster, another stage is worth a warning
_PROBES = (1, 2, 16, 128)  # rows whose activations are counted; others lie on lines between them
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


def bandwidth(gpu: Gpu, gpus: int, nodes: int, network: float) -> float:
    """Bytes/s of each GPU in a collective of all. `network`: GB/s that each can send to other nodes.

    In NCCL's rings over several nodes each byte leaves a node once, and all network cards of the node share the work.
    """
    link = gpu.link if gpus > 1 else math.inf
    return EFFICIENCY * 1e9 * (min(link, network * gpus // nodes) if nodes > 1 else link)


def step_seconds(flops: float, recomputed: float, sent: Traffic, rate: float, bandwidth: float) -> tuple[float, float]:
    """Seconds of a step in which the GPUs compute, and in which they wait for each other.

    `flops` on all GPUs, forward and backward; `recomputed`: those of the layers that checkpointing computes again.
    `rate`: FLOP/s that all GPUs reach together. `bandwidth`: bytes/s of each.
    """
    forward, backward = flops / 3 / rate, (2 * flops + recomputed) / 3 / rate
    beside, behind, waited = (size / bandwidth for size in sent)
    return forward + backward, max(0.0, beside - forward) + max(0.0, behind - backward) + waited


@dataclass(frozen=True)
class Option:
    """One setting on a number of GPUs. `rows` is the largest micro-batch that fits; 0: not even one row does, and what
    follows `peak` is 0. `mfu`: of the whole step; waiting and recomputing are no useful work."""

    setting: Setting
    gpus: int
    nodes: int
    states: States
    one_row: int
    rows: int
    peak: int
    sent: float = 0.0
    seconds: float = 0.0
    waits: float = 0.0
    mfu: float = 0.0
    hours: float = 0.0
    cost: float = 0.0


def memory_checkpoint_bytes(parameters: Parameters, nodes: int) -> int:
    """Of each node's memory for checkpoints there: its ranks' state twice and, if there are more, the next node's."""
    return 2 * parameters.state // nodes * (2 if nodes > 1 else 1)


@dataclass
class Planner:
    """Finds what fits on numbers of GPUs of one kind, how long a run takes there, and what it costs.

    - `rows`: one row of the run. `network`: GB/s of a GPU to other nodes. `price`: dollars for a GPU and an hour.
    - `mfu`: the share of its peak that a GPU reaches while it computes. `days`: how long the run may take.
    - `corpus_file`: the one that row or vocabulary are from, if the corpus isn't built.
    """

    config: RunConfig
    rows: Rows
    gpu_name: str
    gpu: Gpu
    gpus_per_node: int
    network: float
    mfu: float
    price: float
    days: float | None = None
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
        self.on_cpu = self.gpu_name == cpu.NAME

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

    def own(self, gpus: int) -> Option:
        """The setting of the run file."""
        own = self.config.zero_stage, self.config.compute.activation_checkpointing
        return next(one for one in self.options(gpus) if (one.setting.stage, one.setting.checkpointing) == own)

    def best(self, gpus: int) -> Option | None:
        """The setting with the shortest step of those that fit."""
        return min((one for one in self.options(gpus) if one.rows), key=lambda option: option.hours, default=None)

    def faster_stage(self, gpus: int) -> Option | None:
        """The fastest other stage of the run file, if its own takes at least `FASTER` times as long."""
        own, options = self.own(gpus), self.options(gpus)
        alike = (one for one in options if one.rows and one.setting.checkpointing == own.setting.checkpointing)
        best = min(alike, key=lambda option: option.hours, default=None)
        return best if best and own.hours >= FASTER * best.hours else None

    def counts(self, asked: int) -> Iterator[int]:
        """Numbers of GPUs to compare: from an eighth of `asked` to eight times as many, by powers of two. There is one
        CPU."""
        if self.on_cpu:
            yield asked
            return
        for gpus in sorted({asked, *(max(1, int(asked * 2.0**power)) for power in range(-3, 4))}):
            whole_nodes = gpus <= self.gpus_per_node or gpus % self.gpus_per_node == 0
            if whole_nodes and not BatchPlan(self.config.batch, gpus).problems():
                yield gpus

    def cheapest(self, options: Iterable[Option | None]) -> Option | None:
        """The cheapest that ends in time."""
        hours = 24 * (self.days or math.inf)
        in_time = (option for option in options if option and option.hours <= hours)
        return min(in_time, key=lambda option: option.cost, default=None)

    def activations(self, rows: int, checkpointing: bool) -> int:
        """Bytes at the peak of a pass over a micro-batch of `rows`; counted for a few sizes, on the line through the
        nearest two for others."""
        if rows in _PROBES:
            compute, on_gpu, batch = self.config.compute, not self.on_cpu, replace(self.rows, count=rows)
            model, precision = self.config.model, self.config.precision
            return activations(model, batch, precision, checkpointing, on_gpu, on_gpu, compute.attention).peak
        above = next((probe for probe in _PROBES if probe > rows), _PROBES[-1])
        below = _PROBES[_PROBES.index(above) - 1]
        low, high = self.activations(below, checkpointing), self.activations(above, checkpointing)
        return int(low + (rows - below) / (above - below) * (high - low))

    def _option(self, setting: Setting, gpus: int) -> Option:
        config, zero, nodes = self.config, self.config.deepspeed.zero_optimization, -(-gpus // self.gpus_per_node)
        kept, share = (
            states(self.parameters, setting, gpus, config.precision, zero),
            BatchPlan(config.batch, gpus).micro_batch,
        )

        def peak(rows: int) -> int:
            return kept.peak(self.activations(rows, setting.checkpointing))

        fitting = [rows for rows in range(1, share + 1) if share % rows == 0 and peak(rows) <= self.usable]
        rows = max(fitting, default=0)
        option = Option(setting, gpus, nodes, kept, self.activations(1, setting.checkpointing), rows, peak(rows or 1))
        if not rows:
            return option
        sent = traffic(self.parameters, setting, gpus, share // rows, config.precision, zero)
        flops = config.batch.global_batch_size * sum(self.flops.values())
        layers = flops - config.batch.global_batch_size * self.flops["head"]
        fastest = gpus * self.gpu.flops("bf16" if config.precision == "bf16" else "fp32")
        speed = bandwidth(self.gpu, gpus, nodes, self.network)
        computes, waits = step_seconds(flops, layers * setting.checkpointing, sent, fastest * self.mfu, speed)
        seconds = computes + waits
        hours, mfu = self._steps() * seconds / 3600, flops / fastest / seconds
        return replace(
            option, sent=sum(sent), seconds=seconds, waits=waits, mfu=mfu, hours=hours, cost=hours * gpus * self.price
        )

    def _steps(self) -> float:
        """The run's steps, as steps of its full batch."""
        batch = self.config.batch
        last = batch.ramp_up[-1].until_step if batch.ramp_up else 0
        steps = self.config.run.max_steps
        ramp = sum(batch.rows(number) for number in range(min(last, steps))) / batch.global_batch_size
        return ramp + max(0, steps - last)

    def _near(self, gpus: int) -> str:
        """The nearest numbers of GPUs that can share the batches."""
        batch = self.config.batch
        sharing = [one for one in range(1, batch.global_batch_size + 1) if not BatchPlan(batch, one).problems()]
        below = [one for one in sharing if one < gpus][-1:]
        return " or ".join(map(str, below + [one for one in sharing if one > gpus][:1]))
