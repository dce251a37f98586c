"""The `optimizer:` and `schedule:` sections of a run file: one class per kind. This module doesn't import torch."""

import math
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from data_pipeline.base.config_file import Section

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average
Kind = Literal["norms", "biases", "embeddings", "output", "matrices"]


class ParameterGroup(Section):
    """Settings for some of the parameters.

    Kinds: norms, biases, embeddings (of tokens, positions and token types; biases of relative positions; a tied output
    matrix), output (an untied output matrix), matrices (all others).
    """

    match: Annotated[list[str], Field(min_length=1)]
    """The group's parameters, by kind (norms, biases, embeddings, output, matrices) or by name with wildcards:
    `decoder.layers.*.feed_forward.*`."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate of the group. null: the optimizer's peak learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group. null: the optimizer's weight decay."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.learning_rate is None and self.weight_decay is None:
            raise ValueError("sets neither learning_rate nor weight_decay")
        return self


class Freeze(Section):
    """Parameters that are frozen for the first steps, such as those that an adapted model has copied."""

    match: Annotated[list[str], Field(min_length=1)]
    """The frozen parameters, by kind or by name as in `groups`; `*` freezes all."""
    but: list[str] = []
    """Exceptions: parameters that train from the first step although `match` names them, such as
    `decoder.layers.*.cross_attention*`."""
    until_step: PositiveInt
    """The first step in which all parameters train; steps count from 0. Until then frozen parameters have a learning
    rate of 0. Their moments are updated meanwhile, and their gradients count in the norm that is clipped."""


NO_DECAY_OF_VECTORS = ParameterGroup(match=["norms", "biases"], weight_decay=0.0)


class OptimizerConfig(Section):
    """The settings that all optimizers have."""

    name: str
    """The optimizer."""
    learning_rate: PositiveFloat
    """The peak learning rate of the schedule."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay: a step subtracts learning rate · decay · parameter. 0: off."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Maximum L2 norm of the whole gradient; a larger gradient is scaled down to this norm. 0: off."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average (EMA) of the parameters: average ← decay · average + (1 − decay) ·
    parameters after each step. The average takes 4 bytes per parameter. `pretrain average --ema` makes a checkpoint of
    it. null: off."""
    groups: list[ParameterGroup] = [NO_DECAY_OF_VECTORS]
    """Parameter groups with settings of their own. A parameter belongs to the first group that matches it; parameters
    without a match have the optimizer's settings."""
    freeze: Freeze | None = None
    """Parameters that are frozen for the first steps. null: off."""

    def algorithm(self, kind: Kind) -> str:
        """The algorithm that updates parameters of this kind."""
        return self.name

    def rate(self, kind: Kind) -> float:
        """The peak learning rate of parameters of this kind, unless their group sets another."""
        return self.learning_rate

    def width_exponent(self, kind: Kind) -> float:
        """With muP, the learning rate of this kind is multiplied by m^-this at m times the base width (Yang et al.
        2021, table 8)."""
        return 1.0 if kind == "matrices" else 0.0


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""


class AdamWScaleConfig(OptimizerConfig):
    """nanoT5's optimizer (Nawrot 2023): AdamW with updates scaled by each tensor's root mean square (RMS)."""

    name: Literal["adamw_scale"] = "adamw_scale"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-6
    """Added to the square root of the second moment."""
    least_rms: PositiveFloat = 1e-3
    """Minimum RMS that an update is scaled by."""

    def width_exponent(self, kind: Kind) -> float:
        """Scaled updates shrink with a matrix's RMS, m^-½, already."""
        return 0.5 if kind == "matrices" else 0.0


class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer and Stern 2018), as in T5: without momentum."""

    name: Literal["adafactor"] = "adafactor"
    decay_rate: PositiveFloat = 0.8
    """The second moments decay by 1 − t^−decay_rate at step t."""
    clipping_threshold: PositiveFloat | None = 1.0
    """Maximum RMS of a tensor's update; a larger update is scaled down. null: off."""
    eps: tuple[PositiveFloat, PositiveFloat] = (1e-30, 1e-3)
    """Two constants: added to squared gradients, and the minimum RMS that an update is scaled by."""
    min_dim_size_to_factor: PositiveInt = 128
    """A matrix with fewer rows or columns than this keeps unfactored second moments, one per element."""
    multiply_by_parameter_scale: bool = True
    """Scale updates by each tensor's RMS."""

    def width_exponent(self, kind: Kind) -> float:
        """Scaled updates shrink with a matrix's RMS, m^-½, already."""
        return (0.5 if self.multiply_by_parameter_scale else 1.0) if kind == "matrices" else 0.0


