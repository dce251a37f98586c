"""Learning rates as pure functions of the step."""

import math

from pretrain.optimizers.config import (
    AnySchedule,
    ConstantSchedule,
    DecaySchedule,
    InverseSquareRootSchedule,
    OptimizerConfig,
    WarmupStableDecaySchedule,
)


def learning_rate(optimizer: OptimizerConfig, schedule: AnySchedule, max_steps: int, step: int) -> float:
    """The learning rate of step `step` (from 0), for parameters without a rate of their own.

    During warm-up every schedule rises linearly from 0, except inverse_square_root with `warmup: constant`, which
    starts at its peak: T5's rule (Raffel et al. 2020, section 3.1.2). After warm-up:

    - inverse_square_root: ∝ 1/√step; with `warmup: linear`, the rule of Vaswani et al. 2017, section 5.3
    - constant: constant
    - cosine, linear: decays to `final_learning_rate` at `until_step`, along half a cosine or a line
    - warmup_stable_decay: constant, then decays over the last `decay_steps`
    """
    peak, count = optimizer.learning_rate, step + 1
    warmup = schedule.warmup_steps
    if count < warmup:
        flat = isinstance(schedule, InverseSquareRootSchedule) and schedule.warmup == "constant"
        return peak if flat else peak * count / warmup
    if isinstance(schedule, InverseSquareRootSchedule):
        return peak * math.sqrt(max(warmup, 1) / count)
    if isinstance(schedule, ConstantSchedule):
        return peak
    begin, end, shape = warmup, max_steps, str(schedule.name)
    if isinstance(schedule, WarmupStableDecaySchedule):
        begin, shape = end - schedule.decay_steps, schedule.decay_shape
    elif isinstance(schedule, DecaySchedule):
        end = schedule.until_step or end
    progress = min(1.0, max(0, count - begin) / max(1, end - begin))
    final = schedule.final_learning_rate
    return final + (peak - final) * _REMAINING[shape](progress)


_REMAINING = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "one_minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
