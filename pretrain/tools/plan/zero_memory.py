"""What DeepSpeed ZeRO keeps on a rank between and during steps: weights, in the model's precision and in fp32, moments,
gradients and buffers.

Read in DeepSpeed 0.19.8's source (`bf16_optimizer.py`, `zero/stage_1_and_2.py`, `zero/stage3.py`), with gradients
accumulated and reduced in fp32, as this project sets it, and checked in the tests against what DeepSpeed allocates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from pretrain.config import RunConfig
from pretrain.config.deepspeed_keys import ZeroSection, zero_defaults
from pretrain.config.optimizers import AdafactorConfig
from pretrain.models.model import Model
from pretrain.optimizers.groups import parameter_groups

Offload = Literal["none", "optimizer", "optimizer and weights"]
FP32 = 4  # bytes
_SIZES = (
    "reduce_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
_MOMENTS = {"adamw": 2, "adamw_scale": 2, "muon": 1}  # of each element, in fp32
_COPIES = {"adamw": 0, "adamw_scale": 2, "adafactor": 2, "muon": 3}  # of a rank's gradient, in a step


def zero_sizes(zero: ZeroSection) -> dict[str, int]:
    """The sizes that `deepspeed.zero_optimization` sets, in elements, with the defaults on GPUs for the others."""
    sizes = {**dict(ZeroSection()), **zero_defaults(3, "cuda"), **zero.model_dump()}
    return {key: sizes[key] for key in _SIZES}


@dataclass(frozen=True)
class Setting:
    """What a plan varies. `overlap`: whether reductions run beside the backward pass (DeepSpeed's `overlap_comm`)."""

    stage: int
    offload: Offload
    checkpointing: bool
    overlap: bool


def settings(config: RunConfig) -> list[Setting]:
    """Every stage with and without offloading and checkpointing of activations, and `overlap_comm` as in a run."""
    given = config.deepspeed.zero_optimization.overlap_comm
    overlap = bool(zero_defaults(1, "cuda")["overlap_comm"]) if given is None else given
    return [
        Setting(stage, offload, checkpointing, overlap)
        for stage in (1, 2, 3)
        for offload in offload_choices(stage)
        for checkpointing in (False, True)
    ]


def offload_choices(stage: int) -> tuple[Offload, ...]:
    """Only stage 3 shards weights, so only there can they be offloaded."""
    return ("none", "optimizer", "optimizer and weights") if stage == 3 else ("none", "optimizer")


@dataclass(frozen=True)
class Parameters:
    """The sizes of a model's parameters, in the groups of its optimizer.

    `moments` are the bytes of optimizer state that ZeRO shards, `whole_moments` those that each rank holds whole.
    """

    groups: list[list[int]]
    moments: int
    whole_moments: int
    copies: int

    @classmethod
    def of(cls, model: Model, config: RunConfig) -> "Parameters":
        """`model` may be on the meta device."""
        groups = parameter_groups(model, config.optimizer)
        moments = whole = 0
        for group in groups:
            for _, parameter in group["params"]:
                if isinstance(config.optimizer, AdafactorConfig):
                    whole += (FP32 + 8) * _factored(parameter.shape, config.optimizer)  # and int64 counts of the means
                else:
                    moments += FP32 * _MOMENTS[group["algorithm"]] * parameter.numel()
                if config.optimizer.ema_decay is not None:
                    moments += FP32 * parameter.numel()
        sizes = [[parameter.numel() for _, parameter in group["params"]] for group in groups]
        return cls(sizes, moments, whole, _COPIES[config.optimizer.name])

    @cached_property
    def count(self) -> int:
        return sum(map(sum, self.groups))

    @property
    def state(self) -> int:
        """Bytes of a checkpoint, of all ranks together: weights in fp32 and the moments that ZeRO shards."""
        return FP32 * self.count + self.moments

    @cached_property
    def largest(self) -> int:
        return max(map(max, self.groups))

    def up_to(self, size: int) -> int:
        """Elements of all parameters that have `size` at most."""
        return sum(one for group in self.groups for one in group if one <= size)

    def share(self, stage: int, ranks: int) -> int:
        """Elements on each rank, with DeepSpeed's padding. Stages 1 and 2 cut a whole group, whose length is rounded up
        to a multiple of 2 · ranks; stage 3 cuts every parameter by itself."""
        if stage == 3:
            return sum(-(-size // ranks) for group in self.groups for size in group)
        return sum(-(-sum(group) // (2 * ranks)) * 2 for group in self.groups)


def _factored(shape: Sequence[int], config: AdafactorConfig) -> int:
    if len(shape) == 2 and min(shape) >= config.min_dim_size_to_factor:
        return sum(shape)
    return torch.Size(shape).numel()


@dataclass(frozen=True)
class States:
    """Bytes of one rank. On the GPU: all but `host`, of which `host_step` exists only in the optimizer's step.

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
    host_step: int = 0

    @property
    def lasting(self) -> int:
        """What a GPU holds at every moment of a step."""
        return self.weights + self.master_weights + self.moments + self.gradients

    def peak(self, activations: int) -> int:
        """The most that a GPU holds during a step: with all activations, or with those that are left when the first
        bucket is reduced, or in the optimizer's step."""
        left = int((1 - self.reduced_after) * activations)
        return self.lasting + max(self.buffers + max(activations, left + self.reduction), self.step)


def states(parameters: Parameters, setting: Setting, ranks: int, precision: str, zero: ZeroSection) -> States:
    """`zero`: the run file's `deepspeed.zero_optimization`, for the sizes of buckets."""
    width = 2 if precision == "bf16" else FP32
    count, stage = parameters.count, setting.stage
    keys = zero_sizes(zero)
    bucket = keys["reduce_bucket_size"]
    filled = min(bucket, count)
    share = parameters.share(stage, ranks)
    copied = width < FP32 or setting.offload != "none"
    kept = States(
        weights=width * share * (1 if stage == 3 else ranks),
        master_weights=FP32 * share if copied else 0,
        moments=parameters.moments // ranks + parameters.whole_moments,
        gradients=FP32 * share,
        step=FP32 * share * parameters.copies,
        reduced_after=filled / count,
    )
    if stage == 3:
        persistent = parameters.up_to(keys["stage3_param_persistence_threshold"])
        live = min(count, keys["stage3_max_live_parameters"])
        coming = min(count - live, keys["stage3_prefetch_bucket_size"])
        kept = replace(
            kept,
            weights=kept.weights + width * persistent,
            # a gathered parameter is copied out of the buffer in which it arrived
            buffers=FP32 * bucket + width * (live - persistent + coming + parameters.largest),
            reduction=FP32 * filled,
        )
    elif stage == 1 and setting.offload == "none":
        # in fp32 what a backward pass makes is reduced and added to the share; in bf16 it is added up at once
        whole = FP32 * share * ranks
        kept = replace(kept, gradients=whole + (0 if width < FP32 else FP32 * share), buffers=FP32 * bucket)
        kept = replace(kept, buffers=width * parameters.largest) if width < FP32 else kept
    else:
        staged = FP32 if stage == 1 else width
        kept = replace(
            kept,
            gradients=FP32 * share * (1 + ranks if stage == 1 else 1),
            buffers=staged * bucket * (2 if setting.overlap else 1),
            reduction=(staged if staged == FP32 else staged + FP32) * filled,
        )
    return kept if setting.offload == "none" else _offloaded(kept, parameters, setting, share, width)


def _offloaded(kept: States, parameters: Parameters, setting: Setting, share: int, width: int) -> States:
    host = kept.master_weights + kept.moments + 2 * FP32 * share  # gradients, as they accumulate and for the optimizer
    offloaded = replace(kept, master_weights=0, moments=0, step=0)
    if setting.stage == 3:
        offloaded = replace(offloaded, gradients=0)
    else:
        host += width * share  # new weights on their way to the GPU
        offloaded = replace(
            offloaded, buffers=offloaded.buffers + FP32 * parameters.largest, host_step=(FP32 + width) * share
        )  # the optimizer's copy of the gradients, and those weights
    if setting.offload == "optimizer and weights":
        host += offloaded.weights
        offloaded = replace(offloaded, weights=0)
    return replace(offloaded, host=host)
