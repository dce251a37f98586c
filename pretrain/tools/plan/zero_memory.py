"""The tensors that DeepSpeed ZeRO keeps on a rank: weights, in the model's precision and in fp32, moments, gradients.

Read in DeepSpeed 0.19.8's source (`bf16_optimizer.py`, `zero/stage_1_and_2.py`, `zero/stage3.py`), with gradients
accumulated and reduced in fp32, as this project sets it, and checked in the tests against what DeepSpeed allocates.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from pretrain.config import RunConfig
from pretrain.config.deepspeed_keys import ZeroSection, zero_defaults
from pretrain.config.optimizers import AdafactorConfig
from pretrain.models.model import Model
from pretrain.optimizers.groups import parameter_groups

Offload = Literal["none", "optimizer", "optimizer and weights"]
FP32 = 4  # bytes
_MOMENTS = {"adamw": 2, "adamw_scale": 2, "muon": 1}  # of each element, in fp32
_COPIES = {"adamw": 0, "adamw_scale": 2, "adafactor": 2, "muon": 3}  # of a rank's gradient, in a step


@dataclass(frozen=True)
class Setting:
    """A setting that a plan compares. `offload`: the tensors in host memory; weights can only at stage 3, which shards
    them."""

    stage: int
    offload: Offload
    checkpointing: bool


@dataclass(frozen=True)
class Parameters:
    """The sizes of a model's parameters.

    `moments` are the bytes of optimizer state that ZeRO shards, `whole_moments` those that each rank holds whole.
    `copies`: of a rank's gradient, during the optimizer's step.
    """

    sizes: list[int]
    moments: int
    whole_moments: int
    copies: int

    @classmethod
    def of(cls, model: Model, config: RunConfig) -> "Parameters":
        """`model` may be on the meta device."""
        sizes, moments, whole, optimizer = [], 0, 0, config.optimizer
        for group in parameter_groups(model, optimizer):
            for _, parameter in group["params"]:
                sizes.append(parameter.numel())
                if isinstance(optimizer, AdafactorConfig):
                    shape, least = parameter.shape, optimizer.min_dim_size_to_factor
                    means = sum(shape) if len(shape) == 2 and min(shape) >= least else parameter.numel()
                    whole += (FP32 + 8) * means  # and their counts, int64
                else:
                    moments += FP32 * _MOMENTS[group["algorithm"]] * parameter.numel()
                if optimizer.ema_decay is not None:
                    moments += FP32 * parameter.numel()
        return cls(sizes, moments, whole, _COPIES[optimizer.name])

    @cached_property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def state(self) -> int:
        """Bytes of a checkpoint, of all ranks together: weights in fp32 and the moments that ZeRO shards."""
        return FP32 * self.count + self.moments


@dataclass(frozen=True)
class States:
    """Bytes of one rank. On the GPU: all but `host`.

    - `weights`: as the model computes with them. `master_weights`: copies in fp32; none where the weights are fp32 too
      and nothing is offloaded. `moments`: the optimizer's state.
    - `gradients`: at the end of a micro-batch that is not a step's first.
    - `buffers`: the bucket in which gradients wait for their reduction and, at stage 3, gathered weights.
    - `reduction`: copies of a bucket while it is reduced. `reduced_after`: the share of the backward pass, measured in
      parameters, after which the first bucket is reduced.
    - `step`: temporaries of the optimizer's step, when no activations exist.
    """

    weights: int
    master_weights: int
    moments: int
    gradients: int
    step: int
    buffers: int = 0
    reduction: int = 0
    reduced_after: float = 1.0
    host: int = 0

    @property
    def lasting(self) -> int:
        """The bytes that a GPU holds at every moment of a step."""
        return self.weights + self.master_weights + self.moments + self.gradients

    def peak(self, activations: int) -> int:
        """The most that a GPU holds during a step: with all activations, or with those that are left when the first
        bucket is reduced, or in the optimizer's step."""
        left = int((1 - self.reduced_after) * activations)
        return self.lasting + max(self.buffers + max(activations, left + self.reduction), self.step)


def states(parameters: Parameters, setting: Setting, ranks: int, precision: str, zero: ZeroSection) -> States:
    """The tensors that a rank keeps. `zero`: the run file's `deepspeed.zero_optimization`, for the sizes of buckets."""
    given = {key: value for key, value in zero.model_dump().items() if value is not None}
    keys, width = {**dict(ZeroSection()), **zero_defaults(3, "cuda"), **given}, 2 if precision == "bf16" else FP32
    stage, offload = setting.stage, setting.offload
    count, largest, bucket = parameters.count, max(parameters.sizes), keys["reduce_bucket_size"]
    share, filled = -(-count // ranks), min(bucket, count)
    held = States(
        weights=width * count,
        master_weights=FP32 * share if width < FP32 or offload != "none" else 0,
        moments=parameters.moments // ranks + parameters.whole_moments,
        gradients=FP32 * share,
        step=FP32 * share * parameters.copies,
        reduced_after=filled / count,
    )
    if stage == 3:
        persistent = sum(size for size in parameters.sizes if size <= keys["stage3_param_persistence_threshold"])
        live = min(count, keys["stage3_max_live_parameters"])
        coming = min(count - live, keys["stage3_prefetch_bucket_size"])
        # a gathered parameter is copied out of the buffer in which it arrived
        gathered = width * (live - persistent + coming + largest)
        buffers, reduction = FP32 * bucket + gathered, FP32 * filled
        held = replace(held, weights=width * (share + persistent), buffers=buffers, reduction=reduction)
    elif stage == 1 and offload == "none":
        # in fp32 what a backward pass makes is reduced and added to the share; in bf16 it is added up at once
        own, buffers = (0, width * largest) if width < FP32 else (FP32 * share, FP32 * bucket)
        held = replace(held, gradients=FP32 * count + own, buffers=buffers)
    else:
        staged = FP32 if stage == 1 else width
        gradients = held.gradients + (FP32 * count if stage == 1 else 0)
        buffers = staged * bucket * (2 if keys["overlap_comm"] else 1)
        reduction = (staged if staged == FP32 else staged + FP32) * filled
        held = replace(held, gradients=gradients, buffers=buffers, reduction=reduction)
    if offload == "none":
        return held
    host = held.master_weights + held.moments + 2 * FP32 * share  # gradients, as they accumulate and for the optimizer
    held = replace(held, master_weights=0, moments=0, step=0)
    if stage < 3:  # new weights on their way to the GPU
        return replace(held, buffers=held.buffers + FP32 * largest, host=host + width * share)
    if offload == "optimizer and weights":
        return replace(held, gradients=0, weights=0, host=host + held.weights)
    return replace(held, gradients=0, host=host)
