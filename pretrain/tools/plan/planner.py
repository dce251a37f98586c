"""What fits: the largest micro-batch of each setting on a number of GPUs, and what a run then takes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace

from data_pipeline.foundation.errors import UserError
from pretrain import models
from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.hardware import cpu_speed as cpu
from pretrain.hardware.gpus import Gpu
from pretrain.models.flops import Sizes, flops_by_part
from pretrain.models.model import Model
from pretrain.tools.plan.activations import Activations, Rows, activations
from pretrain.tools.plan.step_time import Arithmetic, Cluster, Step, Traffic, step, traffic
from pretrain.tools.plan.zero_memory import Parameters, Setting, States, settings, states
from pretrain.zero.memory import SAFE

GIB = 2**30
RESERVED = 1.5 * GIB  # of a GPU, for CUDA, its libraries' workspaces and NCCL's buffers
_PROBES = (1, 2, 16, 128)  # rows whose activations are counted; others lie on lines between them
FASTER = 1.3  # so many times faster, another stage is worth a warning
HEAD = "head"


@dataclass(frozen=True)
class Question:
    """The run, the GPUs and the prices that a plan is made for.

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


@dataclass(frozen=True)
class Option:
    """One setting on a number of GPUs. `rows` is the largest micro-batch that fits; 0: not even one row does."""

    setting: Setting
    cluster: Cluster
    states: States
    one_row: Activations
    rows: int
    peak: int
    traffic: Traffic | None = None
    step: Step | None = None
    hours: float = 0.0
    cost: float = 0.0


def memory_checkpoint_bytes(parameters: Parameters, nodes: int) -> int:
    """Of each node's memory for checkpoints there: its ranks' state twice and, if there are more, the next node's."""
    return 2 * parameters.state // nodes * (2 if nodes > 1 else 1)


