"""How long a step takes and what it costs: arithmetic at a stated utilisation, and what GPUs send each other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pretrain.gpus import Gpu
from pretrain.plan.states import FP32, Parameters, Setting, zero_sizes

EFFICIENCY = 0.8  # the share of a link's data-sheet bandwidth that large collectives of NCCL reach
# Seconds that a collective takes beside the time of its bytes, as NCCL 2.10 reckons to choose between rings and trees
# (src/graph/tuning.cc; protocol Simple, which large messages use): once, and for each hop inside a node and between two
_START = 8.4e-6
_RING_HOP = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 9.6e-6}
_TREE_HOP = {"nvlink": 28e-6, "pcie": 28e-6, "network": 50e-6}
_FASTEST_PCIE = 64  # GB/s in one direction
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

    @property
    def gather_latency(self) -> float:
        """Seconds of a gather or scatter of no bytes: in a ring they pass through all GPUs."""
        if self.gpus == 1:
            return 0.0
        inside = "nvlink" if self.gpu.link > _FASTEST_PCIE else "pcie"
        between = self.nodes - 1
        return _START + (self.gpus - 1 - between) * _RING_HOP[inside] + between * _RING_HOP["network"]

    @property
    def all_reduce_latency(self) -> float:
        """Seconds of an all-reduce of no bytes: twice around a ring, or up and down a tree of chains, one a node."""
        if self.gpus == 1:
            return 0.0
        inside = "nvlink" if self.gpu.link > _FASTEST_PCIE else "pcie"
        chain, depth = self.gpus / self.nodes - 1, math.floor(math.log2(self.nodes))
        tree = 2 * (chain * _TREE_HOP[inside] + depth * _TREE_HOP["network"])
        return min(2 * self.gather_latency - _START, tree)

    def seconds(self, sent: "Collectives") -> float:
        """How long `sent` is on the way."""
        latency = sent.gathers * self.gather_latency + sent.all_reduces * self.all_reduce_latency
        return sent.bytes / self.bandwidth + latency


@dataclass(frozen=True)
class Collectives:
    """Bytes that a GPU sends, and the number of collectives: all-reduces, and gathers or scatters."""

    bytes: float = 0.0
    all_reduces: float = 0.0
    gathers: float = 0.0

    def __add__(self, other: "Collectives") -> "Collectives":
        return Collectives(self.bytes + other.bytes, self.all_reduces + other.all_reduces, self.gathers + other.gathers)

    def __mul__(self, times: float) -> "Collectives":
        return Collectives(self.bytes * times, self.all_reduces * times, self.gathers * times)


@dataclass(frozen=True)
class Traffic:
    """What each GPU sends in a step: beside the forward and the backward pass, and what it waits for."""

    beside_forward: Collectives
    beside_backward: Collectives
    waited_for: Collectives

    @property
    def total(self) -> Collectives:
        return self.beside_forward + self.beside_backward + self.waited_for


def traffic(
    parameters: Parameters, setting: Setting, gpus: int, micro_batches: int, precision: str, zero: Mapping[str, Any]
) -> Traffic:
    """Of a step of `micro_batches` on each GPU.

    Gradients travel in fp32: once a step at stage 1, with each micro-batch at stages 2 and 3. Stages 1 and 2 send all
    of them to all GPUs (an all-reduce) and gather the new weights once; stage 3 scatters them and gathers the weights
    for each pass, but for small parameters, which stay whole, and those of which the backward pass has use soon enough
    after the forward pass to keep them. With overlap, all buckets but the last travel beside the backward pass.

    Each bucket of gradients is one collective. So is each group of weights at stages 1 and 2. At stage 3 it is each
    small parameter, and as many of the others as are fetched ahead together.
    """
    others = (gpus - 1) / gpus  # the share of a tensor that a GPU sends, in a ring, to gather or to scatter it
    sizes, count = zero_sizes(zero), parameters.count
    weight = others * (2 if precision == "bf16" else FP32)
    gradients, buckets = others * FP32 * count, parameters.buckets(sizes["reduce_bucket_size"])
    early = max(0.0, 1 - sizes["reduce_bucket_size"] / count) if setting.overlap else 0.0
    parts = sum(-(-sum(group) // sizes["allgather_bucket_size"]) for group in parameters.groups)
    weights = Collectives(weight * count, gathers=parts)
    if setting.stage == 1:
        whole = len(parameters.groups) if precision == "bf16" else buckets
        return Traffic(Collectives(), Collectives(), Collectives(2 * gradients, all_reduces=whole) + weights)
    if setting.stage == 2:
        reduced = Collectives(2 * gradients, all_reduces=buckets) * micro_batches
        return Traffic(Collectives(), reduced * early, reduced * (1 - early) + weights)
    threshold = sizes["stage3_param_persistence_threshold"]
    small = parameters.up_to(threshold)
    kept = min(count, sizes["stage3_max_live_parameters"], sizes["stage3_max_reuse_distance"] // 2)
    fetches = parameters.buckets(sizes["stage3_prefetch_bucket_size"], above=threshold)
    forward = Collectives(weight * (count - small), gathers=fetches) * micro_batches
    backward = Collectives(weight * (count - kept), gathers=fetches * (count - kept) / count) * micro_batches
    scattered = Collectives(gradients, gathers=buckets) * micro_batches
    updated = Collectives(weight * small, gathers=parameters.number_up_to(threshold))
    if not setting.overlap:
        return Traffic(Collectives(), Collectives(), forward + backward + scattered + updated)
    return Traffic(forward, backward + scattered * early, scattered * (1 - early) + updated)


@dataclass(frozen=True)
class Step:
    """Seconds of a step: `compute`, and `exposed`, in which GPUs wait for each other. `latency`: those that collectives
    take beside the time of their bytes, hidden or not. `hidden`: the share of the time of communication in which the
    GPUs compute. `mfu`: of the whole step; waiting and recomputing are no useful work."""

    compute: float
    exposed: float
    latency: float
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
    late = sum(max(0.0, cluster.seconds(part) - window) for part, window in windows)
    exposed = late + cluster.seconds(sent.waited_for)
    travelling = cluster.seconds(sent.total)
    hidden = 1 - exposed / travelling if travelling else 0.0
    latency = cluster.seconds(replace(sent.total, bytes=0.0))
    return Step(forward + backward, exposed, latency, hidden, needed / (forward + backward + exposed))
