"""An exponential moving average of the fp32 parameters (Polyak and Juditsky 1992), kept among the optimizer's states.

So it is sharded, offloaded and saved as they are. `pretrain average --ema` makes a checkpoint of it.
"""

from typing import Any

import torch
from torch.optim import Optimizer

AVERAGE = "average"  # the name of the state


def keep_average(optimizer: Optimizer, decay: float) -> None:
    """Updates the average after each step: decay · average + (1 − decay) · parameters.

    It begins with the parameters after the first step. Each element has its own, so it doesn't matter how ZeRO cuts the
    parameters, or that it calls the optimizer for one flat buffer at a time.
    """

    @torch.no_grad()
    def update(stepped: Optimizer, *_: Any) -> None:
        for buffer in (
            buffer for group in stepped.param_groups for buffer in group["params"] if buffer.grad is not None
        ):
            states = stepped.state[buffer]
            if AVERAGE in states:
                states[AVERAGE].lerp_(buffer, 1 - decay)
            else:
                states[AVERAGE] = buffer.detach().clone()

    optimizer.register_step_post_hook(update)
