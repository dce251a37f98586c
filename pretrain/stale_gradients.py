"""Gradients that ZeRO-3 keeps of parameters which a step doesn't use."""

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3


def forget_gradients(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Makes them zero, before a step. DeepSpeed writes over what is used alone: the rest would learn from an older one.

    Offloaded, they lie with the fp32 parameters as well.
    """
    optimizer.grad_partitions_flat_buffer.zero_()
    for flat in optimizer.fp32_partitioned_groups_flat:
        if flat.grad is not None:
            flat.grad.zero_()
