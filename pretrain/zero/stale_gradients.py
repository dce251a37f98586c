"""Gradients that ZeRO keeps of parameters which a step doesn't use."""

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


def forget_gradients(optimizer: Any) -> None:
    """Makes them zero, before a step. DeepSpeed writes over what is used alone: the rest would learn from an older one.

    At stage 3 always, and at every stage where the optimizer is offloaded: there they lie with the fp32 parameters.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.grad_partitions_flat_buffer.zero_()
        flats = optimizer.fp32_partitioned_groups_flat
    else:
        flats = optimizer.single_partition_of_fp32_groups
    for flat in flats:
        if flat.grad is not None:
            flat.grad.zero_()
