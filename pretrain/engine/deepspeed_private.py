"""Reads DeepSpeed's internals. docs/reference/deepspeed.md lists each name with the reason.

Stages 1 and 2 split a flat tensor of many parameters evenly over the ranks. Stage 3 splits each parameter. A rank holds
at most one contiguous fragment of a parameter. `check_layout` verifies this when a run starts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer

from data_pipeline.base.errors import FailedError, UserError
from pretrain.engine.optimizers.flat_buffers import FlatBuffer, Fragment

TESTED = "0.19.8"  # the version of DeepSpeed that the tests pass with
REPORT = "please report this, with environment.json and the run file"  # if DeepSpeed does something unexpected
_ENDS = (slice(None, 1000), slice(-1000, None))  # the compared elements of a fragment


def check_version() -> None:
    """Raises UserError for another version of DeepSpeed than the tested one."""
    if deepspeed.__version__.partition("+")[0] != TESTED:  # 0.19.8+cu130 is 0.19.8
        raise UserError(
            f"deepspeed {deepspeed.__version__} is installed; supported: {TESTED}; "
            f"install it with: pip install deepspeed=={TESTED}"
        )


def was_built_with(extension: str) -> bool:
    """True if DeepSpeed was installed with this extension."""
    return bool(deepspeed.git_version_info.installed_ops.get(extension))


def can_build_async_io() -> bool:
    """True if DeepSpeed's extension for NVMe is built or can be built."""
    return deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False)


def load_no_extensions() -> None:
    """Keeps DeepSpeed from loading a collective for CPU inference that takes 69 MB per rank in /dev/shm."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its table of what this machine can build


def flat_buffers(engine: DeepSpeedEngine) -> list[FlatBuffer]:
    """The flat buffers that the engine's optimizer updates on this rank, in order."""
    return list((_of_stage_3 if engine.zero_optimization_partition_weights() else _of_stages_1_and_2)(engine))


def any_is_sharded(parameters: list[Any]) -> bool:
    """Stage 3: True if some of the parameters aren't gathered at the moment."""
    return any(parameter.ds_status.name != "AVAILABLE" for parameter in parameters)


@contextlib.contextmanager
def loaded(engine: DeepSpeedEngine, number: int) -> Iterator[None]:
    """Within the block, the flat buffer with this number and its state are in memory, even if they are on NVMe."""
    if on_nvme := swapped(engine, number):
        engine.optimizer._optimizer_states_and_gradient_swap_in(number)
    yield
    if on_nvme:
        engine.optimizer._optimizer_states_and_gradient_swap_out(number)


def swapped(engine: DeepSpeedEngine, number: int) -> bool:
    """True if the flat buffer with this number is on NVMe between steps."""
    optimizer = engine.optimizer
    return getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(number)


def wrapped(engine: DeepSpeedEngine) -> Optimizer:
    """The optimizer that DeepSpeed was given, which ZeRO wraps. Its state is by flat tensor."""
    return engine.optimizer.optimizer


def weights_by_group(engine: DeepSpeedEngine) -> list[tuple[Tensor, dict[str, tuple[Tensor, int]]]]:
    """Stages 1 and 2: for each parameter group, its flat weights, and its parameters by name with the offset of each in
    the flat weights."""
    groups = [(flat, dict[str, tuple[Tensor, int]]()) for flat in engine.optimizer.bit16_groups_flat]
    by_storage = {flat.untyped_storage().data_ptr(): (flat, parameters) for flat, parameters in groups}
    for name, parameter in engine.module.named_parameters():
        if (storage := parameter.untyped_storage().data_ptr()) not in by_storage:
            raise FailedError(f"DeepSpeed {deepspeed.__version__} doesn't keep {name} where it is expected: {REPORT}")
        flat, parameters = by_storage[storage]
        parameters[name] = parameter, parameter.storage_offset() - flat.storage_offset()
    return groups


def _of_stages_1_and_2(engine: DeepSpeedEngine) -> Iterator[FlatBuffer]:
    partitions = engine.optimizer.single_partition_of_fp32_groups
    for (_, parameters), partition in zip(weights_by_group(engine), partitions, strict=True):
        begins = engine.global_rank * partition.numel()
        of_each = [(name, tuple(one.shape), place - begins) for name, (one, place) in parameters.items()]
        yield FlatBuffer(partition, [Fragment.inside(*one, partition) for one in of_each])


def _of_stage_3(engine: DeepSpeedEngine) -> Iterator[FlatBuffer]:
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    for parameters, tensor in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        found, offset = [], 0
        for parameter in parameters:
            shape = tuple(parameter.ds_shape)
            start, size = _share_of(parameter, engine.global_rank)
            found.append(Fragment(names[id(parameter)], shape, start, size, tensor, offset))
            offset += parameter.partition_numel()
        yield FlatBuffer(tensor, found)


