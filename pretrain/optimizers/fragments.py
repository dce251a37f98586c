"""Which piece of which parameter lies where in the flat fp32 tensors that ZeRO gives an optimizer on this rank.

Stages 1 and 2 hand the optimizer one flat tensor for each parameter group, cut evenly over the ranks: a parameter may
straddle ranks or be absent from one. Stage 3 cuts each parameter by itself. Either way a rank holds at most one
contiguous fragment of a parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Elements `start` … `start` + `size` − 1 of the flattened parameter `name`, at `offset` in the tensor `flat`."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    flat: Tensor
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """This fragment (size,) of a tensor laid out as `flat`: the fp32 parameters or an optimizer state."""
        return flat.narrow(0, self.offset, self.size)


def fragments(engine: DeepSpeedEngine) -> list[Fragment]:
    """The fragments on this rank, in the order of the parameters."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_stage_3(optimizer, names))
    flats = (
        optimizer.fp32_groups_flat_partition
        if isinstance(optimizer, BF16_Optimizer)
        else optimizer.single_partition_of_fp32_groups
    )
    return list(_stages_1_and_2(engine, flats, names))


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
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()


def _stages_1_and_2(engine: DeepSpeedEngine, flats: list[Tensor], names: dict[int, str]) -> Iterator[Fragment]:
    for parameter in engine.module.parameters():
        mapping = parameter._hp_mapping
        if mapping is not None:  # some of it lies in this rank's partition
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            flat = flats[mapping.param_group_index]
            yield Fragment(names[id(parameter)], tuple(parameter.shape), there.start, here.numel, flat, here.start)


def _stage_3(optimizer: DeepSpeedZeroOptimizer_Stage3, names: dict[int, str]) -> Iterator[Fragment]:
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in parameters:
            share = parameter.partition_numel()  # the last ranks' share is padded, or all padding
            size = min(share, parameter.ds_numel - rank * share)
            if size > 0:
                yield Fragment(names[id(parameter)], tuple(parameter.ds_shape), rank * share, size, flat, offset)
            offset += share
