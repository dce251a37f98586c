"""DeepSpeed's private names: only this module relies on more than its documented interface, and only it imports it.

It finds the fragments of parameters in the flat fp32 tensors that ZeRO gives an optimizer on this rank. Stages 1 and 2
give the optimizer one flat tensor per parameter group, cut evenly over the ranks, so a parameter may straddle ranks or
be absent from one. Stage 3 cuts each parameter by itself. Either way a rank holds at most one contiguous fragment of a
parameter. When a run starts, `check` verifies this for its engine.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from data_pipeline.foundation.errors import FailedError, UserError
from pretrain.optimizers.flat_buffers import FlatBuffer, Fragment, Sharded, sum_of_squares
from pretrain.zero.unused_imports import absent, import_uncompiled

with absent("mlflow"):
    import deepspeed
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
with contextlib.suppress(ModuleNotFoundError):  # old versions that `launch doctor --numerics` examines don't have it
    import_uncompiled("deepspeed.runtime.zero.muon.muon_optimizer")  # ZeRO asks whether an optimizer is one of these

TESTED_VERSION = "0.19.8"
_TESTS = "tests/pretrain/test_engine.py tests/pretrain/test_optimizers.py"
_ENDS = 1000  # elements at each end of a fragment that are compared at the start
_COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor", "broadcast")
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def check_version() -> None:
    """Raises UserError for an untested version of DeepSpeed: private names change without notice."""
    if deepspeed.__version__ != TESTED_VERSION:
        raise UserError(
            f"deepspeed {deepspeed.__version__} is installed, but only {TESTED_VERSION} was tested: install that one "
            f"(constraints.txt), or run python -m pytest {_TESTS} and set TESTED_VERSION in {__name__}"
        )


def load_no_extensions() -> None:
    """Keeps DeepSpeed from loading an inference extension that takes 69 MB per rank in /dev/shm.

    DeepSpeed looks it up in a table, which it would fill by probing every extension: for one it runs a compiler.
    """
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)


def check(engine: DeepSpeedEngine) -> None:
    """Raises FailedError if DeepSpeed's fragments aren't those that this module expects. All ranks call this together.

    Over all ranks, the fragments of a parameter must cover each of its elements once. The fp32 elements, cast to the
    model's precision, must equal the weights that the model computes with. Only the ends of fragments are compared.
    """
    named = dict(engine.module.named_parameters())
    numbers = {name: number for number, name in enumerate(named)}
    # The number of elements and the sum of their positions together show whether each is there once.
    found = torch.zeros(2, len(named), dtype=torch.int64, device=engine.device)
    wrong = 0
    for fragment in in_memory(engine):
        last = fragment.start + fragment.size - 1
        found[0, numbers[fragment.name]] += fragment.size
        found[1, numbers[fragment.name]] += (fragment.start + last) * fragment.size // 2
        wrong += not _equals_model_weights(fragment, named[fragment.name])
    dist.all_reduce(found)
    wrong_anywhere = torch.tensor([wrong], device=engine.device)
    dist.all_reduce(wrong_anywhere)
    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in named.values()]  # ds_: at stage 3
    expected = torch.tensor([[size, size * (size - 1) // 2] for size in sizes], device=engine.device).T
    for name, (elements, positions) in zip(named, (found == expected).T.tolist(), strict=True):
        if not (elements and positions):
            raise FailedError(f"DeepSpeed's fragments of {name} are not each of its elements once: {_REPORT}")
    if int(wrong_anywhere):
        raise FailedError(f"DeepSpeed's fp32 weights are not those that the model computes with: {_REPORT}")


_REPORT = "please report this, with environment.json and the run file"


def _equals_model_weights(fragment: Fragment, parameter: Tensor) -> bool:
    """True if a fragment of the fp32 weights equals, at its ends, the weights that the model computes with."""
    sharded: Any = getattr(parameter, "ds_tensor", None)  # at stage 3
    if sharded is None:
        live = parameter.data.view(-1).narrow(0, fragment.start, fragment.size)
    elif sharded.status.name == "AVAILABLE":
        live = sharded.data.narrow(0, 0, fragment.size)
    else:
        return True  # it is on NVMe
    master_weights = fragment.view(fragment.buffer.data)
    ends = (slice(None, _ENDS), slice(-_ENDS, None))
    return all(torch.equal(master_weights[end].to(live.device, live.dtype), live[end]) for end in ends)


@contextlib.contextmanager
def gathered_whole(engine: DeepSpeedEngine) -> Iterator[None]:
    """Makes all parameters whole on each rank if ZeRO-3 shards them; they must only be read.

    All ranks enter together. Within the block each rank may run the model by itself.
    """
    if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield
        return
    sharded: list[Any] = [*engine.module.parameters()]
    offload = engine.optimizer.parameter_offload
    coordinator = offload.param_coordinator
    with contextlib.ExitStack() as stack:
        if any(parameter.ds_status.name != "AVAILABLE" for parameter in sharded):
            stack.enter_context(deepspeed.zero.GatheredParameters(sharded))
        offload.param_coordinator = _IdleCoordinator()
        stack.callback(setattr, offload, "param_coordinator", coordinator)
        yield


class _IdleCoordinator:
    """Takes the place of ZeRO-3's parameter coordinator while all parameters are whole.

    ZeRO-3's hooks call it before and after each module's forward pass. DeepSpeed's own gathers and releases parameters,
    and has all ranks compare the order of modules that each has recorded: it waits forever for ranks that don't run
    the model.
    """

    def reset_step(self) -> None: ...

    def trace_prologue(self, sub_module: nn.Module) -> None: ...

    def is_record_trace(self) -> bool:
        return False

    def fetch_sub_module(self, current_submodule: nn.Module, forward: bool) -> None: ...

    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None: ...


def flat_buffers(engine: DeepSpeedEngine) -> list[FlatBuffer]:
    """The flat buffers that the engine's optimizer updates on this rank, in this order."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return list(_stage_3(optimizer, names))
    if isinstance(optimizer, BF16_Optimizer):
        return list(_stages_1_and_2(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names))
    return list(_stages_1_and_2(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names))


