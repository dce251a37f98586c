"""Learning rates as pure functions of the step."""

import math

from pretrain.config import RunConfig
from pretrain.optimizers.config import ConstantSchedule, InverseSquareRootSchedule, WarmupStableDecaySchedule


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of step `step` (from 0), of parameters to which no group gives another.

    inverse_square_root: T5's rule (Raffel et al. 2020, section 3.1.2): constant over the warm-up, then ∝ 1/√step.
    The others rise linearly from 0 over the warm-up. constant: then flat. cosine, linear: then down to
    `final_learning_rate` at run.max_steps, along half a cosine or a line. warmup_stable_decay: flat, then down over the
    last `decay_steps`.
    """
    peak, schedule, count = config.optimizer.learning_rate, config.schedule, step + 1
    warmup = schedule.warmup_steps
    if isinstance(schedule, InverseSquareRootSchedule):
        return peak * math.sqrt(max(warmup, 1) / max(count, warmup, 1))
    if count < warmup:
        return peak * count / warmup
    if isinstance(schedule, ConstantSchedule):
        return peak
    begin, shape = warmup, str(schedule.name)
    if isinstance(schedule, WarmupStableDecaySchedule):
        begin, shape = config.run.max_steps - schedule.decay_steps, schedule.decay_shape
    progress = min(1.0, max(0, count - begin) / max(1, config.run.max_steps - begin))
    final = schedule.final_learning_rate
    return final + (peak - final) * _REMAINING[shape](progress)


_REMAINING = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "one_minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
