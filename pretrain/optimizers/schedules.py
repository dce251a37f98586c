"""Learning rates as pure functions of the step."""

import math

from pretrain.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of step `step` (from 0).

    cosine: linear from 0 over the warm-up, then half a cosine down to `final_learning_rate` at run.max_steps.
    inverse_square_root: T5's rule (Raffel et al. 2020, section 3.1.2): constant over the warm-up, then ∝ 1/√step.
    constant: linear over the warm-up, then flat.
    """
    peak, schedule, count = config.optimizer.learning_rate, config.schedule, step + 1
    warmup = schedule.warmup_steps
    if schedule.name == "inverse_square_root":
        return peak * math.sqrt(max(warmup, 1) / max(count, warmup, 1))
    if count < warmup:
        return peak * count / warmup
    if schedule.name == "constant":
        return peak
    progress = min(1.0, (count - warmup) / max(1, config.run.max_steps - warmup))
    final = schedule.final_learning_rate
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