def fragments(engine: DeepSpeedEngine) -> list[Fragment]:
    """All fragments on this rank."""
    return [fragment for buffer in flat_buffers(engine) for fragment in buffer.fragments if fragment.size]


def in_memory(engine: DeepSpeedEngine) -> Iterator[Fragment]:
    """All fragments on this rank. A flat buffer on NVMe is loaded, with its state, while its own are yielded."""
    for number, buffer in enumerate(flat_buffers(engine)):
        with loaded(engine, number):
            yield from (fragment for fragment in buffer.fragments if fragment.size)


@contextlib.contextmanager
def loaded(engine: DeepSpeedEngine, number: int) -> Iterator[None]:
    """Within the block, the flat buffer with this number is in memory, with its state, if it is on NVMe otherwise."""
    if not swapped(engine, number):
        yield
        return
    engine.optimizer._optimizer_states_and_gradient_swap_in(number)
    yield
    engine.optimizer._optimizer_states_and_gradient_swap_out(number)


def swapped(engine: DeepSpeedEngine, number: int) -> bool:
    """True if the flat buffer with this number is on NVMe between steps."""
    optimizer = engine.optimizer
    return getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(number)


def wrapped(engine: DeepSpeedEngine) -> Optimizer:
    """The optimizer that ZeRO's wraps: the one that DeepSpeed was given. Its state is by flat tensor."""
    return engine.optimizer.optimizer


@contextlib.contextmanager
def keeping_counters(engine: DeepSpeedEngine) -> Iterator[None]:
    """Resets DeepSpeed's counters of steps after the block."""
    before = {name: getattr(engine, name) for name in _COUNTERS}
    yield
    for name, value in before.items():
        setattr(engine, name, value)


def local_weights(engine: DeepSpeedEngine) -> Iterator[tuple[Tensor, int, bool]] | None:
    """This rank's part of each parameter of the model, in the order of their names; None if some are on NVMe.

    Yields the elements (n,), the position of their first in the flattened parameter, and whether they are all of it.
    """
    parameters: list[Any] = list(engine.module.parameters())
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if any(parameter.ds_tensor.status.name != "AVAILABLE" for parameter in sharded):
        return None
    return (_local(parameter) for parameter in parameters)