class MuonConfig(OptimizerConfig):
    """Muon (Jordan et al. 2024) for matrices, AdamW for all other parameters, with `betas`, `eps` and
    `adamw_learning_rate`."""

    name: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton–Schulz iterations, which orthogonalize an update."""
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    """The dtype of the Newton–Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How an orthogonalized update is scaled. `match_rms_adamw`: by 0.2 · √(larger dimension) (Liu et al. 2025), so
    that one learning rate suits matrices and all other parameters. `original`: by √(rows / columns) if that exceeds
    1."""
    adamw_learning_rate: PositiveFloat | None = None
    """Peak learning rate of AdamW. null: `learning_rate`, which suits only with `match_rms_adamw`."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """AdamW: added to the square root of the second moment."""

    @model_validator(mode="after")
    def _rates_suit(self) -> Self:
        if self.adjust_lr_fn == "original" and self.adamw_learning_rate is None:
            raise ValueError("adjust_lr_fn: original needs an adamw_learning_rate: learning_rate suits matrices only")
        return self

    def algorithm(self, kind: Kind) -> str:
        return "muon" if kind == "matrices" else "adamw"

    def rate(self, kind: Kind) -> float:
        return self.learning_rate if kind == "matrices" else self.adamw_learning_rate or self.learning_rate

    def width_exponent(self, kind: Kind) -> float:
        """An orthogonalized update has singular values of 1, right at any width; 0.2 · √(larger dimension) grows as
        m^½."""
        return 0.5 if kind == "matrices" and self.adjust_lr_fn == "match_rms_adamw" else 0.0


class Schedule(Section):
    """The learning rate as a pure function of the step."""

    name: str
    """The shape of the schedule."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0 to the peak learning rate. With `warmup: constant` the learning rate is at its
    peak instead."""

    def factor(self, step: int, max_steps: int, peak: float) -> float:
        """The learning rate of step `step` (from 0) of `max_steps`, divided by the `peak`: from 0 to 1, unless
        `final_learning_rate` is above the peak. All parameter groups have this factor."""
        return self._in_warmup(step + 1) if step + 1 < self.warmup_steps else self._after(step + 1, max_steps, peak)

    def _in_warmup(self, count: int) -> float:
        return count / self.warmup_steps

    def _after(self, count: int, max_steps: int, peak: float) -> float:
        """The factor of step `count` (from 1), after the warm-up."""
        return 1.0

    def problems(self, max_steps: int) -> list[str]:
        """The settings that don't fit into a run of `max_steps`, one line each."""
        return []


_REMAINING = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "one_minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}


def _decayed(shape: str, count: int, begin: int, end: int, final: float) -> float:
    """The factor of step `count` of a decay to `final` between two steps."""
    progress = min(1.0, max(0, count - begin) / max(1, end - begin))
    return final + (1 - final) * _REMAINING[shape](progress)


class DecaySchedule(Schedule):
    """Decays to a final learning rate and stays there."""

    final_learning_rate: NonNegativeFloat = 0.0
    """The learning rate at the end of the decay."""
    until_step: PositiveInt | None = None
    """The step at which the decay ends; it may lie beyond the end of the run. null: `run.max_steps`."""

    def _after(self, count: int, max_steps: int, peak: float) -> float:
        end = self.until_step or max_steps
        return _decayed(self.name, count, self.warmup_steps, end, self.final_learning_rate / peak)

    def problems(self, max_steps: int) -> list[str]:
        if self.until_step is None or self.until_step > self.warmup_steps:
            return []
        return [f"until_step {self.until_step} is not after {self.warmup_steps} warmup_steps"]


class CosineSchedule(DecaySchedule):
    """Cosine decay to a final learning rate, where it stays."""

    name: Literal["cosine"] = "cosine"


class LinearSchedule(DecaySchedule):
    """Linear decay to a final learning rate, where it stays."""

    name: Literal["linear"] = "linear"


class WarmupStableDecaySchedule(Schedule):
    """Warmup-stable-decay (WSD): constant, then a decay over the last steps of the run (Hu et al. 2024)."""

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    decay_steps: PositiveInt
    """Number of steps of the decay, which ends with the run."""
    decay_shape: Literal["linear", "one_minus_sqrt"] = "linear"
    """The shape of the decay. `linear`: linear. `one_minus_sqrt`: by 1 − √progress (Hägele et al. 2024)."""
    final_learning_rate: NonNegativeFloat = 0.0
    """The learning rate at the end of the decay."""

    def _after(self, count: int, max_steps: int, peak: float) -> float:
        begin = max_steps - self.decay_steps
        return _decayed(self.decay_shape, count, begin, max_steps, self.final_learning_rate / peak)

    def problems(self, max_steps: int) -> list[str]:
        if self.warmup_steps + self.decay_steps <= max_steps:
            return []
        return [f"{self.warmup_steps} warmup_steps and {self.decay_steps} decay_steps exceed run.max_steps {max_steps}"]


class InverseSquareRootSchedule(Schedule):
    """Proportional to 1 / √step after the warm-up."""

    name: Literal["inverse_square_root"] = "inverse_square_root"
    warmup: Literal["constant", "linear"] = "constant"
    """The learning rate during warm-up. `constant`: the peak, as in T5. `linear`: rises from 0, as in the Transformer
    and in Adafactor with warmup_init."""

    def _in_warmup(self, count: int) -> float:
        """`constant`: Raffel et al. 2020, section 3.1.2. `linear`: Vaswani et al. 2017, section 5.3."""
        return 1.0 if self.warmup == "constant" else super()._in_warmup(count)

    def _after(self, count: int, max_steps: int, peak: float) -> float:
        return math.sqrt(max(self.warmup_steps, 1) / count)


class ConstantSchedule(Schedule):
    """Constant at the peak after the warm-up."""

    name: Literal["constant"] = "constant"


def _called(name: str) -> BeforeValidator:
    """Uses `name` for a section without a name."""
    return BeforeValidator(lambda given: {"name": name, **given} if isinstance(given, dict) else given)


AnyOptimizer = Annotated[
    AdamWConfig | AdamWScaleConfig | AdafactorConfig | MuonConfig, Field(discriminator="name"), _called("adamw")
]
AnySchedule = Annotated[
    CosineSchedule | LinearSchedule | WarmupStableDecaySchedule | InverseSquareRootSchedule | ConstantSchedule,
    Field(discriminator="name"),
    _called("cosine"),
]
