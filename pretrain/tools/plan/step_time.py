"""How long a step takes and what it costs: arithmetic at a stated utilisation, and bytes over the links' bandwidth.

A collective takes the time of its bytes at `EFFICIENCY` of the slowest link on its way. What it takes to begin one, and
to pass from GPU to GPU, isn't counted: steps of many small messages, as of stage 3 on hundreds of GPUs, take longer.
"""

from dataclasses import dataclass

from pretrain.config.deepspeed_keys import ZeroSection
from pretrain.hardware.gpus import Gpu
from pretrain.tools.plan.zero_memory import FP32, Parameters, Setting, zero_sizes

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
    """The bytes that each GPU sends in a step: during the forward pass, during the backward pass, and while it waits
    for them."""

    forward: float
    backward: float
    exposed: float

    @property
    def bytes(self) -> float:
        return self.forward + self.backward + self.exposed


def traffic(
    parameters: Parameters, setting: Setting, gpus: int, micro_batches: int, precision: str, zero: ZeroSection
) -> Traffic:
    """The traffic of a step of `micro_batches` on each GPU.

    Gradients travel in fp32: once a step at stage 1, with each micro-batch at stages 2 and 3. Stages 1 and 2 all-reduce
    them and gather the new weights once. Stage 3 scatters them and gathers the weights for each pass, except for small
    parameters, which stay whole, and for those that the backward pass needs so soon after the forward pass that they
    are kept. With overlap, all buckets but the last travel during the backward pass.
    """
    others = (gpus - 1) / gpus  # the share of a tensor that a GPU sends, in a ring, to gather or to scatter it
    sizes, count = zero_sizes(zero), parameters.count
    weight = others * (2 if precision == "bf16" else FP32)
    gradients = others * FP32 * count
    early = max(0.0, 1 - sizes["reduce_bucket_size"] / count) if setting.overlap else 0.0
    if setting.stage == 1:
        return Traffic(0.0, 0.0, 2 * gradients + weight * count)
    if setting.stage == 2:
        reduced = 2 * gradients * micro_batches
        return Traffic(0.0, early * reduced, (1 - early) * reduced + weight * count)
    small = parameters.up_to(sizes["stage3_param_persistence_threshold"])
    kept = min(count, sizes["stage3_max_live_parameters"], sizes["stage3_max_reuse_distance"] // 2)
    forward = weight * micro_batches * (count - small)
    backward = weight * micro_batches * (count - kept)
    scattered, updated = gradients * micro_batches, weight * small
    if not setting.overlap:
        return Traffic(0.0, 0.0, forward + backward + scattered + updated)
    return Traffic(forward, backward + early * scattered, (1 - early) * scattered + updated)


@dataclass(frozen=True)
class Step:
    """Seconds of a step: `compute`, and `exposed`, in which GPUs wait for each other.

    `hidden`: the share of the time of communication in which the GPUs compute. `mfu`: of the whole step; waiting and
    recomputing are no useful work.
    """

    compute: float
    exposed: float
    hidden: float
    mfu: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of a step on all GPUs: of the model, and of its `layers` alone, which checkpointing computes again."""

    model: float
    layers: float


def step(flops: Arithmetic, sent: Traffic, cluster: Cluster, setting: Setting, peak: float, mfu: float) -> Step:
    """`peak`: FLOP/s of a GPU by its data sheet. `mfu`: the share of it that a GPU reaches while it computes."""
    reached = cluster.gpus * peak * mfu
    forward = flops.model * (1 - _BACKWARD) / reached
    backward = flops.model * _BACKWARD / reached
    if setting.checkpointing:
        backward += flops.layers * _RECOMPUTED / reached
    beside, behind, waited = (size / cluster.bandwidth for size in (sent.forward, sent.backward, sent.exposed))
    exposed = max(0.0, beside - forward) + max(0.0, behind - backward) + waited
    travelling = beside + behind + waited
    hidden = 1 - exposed / travelling if travelling else 0.0
    compute = forward + backward
    useful = flops.model / reached
    return Step(compute, exposed, hidden, mfu * useful / (compute + exposed))
