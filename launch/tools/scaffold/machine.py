"""What this machine can train in an hour: its speed and precision, and the model and the steps that fit."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from data_pipeline.foundation import paths
from data_pipeline.foundation.config_file import Section, load
from data_pipeline.foundation.formatting import counted, duration
from launch.tools.scaffold.measured_steps import PATIENCE, Passes, measure
from pretrain.config.models import AnyModelConfig, ModelConfig
from pretrain.hardware import (
    Gpu,
    cpu_multiplies_bf16,
    cpu_share,
    device_type,
    gpu_of_device,
    product_flops,
    threads_per_rank,
)
from pretrain.models import outline
from pretrain.models.flops import Sizes, count_flops

SIZES = tuple(f"t5gemma2-{size}" for size in ("1.2m", "4.5m", "15m", "58m", "214m", "828m", "2.8b"))
_HOUR = 3600.0
_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
_MOST_EPOCHS = 40  # beyond, repeated text teaches nothing more (Muennighoff et al. 2023)
_FEWEST_STEPS, _SMALLEST_BATCH, _LARGEST_BATCH = 2000, 8, 128
_MFU = 0.31  # of a GPU; the default of pretrain plan
MICRO_BATCH = 8  # rows on a CPU
_LONGEST_PASS = 2.0  # s; a slower micro-batch isn't measured
_VOCABULARY = 32_000  # of a model that has the corpus's
_ALONE = " once nothing else runs"
_UNKNOWN = 20e12  # FLOP/s of a GPU that isn't in pretrain/hardware.py


class _ModelFile(Section):
    model: AnyModelConfig


def model_named(name: str) -> ModelConfig:
    """The model of configs/models/NAME.yaml. Raises ValueError if there is none."""
    return load(paths.config(f"configs:models/{name}.yaml"), [], _ModelFile).model


@dataclass(frozen=True)
class Machine:
    """This machine: the number of its GPUs, what they are called, and whether products of bf16 are fast."""

    gpus: int
    name: str
    gpu: Gpu | None
    bf16: bool

    @classmethod
    def this(cls) -> "Machine":
        if device_type() == "cuda":
            gpu = torch.cuda.get_device_properties(0)
            return cls(torch.cuda.device_count(), gpu.name, gpu_of_device(gpu.name), gpu.major >= 8)
        return cls(0, counted(threads_per_rank(1), "core"), None, cpu_multiplies_bf16())

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        return "bf16" if self.bf16 else "fp32"

    @cached_property
    def products(self) -> float:
        """FLOP/s in wide products: of GPUs by their data sheet, of CPUs measured now, in fp32."""
        if self.gpus:
            return self.gpus * (self.gpu.flops(self.precision) if self.gpu else _UNKNOWN)
        return product_flops()

    def seconds_of_row(self, config: ModelConfig, lengths: tuple[int, int]) -> float:
        """The time that training a model takes for a row, by the FLOP/s that its width reaches."""
        rate = self.products * (_MFU if self.gpus else cpu_share(config.width))
        return count_flops(outline(config), Sizes.of_example(*lengths)) / rate

    def __str__(self) -> str:
        what = f"{self.gpus} × {self.name}" if self.gpus else f"{self.name}, no GPU"
        how = "measured in fp32" if not self.gpus else "by its data sheet" if self.gpu else "guessed: an unknown GPU"
        return f"{what}, {self.products / 1e9:,.0f} GFLOP/s in wide products ({how}); precision {self.precision}"


@dataclass(frozen=True)
class FirstRun:
    """How a model is trained: steps of `batch` rows, each of which takes about `seconds`; on a CPU, by `passes`."""

    model: str
    config: ModelConfig
    steps: int
    batch: int
    seconds: float
    passes: Passes | None = None
    too_slow: bool = False

    def measured(self, machine: Machine, lengths: tuple[int, int]) -> "FirstRun":
        """The same with the time that a few passes take here, if this is a CPU and they take seconds."""
        rows = min(MICRO_BATCH, self.batch)
        config = with_vocabulary(self.config, _VOCABULARY, 0)
        if machine.gpus or self.seconds * rows / self.batch > _LONGEST_PASS:
            return self
        passes = measure(config, rows, lengths, machine.precision)
        if passes is None:
            return replace(self, too_slow=True)
        return replace(self, seconds=self.batch * passes.idle, passes=passes)

    def promise(self) -> list[str]:
        """How long the run takes, and on what grounds, in a line or two."""
        time = duration(self.steps * self.seconds)
        what = f"model: {self.model}, {self.steps:,} steps of {self.batch} rows: about {time}"
        if self.too_slow:
            most = f"not three passes in {PATIENCE:.0f} s"
            return [f"{what}{_ALONE}", f"measured: {most}; other processes use this machine, or all its memory"]
        if self.passes is None:
            return [what]
        one, now = (self.batch * each for each in (self.passes.one, self.passes.all))
        ended = math.isfinite(now)
        with_all = f"{now:.2g} s" if ended else f"more than {PATIENCE:.0f} s"
        took = f"measured: the passes of a step took {one:.2g} s with 1 thread, {with_all} with {self.passes.threads}"
        if not self.passes.busy:
            return [what, took]
        lines = [
            f"{what}{_ALONE}, {duration(self.steps * now) if ended else 'far more'} as it is now",
            f"{took}; other processes use this machine (load {self.passes.load:.1f})",
        ]
        if one < now:
            lines.append(f"meanwhile run.cpu_threads=1 takes {duration(self.steps * one)}")
        return lines


def run_of_an_hour(
    machine: Machine, vocabulary: int, sentinels: int, lengths: tuple[int, int], rows: float
) -> FirstRun:
    """The largest of `SIZES` that reads 20 tokens a parameter in an hour, else the smallest, and an hour of its steps.

    `vocabulary` is the largest that the text can fill; each model takes at most its own. `lengths` are those of a row.
    The text has `rows` of them; steps end where it has been read 40 times.
    """
    chosen = None
    for name in SIZES:
        config = with_vocabulary(model_named(name), vocabulary, sentinels)
        per_hour = _HOUR / machine.seconds_of_row(config, lengths)
        if chosen and per_hour * sum(lengths) < _TOKENS_PER_PARAMETER * outline(config).num_parameters():
            break
        chosen = name, config, per_hour
    assert chosen
    name, config, per_hour = chosen
    most = min(per_hour, max(1.0, _MOST_EPOCHS * rows))
    bound = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, most / _FEWEST_STEPS), max(1.0, rows))
    batch = 2 ** int(math.log2(bound))
    return FirstRun(name, config, max(1, int(most / batch)), batch, _HOUR * batch / per_hour)


def with_vocabulary(config: ModelConfig, vocabulary: int, sentinels: int) -> ModelConfig:
    """`config` with at most `vocabulary` tokens and the sentinels."""
    size = config.vocab_size or vocabulary + sentinels
    return config.model_copy(update={"vocab_size": min(size, vocabulary + sentinels)})
