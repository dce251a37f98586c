"""Estimates the memory of a run on a GPU: of a forward and backward pass, and of the tensors that DeepSpeed ZeRO keeps
on a rank.

For the pass, the run's own model runs on the meta device, on tensors without memory that report a GPU as their device.
So the layers themselves decide which kernels run and what autograd saves; no formula repeats that.

ZeRO keeps weights in the model's precision and in fp32, moments and gradients. The formulas follow DeepSpeed 0.19.8's
source (`zero/stage_1_and_2.py`, `zero/stage3.py`), with gradients accumulated and reduced in fp32, as in this project.
Tests compare them with DeepSpeed's allocations.
"""

import contextlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pretrain import models
from pretrain.config import RunConfig, deepspeed_keys
from pretrain.config.deepspeed_keys import ZeroSection
from pretrain.engine.construction import layers
from pretrain.engine.optimizers.groups import kinds, parameter_groups
from pretrain.engine.sharding import Sharding
from pretrain.models import ModelConfig
from pretrain.models.functional.attention_backends import Backend, using
from pretrain.models.model import Model

_IS_CUDA: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
FP32 = 4  # bytes


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages that are created on `device` within the block, until they are freed.

    `allocated`: bytes that exist now. `peak`: the most bytes that existed at once. `known` tensors, memory inside
    kernels, and waste of an allocator don't count.
    """

    def __init__(self, device: str, known: Iterable[Tensor] = ()):
        super().__init__()
        self._device = device
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self.allocated = self.peak = 0
        for tensor in known:
            self._watch(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type == self._device:
                storage = value.untyped_storage()
                self._watch(storage, storage.nbytes())
        return result

    def _watch(self, storage: UntypedStorage, size: int) -> None:
        key = storage._cdata

        def freed(_: object) -> None:
            del self._storages[key]
            self.allocated -= size

        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, freed)
            self.allocated += size
            self.peak = max(self.peak, self.allocated)


@dataclass(frozen=True)
class Rows:
    """`count` rows with an attention mask, like the rows that `batch.micro_batch_size: auto` measures. Each row has so
    many `inputs`, `targets`, `predicted` targets (which count in the loss) and `examples`."""

    count: int
    inputs: int
    targets: int
    predicted: int
    examples: int = 1


@cache
def activations(
    config: ModelConfig, rows: Rows, precision: str, recomputed_layers: bool, attention: Backend
) -> tuple[int, int]:
    """The memory of a pass over `rows` in training: on a GPU if `attention` is `triton`, else on a CPU.

    Returns the bytes at the peak of the forward and backward pass, and the bytes that the forward pass keeps for the
    backward pass. Weights don't count. A parameter's gradient counts until it is complete.
    """
    model = models.meta_model(config).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    forms = DeviceForms(on_gpu=attention == "triton")
    if recomputed_layers:
        for layer in layers(model).values():
            # PyTorch turns modes off in the backward pass
            layer.prepare(recomputed=True, context_fn=lambda: (contextlib.nullcontext(), forms))
    for parameter in model.parameters():  # ZeRO moves a gradient to its own buffer as soon as it is complete
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with torch.device("meta"):
        batch = {
            "encoder_input_ids": torch.zeros(rows.count, rows.inputs, dtype=torch.long),
            "labels": torch.zeros(rows.count, rows.targets, dtype=torch.long),
            "encoder_attention_mask": torch.ones(rows.count, rows.inputs, dtype=torch.long),
            "target_indices": torch.zeros(rows.count * rows.predicted, dtype=torch.long),
        }
        if rows.examples > 1:
            for side, like in (("encoder", "encoder_input_ids"), ("decoder", "labels")):
                for name in ("segment_ids", "positions"):
                    batch[f"{side}_{name}"] = torch.zeros_like(batch[like])
    memory = LiveMemory("meta", known=[*model.parameters(), *model.buffers()])
    with memory, forms, using(attention):
        loss = torch.stack([values.sum() for values in model(**batch).values()]).sum()
        saved = memory.allocated
        loss.backward()
    return memory.peak, saved


class DeviceForms(TorchFunctionMode):
    """Replaces operations that the meta device lacks, or computes in another way than a GPU or a CPU.

    If `on_gpu`, tensors say that they are on a GPU, since layers choose their code by this. PyTorch's attention is a
    fused kernel, which keeps no attention weights; on a CPU only without dropout and learned bias. The kernels of CUDA
    keep the same tensors as the CPU's.
    """

    def __init__(self, on_gpu: bool):
        super().__init__()
        self._on_gpu = on_gpu

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._on_gpu and function == _IS_CUDA:
            return True
        if function is F.scaled_dot_product_attention:
            bias = kwargs["attn_mask"]
            if self._on_gpu or not (kwargs["dropout_p"] or (bias is not None and bias.requires_grad)):
                fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return fused(*args, **kwargs)[0]
        return function(*args, **kwargs)


@dataclass(frozen=True)
class Parameters:
    """The sizes of a model's parameters and of its optimizer's state.

    Attributes:
        sizes: the number of elements of each parameter.
        moments: bytes of optimizer state that ZeRO shards.
        whole_moments: bytes of optimizer state that each rank holds whole.
        step_bytes: bytes of the temporary tensors of the optimizer's step, for each element that a rank updates.
    """

    sizes: list[int]
    moments: int
    whole_moments: int
    step_bytes: int

    @classmethod
    def of(cls, model: Model, config: RunConfig) -> "Parameters":
        """`model` may be on the meta device."""
        sizes, moments, whole, optimizer, kind_of = [], 0, 0, config.optimizer, kinds(model)
        for group in parameter_groups(model, optimizer):
            for name, parameter in group["params"]:
                kind, shape = kind_of[name], tuple(parameter.shape)
                sizes.append(parameter.numel())
                moments += optimizer.sharded_bytes(kind, shape)
                whole += optimizer.whole_state_bytes(kind, shape)
        return cls(sizes, moments, whole, optimizer.step_bytes)

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def state(self) -> int:
        """Bytes of a checkpoint, of all ranks together: weights in fp32 and the moments that ZeRO shards."""
        return FP32 * self.count + self.moments


@dataclass(frozen=True)
class States:
    """Bytes of a rank, on the GPU except for `host`.

    Attributes:
        weights: in the model's precision.
        master_weights: copies in fp32.
        moments: the optimizer's state.
        gradients: at the end of a micro-batch that is not a step's first.
        step: temporary tensors of the optimizer's step, when no activations exist.
        buffers: the bucket in which gradients wait for their reduction and, at stage 3, gathered weights.
        reduction: copies of a bucket while it is reduced; or a micro-batch's gradients, if each rank adds them up.
        reduced_after: the share of the backward pass, in parameters, after which `reduction` first exists.
        host: in the host's memory.
    """

    weights: int
    master_weights: int
    moments: int
    gradients: int
    step: int
    buffers: int
    reduction: int
    reduced_after: float
    host: int = 0

    @property
    def lasting(self) -> int:
        """The bytes that a GPU holds throughout a step."""
        return self.weights + self.master_weights + self.moments + self.gradients

    def peak(self, activations: int) -> int:
        """The most bytes that a GPU holds in a step: with all activations; or when the first bucket is reduced, with
        the activations left; or in the optimizer's step."""
        left = int((1 - self.reduced_after) * activations)
        return self.lasting + max(self.buffers + max(activations, left + self.reduction), self.step)


