"""DeepSpeed's private names: all that this project relies on beyond its documented interface stands in this module.

Which piece of which parameter lies where in the flat fp32 tensors that ZeRO gives an optimizer on this rank: stages 1
and 2 hand the optimizer one flat tensor for each parameter group, cut evenly over the ranks, so that a parameter may
straddle ranks or be absent from one. Stage 3 cuts each parameter by itself. Either way a rank holds at most one
contiguous fragment of a parameter. `check` holds that against the engine at hand when a run starts.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from data_pipeline.foundation.errors import FailedError, UserError
from pretrain.models.model import whole_shape
from pretrain.optimizers.flat import Flat, Fragment

TESTED_VERSION = "0.19.8"
_TESTS = "tests/pretrain/test_deepspeed_traps.py tests/pretrain/test_engine.py tests/pretrain/test_optimizers.py"
_ENDS = 1000  # elements at each end of a fragment that are compared at the start


def check_version() -> None:
    """Raises UserError for a DeepSpeed that was not tested: private names change without notice."""
    if deepspeed.__version__ != TESTED_VERSION:
        raise UserError(
            f"deepspeed {deepspeed.__version__} is installed, and {TESTED_VERSION} is what was tested: install that "
            f"(constraints.txt), or run python -m pytest {_TESTS} and set TESTED_VERSION in pretrain/zero/internals.py"
        )


def leave_shared_memory() -> None:
    """Keeps DeepSpeed from an extension for inference, which takes 69 MB a rank in /dev/shm."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def check(engine: DeepSpeedEngine) -> None:
    """Raises FailedError where fragments are not as this module takes them to be; all ranks call it together.

    Over all ranks the fragments of a parameter must be each of its elements once, and the fp32 elements, in the
    precision of the model, must be those that it computes with. Of a long fragment the ends are compared.
    """
    named = dict(engine.module.named_parameters())
    places = {name: place for place, name in enumerate(named)}
    # how many elements, and the sum of their positions, say together whether each is there once
    found = torch.zeros(2, len(named), dtype=torch.int64, device=engine.device)
    wrong = 0
    for owned in in_memory(engine):
        for fragment in owned:
            last = fragment.start + fragment.size - 1
            found[0, places[fragment.name]] += fragment.size
            found[1, places[fragment.name]] += (fragment.start + last) * fragment.size // 2
            wrong += not _equals_live(fragment, named[fragment.name])
    dist.all_reduce(found)
    wrong_anywhere = torch.tensor([wrong], device=engine.device)
    dist.all_reduce(wrong_anywhere)
    sizes = [whole_shape(parameter).numel() for parameter in named.values()]
    expected = torch.tensor([[size, size * (size - 1) // 2] for size in sizes], device=engine.device).T
    for name, (elements, positions) in zip(named, (found == expected).T.tolist(), strict=True):
        if not (elements and positions):
            raise FailedError(f"DeepSpeed's fragments of {name} are not each of its elements once: {_REPORT}")
    if int(wrong_anywhere):
        raise FailedError(f"DeepSpeed's fp32 weights are not those that the model computes with: {_REPORT}")


_REPORT = "please report this, with environment.json and the run file"


def _equals_live(fragment: Fragment, parameter: Tensor) -> bool:
    """Whether a fragment of the fp32 weights is what the model computes with, at its ends."""
    sharded: Any = getattr(parameter, "ds_tensor", None)  # at stage 3
    if sharded is None:
        live = parameter.data.view(-1).narrow(0, fragment.start, fragment.size)
    elif sharded.status.name == "AVAILABLE":
        live = sharded.data.narrow(0, 0, fragment.size)
    else:
        return True  # it lies on NVMe
    master = fragment.of(fragment.flat.data)
    ends = (slice(None, _ENDS), slice(-_ENDS, None))
    return all(torch.equal(master[end].to(live.device, live.dtype), live[end]) for end in ends)


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


def forget_gradients(optimizer: Any) -> None:
    """Makes ZeRO's gradients zero, before a step. DeepSpeed writes over those of parameters that the step uses, and
    parameters that it doesn't use would learn from an older one.

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