def _share_of(parameter: Any, rank: int) -> tuple[int, int]:
    """Start and size of the share of a parameter that ZeRO-3 gives a rank, without padding."""
    share = parameter.partition_numel()  # with padding, which may be all of the last ranks' share
    start = min(rank * share, parameter.ds_numel)
    return start, min(share, parameter.ds_numel - start)


def local_weights(engine: DeepSpeedEngine) -> Iterator[tuple[Tensor, int, bool]] | None:
    """This rank's part of each parameter of the model, in the order of their names; None if some are on NVMe.

    Yields the elements (n,), their start in the flattened parameter, and True if they are the whole parameter.
    """
    parameters: list[Any] = list(engine.module.parameters())
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if any(parameter.ds_tensor.status.name != "AVAILABLE" for parameter in sharded):
        return None
    return (_local(parameter, engine.global_rank) for parameter in parameters)


def _local(parameter: Any, rank: int) -> tuple[Tensor, int, bool]:
    if not hasattr(parameter, "ds_id"):
        return parameter.data.view(-1), 0, True
    start, size = _share_of(parameter, rank)
    return parameter.ds_tensor.data[:size], start, False


def fragments(engine: DeepSpeedEngine) -> Iterator[Fragment]:
    """All fragments on this rank. A flat buffer on NVMe is loaded, with its state, while its fragments are yielded."""
    for number, buffer in enumerate(flat_buffers(engine)):
        with loaded(engine, number):
            yield from (fragment for fragment in buffer.fragments if fragment.size)


def update_parameters(engine: DeepSpeedEngine) -> None:
    """Updates the parameters that the model computes with from the fp32 master weights, on all ranks together."""
    optimizer = engine.optimizer
    if not engine.zero_optimization_partition_weights():
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # small parameters stay whole between steps; this updates them, too
    for group, _ in enumerate(flat_buffers(engine)):
        with loaded(engine, group):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()


def give_gradients(engine: DeepSpeedEngine, partitions: list[Tensor]) -> None:
    """Stages 1 and 2: gives `engine.step` this rank's partition of each parameter group's gradient, fp32."""
    engine.optimizer.averaged_gradients.update(enumerate([partition] for partition in partitions))


def forget_gradients(engine: DeepSpeedEngine) -> None:
    """Zeroes the last step's gradients at stage 3, and those that are kept with offloaded fp32 parameters. ZeRO
    overwrites only gradients of parameters that a step uses: the others would learn from an old gradient."""
    if engine.zero_optimization_partition_weights():
        engine.optimizer.grad_partitions_flat_buffer.zero_()
    for buffer in flat_buffers(engine):
        if buffer.tensor.grad is not None:
            buffer.tensor.grad.zero_()


def check_layout(engine: DeepSpeedEngine) -> None:
    """Raises FailedError if DeepSpeed's fragments aren't the expected ones. All ranks call this together.

    Over all ranks, the fragments of a trained parameter must cover each of its elements once. The fp32 elements, cast
    to the model's precision, must equal the weights that the model computes with. Only the ends of fragments are
    compared.
    """
    of_all = [fragment for buffer in flat_buffers(engine) for fragment in buffer.fragments]
    # the number of elements and the sum of their positions show together that each is there once
    found = torch.tensor(
        [[one.size, (2 * one.start + one.size - 1) * one.size // 2] for one in of_all], device=engine.device
    )
    dist.all_reduce(found)
    for one, covered in zip(of_all, found.tolist(), strict=True):
        size = torch.Size(one.shape).numel()
        if covered != [size, size * (size - 1) // 2]:
            raise FailedError(f"DeepSpeed's fragments of {one.name} don't cover each of its elements once: {REPORT}")
    wrong = torch.tensor(_differ(engine), device=engine.device)
    dist.all_reduce(wrong)
    if int(wrong):
        raise FailedError(f"DeepSpeed's fp32 weights are not those that the model computes with: {REPORT}")


def _differ(engine: DeepSpeedEngine) -> int:
    """The number of fragments on this rank whose fp32 weights differ from the model's weights."""
    weights = local_weights(engine)
    if weights is None:  # they are on NVMe
        return 0
    by_name = dict(zip((name for name, _ in engine.module.named_parameters()), weights, strict=True))
    return sum(not _same(fragment, *by_name[fragment.name][:2]) for fragment in fragments(engine))


def _same(fragment: Fragment, weights: Tensor, first: int) -> bool:
    """True if a fragment equals, at its ends, the `weights` (n,) of its parameter, which begin at element `first`."""
    live = weights.narrow(0, fragment.start - first, fragment.size)
    master_weights = fragment.view(fragment.buffer.data)
    return all(torch.equal(master_weights[end].to(live.device, live.dtype), live[end]) for end in _ENDS)
