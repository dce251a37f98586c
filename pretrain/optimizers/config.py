"""The `optimizer:` and `schedule:` sections of a run file: one class per kind. Nothing here imports torch."""

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

from data_pipeline.foundation.config_file import Section

Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average
Kind = Literal["norms", "biases", "embeddings", "output", "matrices"]


class ParameterGroup(Section):
    """Overrides settings for the parameters whose kind or name matches an entry of `match`. Names may have wildcards:
    "decoder.layers.*.feed_forward.*". Kinds: norms, biases, embeddings (of tokens, positions and token types; biases of
    relative positions; a tied output matrix), output (an untied output matrix), matrices (all others)."""

    match: Annotated[list[str], Field(min_length=1)]
    learning_rate: PositiveFloat | None = None
    weight_decay: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.learning_rate is None and self.weight_decay is None:
            raise ValueError("sets neither learning_rate nor weight_decay")
        return self


NO_DECAY_OF_VECTORS = ParameterGroup(match=["norms", "biases"], weight_decay=0.0)


class OptimizerConfig(Section):
    """`learning_rate` is the schedule's peak. `weight_decay` is decoupled: a step subtracts rate · decay · parameter.
    `gradient_clipping` is the largest L2 norm of the whole gradient; 0: no clipping. A parameter belongs to the first
    of `groups` that matches it; parameters without a match use the values here."""

    name: str
    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    gradient_clipping: NonNegativeFloat = 1.0
    groups: list[ParameterGroup] = [NO_DECAY_OF_VECTORS]

    def algorithm(self, kind: Kind) -> str:
        """The algorithm that updates parameters of this kind."""
        return self.name

    def rate(self, kind: Kind) -> float:
        """The peak learning rate of this kind, unless a group sets another."""
        return self.learning_rate


class AdamWConfig(OptimizerConfig):
    """Loshchilov and Hutter 2019."""

    name: Literal["adamw"] = "adamw"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class AdamWScaleConfig(OptimizerConfig):
    """nanoT5's optimizer (Nawrot 2023): AdamW with steps scaled by each tensor's RMS, which counts as `least_rms` at
    least."""

    name: Literal["adamw_scale"] = "adamw_scale"
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-6
    least_rms: PositiveFloat = 1e-3


class AdafactorConfig(OptimizerConfig):
    """Shazeer and Stern 2018, as in T5: without momentum. Second moments decay by 1 − t^−`decay_rate`. An update's RMS
    is clipped to `clipping_threshold` (null: no clipping). With `multiply_by_parameter_scale`, steps are scaled by the
    parameter's RMS. `eps` is the smallest squared gradient and the smallest RMS of a parameter. A matrix with fewer
    rows or columns than `min_dim_size_to_factor` keeps the second moment of each element."""

    name: Literal["adafactor"] = "adafactor"
    decay_rate: PositiveFloat = 0.8
    clipping_threshold: PositiveFloat | None = 1.0
    eps: tuple[PositiveFloat, PositiveFloat] = (1e-30, 1e-3)
    min_dim_size_to_factor: PositiveInt = 128
    multiply_by_parameter_scale: bool = True


class MuonConfig(OptimizerConfig):
    """Jordan et al. 2024, for matrices; AdamW for every other kind, with `betas`, `eps` and `adamw_learning_rate`.

    `adjust_lr_fn`: match_rms_adamw scales an orthogonal update by 0.2 · √(larger dimension) (Liu et al. 2025), so that
    one learning rate suits both (`adamw_learning_rate: null`); original scales it by √(rows / columns) if that exceeds
    1. `newton_schulz_dtype`: the dtype in which an update is made orthogonal.
    """

    name: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    adamw_learning_rate: PositiveFloat | None = None
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8

    @model_validator(mode="after")
    def _rates_suit(self) -> Self:
        if self.adjust_lr_fn == "original" and self.adamw_learning_rate is None:
            raise ValueError("adjust_lr_fn: original needs an adamw_learning_rate: learning_rate suits matrices only")
        return self

    def algorithm(self, kind: Kind) -> str:
        return "muon" if kind == "matrices" else "adamw"

    def rate(self, kind: Kind) -> float:
        return self.learning_rate if kind == "matrices" else self.adamw_learning_rate or self.learning_rate


class Schedule(Section):
    """The formulas are in pretrain/optimizers/schedules.py."""

    name: str
    warmup_steps: NonNegativeInt = 0

    def problems(self, max_steps: int) -> list[str]:
        """What doesn't fit into a run of `max_steps`."""
        return []


class DecaySchedule(Schedule):
    """Decays to `final_learning_rate` at `until_step` (null: run.max_steps) and stays there."""

    final_learning_rate: NonNegativeFloat = 0.0
    until_step: PositiveInt | None = None

    def problems(self, max_steps: int) -> list[str]:
        if self.until_step is None or self.until_step > self.warmup_steps:
            return []
        return [f"until_step {self.until_step} is not after {self.warmup_steps} warmup_steps"]


class CosineSchedule(DecaySchedule):
    name: Literal["cosine"] = "cosine"


class LinearSchedule(DecaySchedule):
    name: Literal["linear"] = "linear"


class WarmupStableDecaySchedule(Schedule):
    """Constant until `decay_steps` before the end (Hu et al. 2024), then decays linearly or, with
    `decay_shape: one_minus_sqrt`, by 1 − √progress (Hägele et al. 2024)."""

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    decay_steps: PositiveInt
    decay_shape: Literal["linear", "one_minus_sqrt"] = "linear"
    final_learning_rate: NonNegativeFloat = 0.0

    def problems(self, max_steps: int) -> list[str]:
        if self.warmup_steps + self.decay_steps <= max_steps:
            return []
        return [f"{self.warmup_steps} warmup_steps and {self.decay_steps} decay_steps exceed run.max_steps {max_steps}"]


class InverseSquareRootSchedule(Schedule):
    """`warmup`: constant, as in T5, or linear, as in the Transformer and in Adafactor with warmup_init."""

    name: Literal["inverse_square_root"] = "inverse_square_root"
    warmup: Literal["constant", "linear"] = "constant"


class ConstantSchedule(Schedule):
    name: Literal["constant"] = "constant"


def _called(name: str) -> BeforeValidator:
    """Uses `name` for a section without a name."""
    return BeforeValidator(lambda given: {"name": name, **given} if isinstance(given, dict) else given)


AnyOptimizer = Annotated[
    AdamWConfig | AdamWScaleConfig | AdafactorConfig | MuonConfig,
    Field(discriminator="name"),
    _called("adamw"),
]
AnySchedule = Annotated[
    CosineSchedule | LinearSchedule | WarmupStableDecaySchedule | InverseSquareRootSchedule | ConstantSchedule,
    Field(discriminator="name"),
    _called("cosine"),
]
