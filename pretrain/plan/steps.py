"""How long a step takes and what it costs: arithmetic at a stated utilisation, and what GPUs send each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.gpus import Gpu
from pretrain.plan.states import FP32, Parameters, Setting, zero_sizes

EFFICIENCY = 0.8  # the share of a link's data-sheet bandwidth that large collectives of NCCL reach
_BACKWARD = 2 / 3  # of a pass's arithmetic
_RECOMPUTED = 1 / 3  # a forward pass of the layers, relative to forward and backward


@dataclass(frozen=True)
class Cluster:
    """`network`: GB/s that each GPU can send to other nodes."""

    gpu: Gpu
    gpus: int
    nodes: int
    network: float

    @property
    def bandwidth(self) -> float:
        """Bytes/s of each GPU in a collective of all GPUs.

        In NCCL's rings over several nodes each byte leaves a node once, and all network cards of the node share the
        work.
        """
        link = self.gpu.link if self.gpus > 1 else float("inf")
        if self.nodes > 1:
            link = min(link, self.network * self.gpus // self.nodes)
        return EFFICIENCY * link * 1e9


@dataclass(frozen=True)
class Traffic:
    """Bytes that each GPU sends in a step: those that DeepSpeed moves while the GPU computes, beside the forward or the
    backward pass, and those for which it waits."""

    beside_forward: float
    beside_backward: float
    waited_for: float

    @property
    def total(self) -> float:
        return self.beside_forward + self.beside_backward + self.waited_for


def traffic(
    parameters: Parameters, setting: Setting, gpus: int, micro_batches: int, precision: str, zero: Mapping[str, Any]
) -> Traffic:
    """Of a step of `micro_batches` on each GPU.

    Gradients travel in fp32: once a step at stage 1, with each micro-batch at stages 2 and 3. Stages 1 and 2 send all
    of them to all GPUs (an all-reduce) and gather the new weights once; stage 3 scatters them and gathers the weights
    for each pass, but for small parameters, which stay whole, and those of which the backward pass has use soon enough
    after the forward pass to keep them. With overlap, all buckets but the last travel beside the backward pass.
    """
    others = (gpus - 1) / gpus  # the share of a tensor that a GPU sends, in a ring, to gather or to scatter it
    sizes, count = zero_sizes(zero), parameters.count
    weight = others * (2 if precision == "bf16" else FP32)
    weights, gradients = weight * count, others * FP32 * count
    early = max(0.0, 1 - sizes["reduce_bucket_size"] / count) if setting.overlap else 0.0
    if setting.stage == 1:
        return Traffic(0.0, 0.0, 2 * gradients + weights)
    if setting.stage == 2:
        reduced = 2 * gradients * micro_batches
        return Traffic(0.0, early * reduced, (1 - early) * reduced + weights)
    small = parameters.up_to(sizes["stage3_param_persistence_threshold"])
    kept = min(count, sizes["stage3_max_live_parameters"], sizes["stage3_max_reuse_distance"] // 2)
    forward, backward = (weight * micro_batches * gathered for gathered in (count - small, count - kept))
    scattered, updated = gradients * micro_batches, weight * small
    if not setting.overlap:
        return Traffic(0.0, 0.0, forward + backward + scattered + updated)
    return Traffic(forward, backward + early * scattered, (1 - early) * scattered + updated)


@dataclass(frozen=True)
class Step:
    """Seconds of a step: `compute`, and `exposed`, in which GPUs wait for each other. `hidden`: the share of the bytes
    that travel while the GPUs compute. `mfu`: of the whole step; waiting and recomputing are no useful work."""

    compute: float
    exposed: float
    hidden: float
    mfu: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def step(
    flops: float, of_layers: float, sent: Traffic, cluster: Cluster, setting: Setting, peak: float, mfu: float
) -> Step:
    """A step of `flops` in all, of which the layers, which checkpointing computes again, take `of_layers`.

    `peak`: FLOP/s of a GPU by its data sheet. `mfu`: the share of it that a GPU reaches while it computes.
    """
    needed = flops / cluster.gpus / peak
    forward = needed * (1 - _BACKWARD) / mfu
    backward = needed * _BACKWARD / mfu
    if setting.checkpointing:
        backward += of_layers / cluster.gpus / peak * _RECOMPUTED / mfu
    windows = ((sent.beside_forward, forward), (sent.beside_backward, backward))
    late = sum(max(0.0, bytes_ / cluster.bandwidth - window) for bytes_, window in windows)
    exposed = late + sent.waited_for / cluster.bandwidth
    travelling = sent.total / cluster.bandwidth
    hidden = 1 - exposed / travelling if travelling else 0.0
    return Step(forward + backward, exposed, hidden, needed / (forward + backward + exposed))
