"""The `schedule:` section of a run file: a class per shape. This module doesn't import torch."""

import math
from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from data_pipeline.base.config_file import OneOf, Section


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


_SCHEDULES: dict[str, type[Schedule]] = {
    "cosine": CosineSchedule,
    "linear": LinearSchedule,
    "warmup_stable_decay": WarmupStableDecaySchedule,
    "inverse_square_root": InverseSquareRootSchedule,
    "constant": ConstantSchedule,
}
AnySchedule = Annotated[Schedule, OneOf("name", _SCHEDULES, default="cosine")]
"""The `schedule:` section of a run file; `name` selects the class."""