def states(parameters: Parameters, sharding: Sharding, precision: str, zero: ZeroSection) -> States:
    """The tensors that a rank keeps. `zero`: the run file's `deepspeed.zero_optimization`, which says how much stage 3
    gathers at once, and what is offloaded (weights only at stage 3)."""
    stage, ranks, width = sharding.stage, sharding.ranks, 2 if precision == "bf16" else FP32
    keys = {**dict(zero), **deepspeed_keys.reductions(stage, "cuda")}
    offloaded = {*zero.offloaded_to("cpu"), *zero.offloaded_to("nvme")}
    count, largest, bucket = parameters.count, max(parameters.sizes), keys["reduce_bucket_size"]
    share, filled = -(-count // ranks), min(bucket, count)
    weights, gradients = width * count, FP32 * share
    if stage == 3:
        persistent = sum(size for size in parameters.sizes if size <= keys["stage3_param_persistence_threshold"])
        live = min(count, keys["stage3_max_live_parameters"])
        coming = min(count - live, keys["stage3_prefetch_bucket_size"])
        weights = width * (share + persistent)
        # a gathered parameter is copied out of the buffer in which it arrived
        buffers = FP32 * bucket + width * (live - persistent + coming + largest)
        reduction = FP32 * filled
    elif sharding.local:
        # the gradients of a micro-batch exist at its end, when its activations are freed
        gradients, buffers, reduction, filled = FP32 * count, 0, width * count, count
    else:
        if keys["overlap_comm"] and not offloaded:
            bucket, filled = max(bucket, largest), max(filled, largest)
        buffers = width * bucket * (2 if keys["overlap_comm"] else 1)
        reduction = (width if width == FP32 else width + FP32) * filled
    held = States(
        weights=weights,
        master_weights=FP32 * share,
        moments=parameters.moments // ranks + parameters.whole_moments,
        gradients=gradients,
        step=share * parameters.step_bytes,
        buffers=buffers,
        reduction=reduction,
        reduced_after=filled / count,
    )
    if not offloaded:
        return held
    host = held.master_weights + held.moments + 2 * FP32 * share  # gradients, as they accumulate and for the optimizer
    held = replace(held, master_weights=0, moments=0, step=0, host=host)
    if stage < 3:  # new weights on their way to the GPU
        return replace(held, buffers=buffers + FP32 * largest, host=host + width * share)
    if "offload_param" in offloaded:
        return replace(held, gradients=0, weights=0, host=host + weights)
    return replace(held, gradients=0)
