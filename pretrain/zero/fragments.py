"""Which piece of which parameter lies where in the flat fp32 tensors that ZeRO gives an optimizer on this rank.

Stages 1 and 2 hand the optimizer one flat tensor for each parameter group, cut evenly over the ranks: a parameter may
straddle ranks or be absent from one. Stage 3 cuts each parameter by itself. Either way a rank holds at most one
contiguous fragment of a parameter.
"""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from pretrain.optimizers.flat import Flat, Fragment


def flats(engine: DeepSpeedEngine) -> list[Flat]:
    """What the engine's optimizer steps on this rank, in the order of its steps."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_stage_3(optimizer, names))
    if isinstance(optimizer, BF16_Optimizer):
        return list(_stages_1_and_2(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names))
    return list(_stages_1_and_2(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names))


def fragments(engine: DeepSpeedEngine) -> list[Fragment]:
    """All that this rank has."""
    return [fragment for flat in flats(engine) for fragment in flat.fragments if fragment.size]


def in_memory(engine: DeepSpeedEngine) -> Iterator[list[Fragment]]:
    """All that this rank has, one flat after the other; what lies on NVMe is in memory, with its state, in its turn."""
    optimizer = engine.optimizer
    for number, flat in enumerate(flats(engine)):
        swapped = getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(number)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        yield [fragment for fragment in flat.fragments if fragment.size]
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_out(number)


def optimizer_state(engine: DeepSpeedEngine) -> dict[Tensor, dict[str, Tensor]]:
    """The wrapped optimizer's state, by flat tensor."""
    return engine.optimizer.optimizer.state


def update_parameters(engine: DeepSpeedEngine) -> None:
    """Makes the parameters that the model computes with follow the fp32 ones; all ranks call it together."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # small parameters stay whole between steps: theirs is shared out too
    for group, _ in enumerate(in_memory(engine)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()


def _stages_1_and_2(groups: list[list[Any]], tensors: list[Tensor], names: dict[int, str]) -> Iterator[Flat]:
    for parameters, tensor in zip(groups, tensors, strict=True):
        found = []
        for parameter in parameters:
            start = size = offset = 0
            if parameter._hp_mapping is not None:  # some of it lies in this rank's partition
                there, here = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
                start, size, offset = there.start, here.numel, here.start
            found.append(Fragment(names[id(parameter)], tuple(parameter.shape), start, size, tensor, offset))
        yield Flat(tensor, found)


def _stage_3(optimizer: DeepSpeedZeroOptimizer_Stage3, names: dict[int, str]) -> Iterator[Flat]:
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for parameters, tensor in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        found, offset = [], 0
        for parameter in parameters:
            share = parameter.partition_numel()  # the last ranks' share is padded, or all padding
            start = min(rank * share, parameter.ds_numel)
            size = min(share, parameter.ds_numel - start)
            found.append(Fragment(names[id(parameter)], tuple(parameter.ds_shape), start, size, tensor, offset))
            offset += share
        yield Flat(tensor, found)
