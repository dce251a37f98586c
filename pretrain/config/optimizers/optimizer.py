"""The settings that all optimizers have: the section `optimizer` of a run file. This module doesn't import torch."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from data_pipeline.base.config_file import Section

FP32 = 4  # bytes
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
    """The settings that all optimizers have. A subclass sets `implementation` and `name`, a Literal with the
    optimizer's name, and says what a parameter's state takes."""

    implementation: ClassVar[str]
    """The optimizer, as "package.module.Class". It is called with the parameter groups and these settings, and returns
    a `torch.optim.Optimizer`. See `pretrain.engine.optimizers`."""
    step_bytes: ClassVar[int] = 0
    """Bytes of the temporary tensors of a step, for each element that a rank updates."""

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

    def state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """Bytes of the state of a parameter of this kind and shape. ZeRO shards this state; state that each rank holds
        whole counts in `whole_state_bytes`."""
        raise NotImplementedError

    def whole_state_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """Bytes of the state of a parameter that each rank holds whole."""
        return 0

    def sharded_bytes(self, kind: Kind, shape: tuple[int, ...]) -> int:
        """Bytes of all that ZeRO shards besides a parameter: its state, and its moving average if there is one."""
        average = 0 if self.ema_decay is None else FP32 * math.prod(shape)
        return self.state_bytes(kind, shape) + average

    def identity(self) -> dict[str, Any]:
        """The settings that may not change over the life of a run. A subclass adds settings on which the shape of its
        state depends."""
        return {"name": self.name, "ema_decay": self.ema_decay}

    def without_bf16(self) -> Self:
        """These settings for a CPU that multiplies slowly in bf16. Weights and state are fp32 in any case."""
        return self

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

    def change_exponent(self, kind: Kind) -> float:
        """With muP, a step changes the elements of parameters of this kind in proportion to m^-this at m times the base
        width."""
        return 1.0 if kind == "matrices" else 0.0
