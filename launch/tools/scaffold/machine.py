"""Finds what this machine can train in some hours: its speed and precision, the model and the number of steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from data_pipeline.base import paths
from data_pipeline.base.config_file import Section, load
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import counted
from pretrain.config.model_config import ModelConfig
from pretrain.config.models import AnyModelConfig
from pretrain.device_speed import GPU_MFU, cpu_share, gpu_of_device, product_flops
from pretrain.hardware import cpu_multiplies_bf16, device_type, threads_per_rank
from pretrain.models import meta_model
from pretrain.models.flops import Sizes, count_flops

SERIES = {  # by the name for users: the prefix and the sizes of shipped models, smallest first
    "t5gemma2": ("t5gemma2", ("1.2m", "4.5m", "15m", "58m", "214m", "828m", "2.8b")),
    "t5": ("t5-v1.1", ("1m", "5m", "15m", "small", "base", "large", "xl", "xxl")),
    "bart": ("bart", ("base", "large")),
    "t5gemma": ("t5gemma", ("s", "b", "l", "xl")),
    "autoregressive": ("autoregressive", ("small", "yan2024")),
    "gpt2": ("gpt2", ("small", "medium")),
    "bert": ("bert", ("base", "large")),
}
DEFAULT = "t5gemma2"
_HOUR = 3600.0
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
_MOST_EPOCHS = 40  # more repetitions teach nothing (Muennighoff et al. 2023)
_FEWEST_STEPS, _SMALLEST_BATCH, _LARGEST_BATCH = 2000, 8, 128
MOST_EVALUATED = 0.1  # of the training's time
_MOST_EVALUATIONS, _FEWEST_EVALUATIONS = 20, 5
_MOST_ROWS, _FEWEST_ROWS = 256, 8  # held-out rows of an evaluation
_UNKNOWN = 20e12  # FLOP/s of a GPU that isn't in pretrain/device_speed.py


Precision = Literal["bf16", "fp32"]


def models_of(series: str, size: str | None = None) -> tuple[str, ...]:
    """The names of a series' models in configs/models, or of the model of one `size`. Raises UserError, with the known
    names."""
    if series not in SERIES:
        raise UserError(f"--family: {series!r}; expected one of {', '.join(SERIES)}")
    prefix, sizes = SERIES[series]
    if size and size not in sizes:
        raise UserError(f"--size: {series} has no {size!r}; expected one of {', '.join(sizes)}")
    return tuple(f"{prefix}-{one}" for one in sizes if size in (None, one))


class _ModelFile(Section):
    model: AnyModelConfig


def model_named(name: str) -> ModelConfig:
    """The model of configs/models/NAME.yaml. Raises ValueError if there is none."""
    return load(paths.config(f"configs:models/{name}.yaml"), [], _ModelFile).model


@dataclass(frozen=True)
class Machine:
    """This machine. `flops`: FLOP/s in wide matmuls; `known`: how they are known."""

    gpus: int
    name: str
    flops: float
    known: str
    precision: Precision

    @classmethod
    def this(cls) -> "Machine":
        if device_type() == "cpu":
            name = f"{counted(threads_per_rank(1), 'core')}, no GPU"
            return cls(0, name, product_flops(), "measured in fp32", _precision(cpu_multiplies_bf16()))
        device, gpus = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        gpu, precision = gpu_of_device(device.name), _precision(device.major >= 8)
        flops, known = (gpu.flops(precision), "by its data sheet") if gpu else (_UNKNOWN, "guessed: an unknown GPU")
        return cls(gpus, f"{gpus} × {device.name}", gpus * flops, known, precision)

    def seconds_of_row(self, config: ModelConfig, lengths: tuple[int, int]) -> float:
        """The time of training on a row: the row's FLOPs, divided by the FLOP/s that the model's width reaches."""
        share = GPU_MFU if self.gpus else cpu_share(config.width)
        return count_flops(meta_model(config), Sizes.of_example(*lengths)) / (share * self.flops)

    def __str__(self) -> str:
        speed = f"{self.flops / 1e9:,.0f} GFLOP/s in wide matmuls ({self.known})"
        return f"{self.name}, {speed}; precision {self.precision}"


def _precision(multiplies_bf16: bool) -> Precision:
    return "bf16" if multiplies_bf16 else "fp32"


@dataclass(frozen=True)
class FirstRun:
    """A first run. A step has `batch` rows and `tokens` tokens, and takes about `seconds`."""

    model: str
    config: ModelConfig
    steps: int
    batch: int
    seconds: float
    tokens: int

    @property
    def tokens_per_parameter(self) -> float:
        return self.steps * self.tokens / meta_model(self.config).num_parameters()


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run: one every `every_steps`, each of `rows` held-out rows. All take about `seconds`."""

    every_steps: int
    rows: int
    seconds: float

    @classmethod
    def of(cls, run: FirstRun, passes: int) -> "Evaluations":
        """Up to 20 evaluations of up to 256 rows, which take a tenth of the time of the training at most; in the
        shortest runs five of 8 rows.

        `passes`: forward passes over each row. Training on a row takes as long as three.
        """
        affordable = MOST_EVALUATED * 3 * run.steps * run.batch / passes
        number = min(run.steps, max(_FEWEST_EVALUATIONS, min(_MOST_EVALUATIONS, int(affordable / _MOST_ROWS))))
        rows = min(_MOST_ROWS, max(_FEWEST_ROWS, int(affordable / number)))
        every = -(-run.steps // number)
        return cls(every, rows, run.steps / every * rows * passes / 3 * run.seconds / run.batch)


def run_within(
    hours: float,
    names: Sequence[str],
    machine: Machine,
    vocabulary: int,
    sentinels: int,
    lengths: tuple[int, int],
    rows: float,
) -> FirstRun:
    """The largest model of `names` that reads 20 tokens a parameter within `hours`, else the smallest, with as many
    steps as fit. `names` has the smallest model first.

    `vocabulary`: the largest that the text can fill; a model takes at most its own. `lengths`: of a row's input and
    target. `rows`: number of rows of the text; the run ends after it has read the text 40 times.
    """
    chosen = None
    for name in names:
        config, most = model_named(name), vocabulary + sentinels
        config = config.model_copy(update={"vocab_size": min(config.vocab_size or most, most)})
        possible = hours * _HOUR / machine.seconds_of_row(config, lengths)
        if chosen and possible * sum(lengths) < TOKENS_PER_PARAMETER * meta_model(config).num_parameters():
            break
        chosen = name, config, possible
    assert chosen
    name, config, possible = chosen
    total = min(possible, max(1.0, _MOST_EPOCHS * rows))
    bound = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, total / _FEWEST_STEPS), max(1.0, rows))
    batch = 2 ** int(math.log2(bound))
    seconds = hours * _HOUR * batch / possible
    return FirstRun(name, config, max(1, int(total / batch)), batch, seconds, batch * sum(lengths))