class Planner:
    """Finds what fits on numbers of GPUs of one kind, how long a run takes there, and what it costs."""

    def __init__(self, question: Question):
        self.question = question
        batch = question.config.batch.model_copy(update={"micro_batch_size": None})  # a plan looks for the largest
        config = self.config = question.config.model_copy(update={"batch": batch})
        self.model: Model = models.outline(config.model)
        self.parameters = Parameters.of(self.model, config)
        row = question.rows
        targets = row.targets if self.model.decoder_reads_targets else row.predicted
        self.flops = flops_by_part(self.model, Sizes.of_example(row.inputs, targets))
        self.usable = SAFE * (question.gpu.memory * GIB - RESERVED)
        self.zero = config.deepspeed.zero_optimization

    @property
    def on_cpu(self) -> bool:
        return self.question.gpu_name == cpu.NAME

    def memory_checkpoint_bytes(self, gpus: int) -> int:
        """Of each node's memory for its checkpoints there: two of its ranks' states, and of the next node's."""
        if self.config.checkpoint.memory_every_steps is None:
            return 0
        return memory_checkpoint_bytes(self.parameters, self._cluster(gpus).nodes)

    def copied_bytes(self, gpus: int) -> int:
        """Of each node's memory: the copy of its ranks' state that a checkpoint on disk is written from."""
        return self.parameters.state // self._cluster(gpus).nodes

    def options(self, gpus: int) -> list[Option]:
        """Every setting on `gpus` GPUs. Raises UserError if they can't share the run's batches."""
        share = self._share(gpus)
        return [self._option(setting, self._cluster(gpus), share) for setting in settings(self.config)]

    def best(self, gpus: int) -> Option | None:
        """The setting with the shortest step of those that fit; one that offloads only if no other fits."""
        fitting = [option for option in self.options(gpus) if option.step is not None]
        return min(_without_offload(fitting), key=lambda option: option.hours, default=None)

    def own(self, gpus: int) -> Option:
        """The setting of the run file."""
        moved = {*self.zero.offloaded_to("cpu"), *self.zero.offloaded_to("nvme")}
        offload = "optimizer and weights" if "offload_param" in moved else "optimizer" if moved else "none"
        own = self.config.zero_stage, offload, self.config.compute.activation_checkpointing
        settings = ((option.setting, option) for option in self.options(gpus))
        return next(option for one, option in settings if (one.stage, one.offload, one.checkpointing) == own)

    def faster_stage(self, gpus: int) -> Option | None:
        """The fastest other stage of the run file, if its own takes at least `FASTER` times as long."""
        own = self.own(gpus)
        stages = [replace(own.setting, stage=stage) for stage in (1, 2, 3)]
        fitting = (option for option in self.options(gpus) if option.setting in stages and option.step)
        best = min(fitting, key=lambda option: option.hours, default=None)
        return best if best and own.step and own.hours >= FASTER * best.hours else None

    def counts(self, asked: int) -> Iterator[int]:
        """Numbers of GPUs to compare: from an eighth of `asked` to eight times as many, by powers of two. There is one
        CPU."""
        if self.on_cpu:
            yield asked
            return
        for gpus in sorted({asked, *(max(1, int(asked * 2.0**power)) for power in range(-3, 4))}):
            whole_nodes = gpus <= self.question.gpus_per_node or gpus % self.question.gpus_per_node == 0
            if whole_nodes and self._can_share(gpus):
                yield gpus

    def cheapest(self, options: Iterable[Option | None]) -> Option | None:
        """The cheapest that ends in time; one that offloads, whose cost is only a lower bound, if no other does."""
        hours = 24 * (self.question.days or math.inf)
        in_time = [option for option in options if option and option.hours <= hours]
        return min(_without_offload(in_time), key=lambda option: option.cost, default=None)

    def activations(self, rows: int, checkpointing: bool) -> Activations:
        """Of a micro-batch of `rows`; counted for a few sizes, on the line through the nearest two for others."""
        if rows in _PROBES:
            config, on_gpu = self.config, not self.on_cpu
            batch = replace(self.question.rows, count=rows)
            return activations(
                config.model, batch, config.precision, checkpointing, on_gpu, on_gpu, config.compute.attention
            )
        above = next((probe for probe in _PROBES if probe > rows), _PROBES[-1])
        below = _PROBES[_PROBES.index(above) - 1]
        low, high = self.activations(below, checkpointing), self.activations(above, checkpointing)
        part = (rows - below) / (above - below)
        return Activations(
            *(int(one + part * (other - one)) for one, other in zip(astuple(low), astuple(high), strict=True))
        )

    def _option(self, setting: Setting, cluster: Cluster, share: int) -> Option:
        config = self.config
        kept = states(self.parameters, setting, cluster.gpus, config.precision, self.zero)

        def peak(rows: int) -> int:
            return kept.peak(self.activations(rows, setting.checkpointing).total)

        fitting = [rows for rows in range(1, share + 1) if share % rows == 0 and peak(rows) <= self.usable]
        rows, one_row = max(fitting, default=0), self.activations(1, setting.checkpointing)
        option = Option(setting, cluster, kept, one_row, rows, peak(rows or 1))
        return self._timed(option, share // rows) if rows else option

    def _timed(self, option: Option, micro_batches: int) -> Option:
        question, cluster, config = self.question, option.cluster, self.config
        sent = traffic(self.parameters, option.setting, cluster.gpus, micro_batches, config.precision, self.zero)
        rows, model = config.batch.global_batch_size, sum(self.flops.values())
        flops = Arithmetic(rows * model, rows * (model - self.flops[HEAD]))
        peak = question.gpu.flops("bf16" if config.precision == "bf16" else "fp32")
        taken = step(flops, sent, cluster, option.setting, peak, question.mfu)
        hours = self._steps() * taken.seconds / 3600
        return replace(option, traffic=sent, step=taken, hours=hours, cost=hours * cluster.gpus * question.price)

    def _steps(self) -> float:
        """The run's steps, as steps of its full batch."""
        batch = self.config.batch
        last = batch.ramp_up[-1].until_step if batch.ramp_up else 0
        steps = self.config.run.max_steps
        ramp = sum(batch.rows(number) for number in range(min(last, steps))) / batch.global_batch_size
        return ramp + max(0, steps - last)

    def _cluster(self, gpus: int) -> Cluster:
        nodes = -(-gpus // self.question.gpus_per_node)
        return Cluster(self.question.gpu, gpus, nodes, self.question.network)

    def _share(self, gpus: int) -> int:
        """Rows of a GPU in the smallest step."""
        if problems := BatchPlan(self.config.batch, gpus).problems():
            raise UserError("\n".join(f"--gpus: {problem}; choose {self._near(gpus)}" for problem in problems))
        return BatchPlan(self.config.batch, gpus).micro_batch

    def _near(self, gpus: int) -> str:
        """The nearest numbers of GPUs that can share the batches."""
        sharing = [one for one in range(1, self.config.batch.global_batch_size + 1) if self._can_share(one)]
        below = [one for one in sharing if one < gpus][-1:]
        return " or ".join(map(str, below + [one for one in sharing if one > gpus][:1]))

    def _can_share(self, gpus: int) -> bool:
        return not BatchPlan(self.config.batch, gpus).problems()


def _without_offload(options: list[Option]) -> list[Option]:
    """Those that offload nothing, if there are any."""
    return [option for option in options if option.setting.offload == "none"] or options
