"""Schedules of the learning rate as pure functions of the step."""

import math

from pretrain.config.optimizers import (
    AnySchedule,
    ConstantSchedule,
    DecaySchedule,
    InverseSquareRootSchedule,
    OptimizerConfig,
    WarmupStableDecaySchedule,
)


def factor(optimizer: OptimizerConfig, schedule: AnySchedule, max_steps: int, step: int) -> float:
    """The learning rate of step `step` (from 0) relative to its peak, the same for every group of parameters.

    It lies between 0 and 1, unless `final_learning_rate` is above the optimizer's learning rate. During warm-up every
    schedule rises linearly from 0, except inverse_square_root with `warmup: constant`, which starts at its peak: T5's
    rule (Raffel et al. 2020, section 3.1.2). After warm-up:

    - inverse_square_root: ∝ 1/√step; with `warmup: linear`, the rule of Vaswani et al. 2017, section 5.3
    - constant: constant
    - cosine, linear: decays to `final_learning_rate` at `until_step`, along half a cosine or a line
    - warmup_stable_decay: constant, then decays over the last `decay_steps`
    """
    count = step + 1
    warmup = schedule.warmup_steps
    if count < warmup:
        flat = isinstance(schedule, InverseSquareRootSchedule) and schedule.warmup == "constant"
        return 1.0 if flat else count / warmup
    if isinstance(schedule, InverseSquareRootSchedule):
        return math.sqrt(max(warmup, 1) / count)
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    begin, end, shape = warmup, max_steps, str(schedule.name)
    if isinstance(schedule, WarmupStableDecaySchedule):
        begin, shape = end - schedule.decay_steps, schedule.decay_shape
    elif isinstance(schedule, DecaySchedule):
        end = schedule.until_step or end
    progress = min(1.0, max(0, count - begin) / max(1, end - begin))
    final = schedule.final_learning_rate / optimizer.learning_rate
    return final + (1 - final) * _REMAINING[shape](progress)


_REMAINING = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "one_minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