def _local(parameter: Any) -> tuple[Tensor, int, bool]:
    if not hasattr(parameter, "ds_id"):
        return parameter.data.view(-1), 0, True
    start, size = _share_of(parameter, dist.get_rank())
    return parameter.ds_tensor.data[:size], start, False


def _share_of(parameter: Any, rank: int) -> tuple[int, int]:
    """The first of the elements of a parameter that ZeRO-3 gives a rank, and their number. Padding isn't counted."""
    share = parameter.partition_numel()  # the last ranks' share is padded, or all padding
    start = min(rank * share, parameter.ds_numel)
    return start, min(share, parameter.ds_numel - start)


def update_parameters(engine: DeepSpeedEngine) -> None:
    """Updates the parameters that the model computes with from the fp32 ones. All ranks call this together."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()  # small parameters stay whole between steps; this updates them too
    for group, _ in enumerate(flat_buffers(engine)):
        with loaded(engine, group):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.checkpoint_event_epilogue()


def _stages_1_and_2(groups: list[list[Any]], tensors: list[Tensor], names: dict[int, str]) -> Iterator[FlatBuffer]:
    for parameters, tensor in zip(groups, tensors, strict=True):
        found = []
        for parameter in parameters:
            start = size = offset = 0
            if parameter._hp_mapping is not None:  # some of it lies in this rank's partition
                there, here = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
                start, size, offset = there.start, here.numel, here.start
            found.append(Fragment(names[id(parameter)], tuple(parameter.shape), start, size, tensor, offset))
        yield FlatBuffer(tensor, found)


def _stage_3(optimizer: DeepSpeedZeroOptimizer_Stage3, names: dict[int, str]) -> Iterator[FlatBuffer]:
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    for parameters, tensor in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        found, offset = [], 0
        for parameter in parameters:
            found.append(
                Fragment(names[id(parameter)], tuple(parameter.ds_shape), *_share_of(parameter, rank), tensor, offset)
            )
            offset += parameter.partition_numel()
        yield FlatBuffer(tensor, found)


def forget_gradients(optimizer: Any) -> None:
    """Zeroes ZeRO's gradients before a step. DeepSpeed overwrites only those of parameters that the step uses; the
    other parameters would learn from an old gradient.

    Stage 3 on several ranks needs this. So does every stage with an offloaded optimizer: its gradients are with the
    fp32 parameters.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.grad_partitions_flat_buffer.zero_()
        buffers = optimizer.fp32_partitioned_groups_flat
    else:
        buffers = optimizer.single_partition_of_fp32_groups
    for buffer in buffers:
        if buffer.grad is not None:
            buffer.grad.zero_()


