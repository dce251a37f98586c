"""Finds what this machine can train in some hours: its speed and precision, the model and the number of steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from data_pipeline.base import paths
from data_pipeline.base.config_file import Section, load
from data_pipeline.base.formatting import counted
from pretrain.config.model_config import ModelConfig
from pretrain.config.models import AnyModelConfig
from pretrain.device_speed import GPU_MFU, cpu_share, gpu_of_device, product_flops
from pretrain.hardware import cpu_multiplies_bf16, device_type, threads_per_rank
from pretrain.models import meta_model
from pretrain.models.flops import Sizes, count_flops

TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
_EVALUATED = 0.1  # of the training's time, at most
_MOST_EPOCHS = 40  # more repetitions teach nothing (Muennighoff et al. 2023)
_FEWEST_STEPS, _SMALLEST_BATCH, _LARGEST_BATCH = 2000, 8, 128
_FEWEST_OF_ANY_BATCH = 20  # steps: of a model that is too large for the machine, a step has fewer rows
_EVALUATIONS, _FEWEST_ROWS, _MOST_ROWS = 10, 8, 256  # of a run; held-out rows of each
_UNKNOWN = 20e12  # FLOP/s of a GPU that isn't in pretrain/device_speed.py


Precision = Literal["bf16", "fp32"]


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
    def vocabulary(self) -> int:
        """The size of the vocabulary, with sentinels."""
        assert self.config.vocab_size
        return self.config.vocab_size

    @property
    def tokens_per_parameter(self) -> float:
        return self.steps * self.tokens / meta_model(self.config).num_parameters()

    @property
    def hours(self) -> float:
        """The time of the training and its evaluations, at most."""
        return (1 + _EVALUATED) * self.steps * self.seconds / 3600

    @property
    def evaluations(self) -> tuple[int, int]:
        """The steps between ten evaluations, and the held-out rows of each: as many as take a tenth of the training's
        time, but 8 or more. `input_use` passes a row four times; training on a row takes as long as three passes."""
        every = -(-self.steps // _EVALUATIONS)
        return every, min(_MOST_ROWS, max(_FEWEST_ROWS, int(_EVALUATED * every * self.batch * 3 / 4)))


def run_within(
    hours: float,
    names: Sequence[str],
    machine: Machine,
    vocabulary: int,
    lengths: tuple[int, int],
    rows: float,
) -> FirstRun:
    """The largest model of `names` that reads 20 tokens a parameter within `hours`, else the smallest, with as many
    steps as fit. `names` has the smallest model first.

    `vocabulary`: the corpus's, with its sentinels; a model takes at most its own. `lengths`: of a row's input and
    target. `rows`: number of rows of the text; the run ends after it has read the text 40 times.
    """
    chosen = None
    for name in names:
        config = model_named(name)
        config = config.model_copy(update={"vocab_size": min(config.vocab_size or vocabulary, vocabulary)})
        of_row = machine.seconds_of_row(config, lengths)
        possible = 3600 * hours / (1 + _EVALUATED) / of_row
        if chosen and possible * sum(lengths) < TOKENS_PER_PARAMETER * meta_model(config).num_parameters():
            break
        chosen = name, config, possible, of_row
    assert chosen
    name, config, possible, of_row = chosen
    total = max(1.0, min(possible, _MOST_EPOCHS * rows))
    largest = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, total / _FEWEST_STEPS))
    batch = 2 ** int(math.log2(max(1.0, min(largest, rows, total / _FEWEST_OF_ANY_BATCH))))
    ranks = machine.gpus or 1
    batch = -(-batch // ranks) * ranks  # each rank has as many rows
    return FirstRun(name, config, max(1, int(total / batch)), batch, batch * of_row, batch * sum(lengths))