def spare_passes(engine: DeepSpeedEngine) -> None:
    """Removes passes over all gradients that DeepSpeed makes in every step without need, where nothing is offloaded.
    Call this before the first step.

    Without this, a step of 12 million parameters with 8 rows takes a CPU 9 to 14 % longer in fp32 and 30 % in bf16 at
    stages 2 and 3. DeepSpeed's issue #4561 and its pull request #8331 are about some of them.
    tests/pretrain/test_passes.py counts those that are left.

    - An invalid gradient is recognised by its norm alone. The norm is taken over a flat buffer; a pass clips only if it
      must.
    - Gradients are added up in a flat buffer that the optimizer then reads: none is concatenated. On a CPU this buffer
      is kept, since fresh memory costs more than a copy.
    - One rank needs no buckets.
    - In fp32, the weights that the optimizer updates are those that the model computes with: none is copied.
    """
    deepspeed.utils.nvtx.enable_nvtx = False  # marks for a profiler, thousands in a step at stage 3
    optimizer, group = engine.optimizer, engine.optimizer.dp_process_group
    if isinstance(optimizer, BF16_Optimizer):  # stage 1: its spare passes take 1 % of a step
        deepspeed.runtime.bf16_optimizer.get_global_norm_of_tensors = _norm_of_tensors
        return
    _share_weights(optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if not optimizer.offload_optimizer:
            optimizer._get_norm_groups = lambda: [_norm([optimizer.grad_partitions_flat_buffer], group)]
            optimizer._prepare_fp32_grad_for_sub_group = partial(_set_flat_gradient, optimizer)
            buffers = optimizer.fp32_partitioned_groups_flat
            optimizer.unscale_and_clip_grads = lambda number, norm: _clip(optimizer, [buffers[number].grad], norm)
    elif not optimizer.cpu_offload:
        partitions = _Partitions(optimizer)
        optimizer._use_compact_grad_partition_buffer = lambda group: True
        optimizer._build_compact_grad_partition_buffer = partitions.opened
        optimizer._add_to_grad_partition_buffer = partitions.add
        optimizer.clear_grad_attribute = partial(_free_gradient, optimizer, optimizer.clear_grad_attribute)
        optimizer.copy_grads_in_partition = lambda parameter, group=None: optimizer.clear_grad_attribute(parameter)
        optimizer.check_overflow = lambda partition_gradients=True: None
        optimizer.scaled_global_norm = partitions.norm
        optimizer.unscale_and_clip_grads = partial(_clip, optimizer)
        if dist.get_world_size(group) == 1:
            optimizer.partition_gradients = True  # stage 1 then takes a gradient at once, while it is in the cache
            optimizer.reduce_independent_p_g_buckets_and_remove_grads = partitions.take


def order_streams(engine: DeepSpeedEngine) -> None:
    """Has streams of a GPU wait for one another where DeepSpeed would have the host wait for all of them: at stages 1
    and 2, after each backward pass, for the reductions beside it.

    At stage 3, the stream that gathers weights waits for their update, which the host no longer waits for.
    """
    optimizer = engine.optimizer
    if engine.device.type != "cuda" or isinstance(optimizer, BF16_Optimizer):
        return
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        gathering, finish = optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream, optimizer._post_step

        def finish_in_order(*arguments: Any) -> None:
            finish(*arguments)
            gathering.wait_stream(torch.cuda.current_stream())

        optimizer._post_step = finish_in_order
    elif optimizer.overlap_comm and not optimizer.cpu_offload:
        epilogue = optimizer.independent_gradient_partition_epilogue
        optimizer.independent_gradient_partition_epilogue = partial(_without_host, optimizer.reduction_stream, epilogue)


def _without_host(beside: torch.cuda.Stream, call: Callable[[], None]) -> None:
    """`call`, in which the current stream and the one `beside` it wait for each other instead of the host for both."""
    accelerator, current = deepspeed.accelerator.get_accelerator(), torch.cuda.current_stream()

    def join() -> None:
        current.wait_stream(beside)
        beside.wait_stream(current)

    accelerator.synchronize = join
    try:
        call()
    finally:
        del accelerator.synchronize


def time_waits(engine: DeepSpeedEngine, timed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has what this rank waits for `timed`: on a CPU, each of DeepSpeed's collectives, and the step of an optimizer
    with collectives of its own, in which ranks have different work; on a GPU, the gathering of weights for a module."""
    if engine.device.type == "cpu":
        backend = deepspeed.comm.comm.cdb
        for name in _COLLECTIVES:
            setattr(backend, name, timed(getattr(type(backend), name).__get__(backend)))
        if isinstance(optimizer := wrapped(engine), Sharded):
            setattr(optimizer, "step", timed(optimizer.step))  # noqa: B010
    elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        coordinator.fetch_sub_module = timed(coordinator.fetch_sub_module)


def _free_gradient(optimizer: Any, clear: Callable[[Tensor], None], parameter: Tensor) -> None:
    gradient = optimizer.get_gradient_for_reduction(parameter)
    if gradient is not None and gradient.is_cuda:  # it may still be being reduced beside the backward pass
        gradient.record_stream(torch.cuda.current_stream())
    clear(parameter)


def _share_weights(optimizer: Any) -> None:
    """Makes the fp32 flat buffers the weights themselves where these are fp32 too. After an update DeepSpeed copies a
    flat buffer to the weights; PyTorch skips a copy of a tensor to itself."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        if not optimizer.offload_optimizer:
            _share(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat)
    elif not optimizer.cpu_offload:
        rank = dist.get_rank(optimizer.dp_process_group)
        own = [partitions[rank] for partitions in optimizer.parallel_partitioned_bit16_groups]
        _share(own, optimizer.single_partition_of_fp32_groups)
        optimizer._link_all_hp_params()  # its fragments are views of the flat buffers


def _share(weights: list[Tensor], flat_buffers: list[Tensor]) -> None:
    for own, buffer in zip(weights, flat_buffers, strict=True):
        if (own.dtype, own.device) == (buffer.dtype, buffer.device):
            buffer.data = own.data


class _Partitions:
    """The fp32 gradients of this rank's partitions at stages 1 and 2. On a CPU their memory is kept between steps."""

    def __init__(self, optimizer: Any):
        self._optimizer, self._build = optimizer, optimizer._build_compact_grad_partition_buffer
        self._reused: dict[int, tuple[type, list[Tensor], Tensor]] = {}  # by parameter group
        self._old: dict[int, Tensor] = {}  # pieces that hold an old gradient, by address

    def opened(self, group: int) -> Any:
        """The partition of a parameter group at the beginning of a step."""
        if group not in self._reused:
            made = self._build(group)
            if made.flat_partition.device.type != "cpu":
                return made
            self._reused[group] = type(made), list(made), made.flat_partition
            return made
        kind, pieces, buffer = self._reused[group]
        self._old.update((piece.data_ptr(), piece) for piece in pieces)
        return kind(pieces, buffer)

    def add(self, piece: Tensor | None, gradient: Tensor) -> None:
        """Adds a gradient to a piece; the first of a step replaces what is there."""
        if piece is None:
            return
        if self._old.pop(piece.data_ptr(), None) is not None:
            piece.copy_(gradient)
        else:
            piece.add_(gradient)

    def take(self, parameter: Tensor, group: int) -> None:
        """Adds the gradient of a parameter, which lies in the only rank's partition whole."""
        optimizer = self._optimizer
        gradient = optimizer.get_gradient_for_reduction(parameter)
        start = optimizer.grad_partition_insertion_offset[group][0][optimizer.get_param_id(parameter)]
        buffer = optimizer._get_compact_grad_partition_buffer(group).flat_partition
        self.add(buffer.narrow(0, start, parameter.numel()), gradient.view(-1))
        optimizer.clear_grad_attribute(parameter)

    def norm(self) -> Tensor:
        """The norm of the whole gradient, at the end of a step. Parameters that it hasn't used have no gradient."""
        for piece in self._old.values():
            piece.zero_()
        self._old.clear()
        groups = self._optimizer.averaged_gradients
        return _norm([gradients.flat_partition for gradients in groups.values()], self._optimizer.dp_process_group)


def _norm(buffers: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """() The L2 norm, fp32, over the flat buffers of all ranks. It is on the host: whoever asks about it doesn't wait
    for the device again."""
    squares = torch.stack([sum_of_squares(buffer) for buffer in buffers]).sum()
    deepspeed.comm.all_reduce(squares, group=group)
    return squares.sqrt().float().cpu()


def _norm_of_tensors(input_tensors: list[Tensor], **_: object) -> Tensor:
    """The norm over tensors that each rank has whole."""
    return torch.stack(torch._foreach_norm(input_tensors)).square().sum().sqrt().cpu()


def _clip(optimizer: Any, gradients: list[Tensor], norm: Tensor) -> None:
    excess = (norm + 1e-6) / (optimizer.clip_grad or math.inf)
    if excess > 1:
        for gradient in gradients:
            gradient.mul_(1 / excess)


def _set_flat_gradient(optimizer: DeepSpeedZeroOptimizer_Stage3, number: int) -> None:
    """Makes a sub-group's part of all gradients the gradient of its flat buffer."""
    buffers = optimizer.fp32_partitioned_groups_flat
    start, buffer = sum(buffer.numel() for buffer in buffers[:number]), buffers[number]
    buffer.grad = optimizer.grad_partitions_flat_buffer.narrow(0, start, buffer.numel())
    optimizer.averaged_gradients[number] = None
