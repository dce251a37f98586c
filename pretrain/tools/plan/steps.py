"""How long a step takes and what it costs: arithmetic at a stated utilisation, and what GPUs send each other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pretrain.run.gpus import Gpu
from pretrain.tools.plan.states import FP32, Parameters, Setting, zero_sizes

EFFICIENCY = 0.8  # the share of a link's data-sheet bandwidth that large collectives of NCCL reach
_FASTEST_PCIE = 64  # GB/s in one direction
_BACKWARD = 2 / 3  # of a pass's arithmetic
_RECOMPUTED = 1 / 3  # a forward pass of the layers, relative to forward and backward


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's ways to pass messages on: the share of a link that it can use, microseconds to begin, and for a hop
    over NVLink, over PCIe and between nodes."""

    share: float
    start: float
    nvlink: float
    pcie: float
    network: float


# What NCCL itself reckons with when it chooses (src/graph/tuning.cc): LL, Simple and LL128, in rings and in trees.
_RINGS = (Protocol(1 / 4, 3.6, 0.47, 1.0, 2.7), Protocol(1.0, 8.4, 3.4, 5.7, 9.6), Protocol(0.92, 10.0, 1.9, 2.5, 4.0))
_TREES = (Protocol(0.9 / 3.8, 4.4, 0.52, 1.0, 5.0), Protocol(0.9, 0.0, 28, 28, 50), Protocol(0.82, 4.4, 1.2, 1.9, 8.5))
_SLOWER_LL = 1.8  # a hop of LL inside a node, where there are several


@dataclass(frozen=True)
class Collectives:
    """A `number` of collectives, in which a GPU sends `bytes` in all: all-reduces, or gathers and scatters."""

    bytes: float
    number: float
    all_reduces: bool = False

    def part(self, share: float) -> "Collectives":
        return replace(self, bytes=self.bytes * share, number=self.number * share)


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

    def seconds(self, sent: Collectives) -> float:
        """How long `sent` is on the way, by the way that is fastest for messages of this size."""
        if self.gpus == 1 or not sent.number:
            return 0.0
        size = sent.bytes / sent.number
        inside = self.gpus - self.nodes  # hops of a ring that stay in a node; a gather passes through all GPUs once
        times = 2 if sent.all_reduces else 1
        ways = [(one, times * inside, times * (self.nodes - 1)) for one in self._usable(_RINGS)]
        if sent.all_reduces:  # up and down a tree of nodes, in each of which the GPUs are a chain
            depth = math.floor(math.log2(self.nodes))
            ways += [(one, 2 * inside // self.nodes, 2 * depth) for one in self._usable(_TREES)]
        return sent.number * min(self._latency(*way) + size / (way[0].share * self.bandwidth) for way in ways)

    @property
    def _nvlink(self) -> bool:
        return self.gpu.link > _FASTEST_PCIE

    def _usable(self, protocols: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
        return protocols if self._nvlink else protocols[:2]  # LL128 takes NVLink

    def _latency(self, protocol: Protocol, inside: int, between: int) -> float:
        hop = protocol.nvlink if self._nvlink else protocol.pcie
        if protocol.share < 0.5 and self.nodes > 1:
            hop *= _SLOWER_LL
        return 1e-6 * (protocol.start + inside * hop + between * protocol.network)


@dataclass(frozen=True)
class Traffic:
    """What each GPU sends in a step: beside the forward and the backward pass, and what it waits for."""

    beside_forward: list[Collectives]
    beside_backward: list[Collectives]
    waited_for: list[Collectives]

    @property
    def all(self) -> list[Collectives]:
        return [*self.beside_forward, *self.beside_backward, *self.waited_for]

    @property
    def bytes(self) -> float:
        return sum(one.bytes for one in self.all)

    @property
    def number(self) -> float:
        return sum(one.number for one in self.all)


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
    weights = Collectives(weight * count, parts)
    if setting.stage == 1:
        whole = len(parameters.groups) if precision == "bf16" else buckets
        return Traffic([], [], [Collectives(2 * gradients, whole, all_reduces=True), weights])
    if setting.stage == 2:
        reduced = Collectives(2 * gradients * micro_batches, buckets * micro_batches, all_reduces=True)
        return Traffic([], [reduced.part(early)], [reduced.part(1 - early), weights])
    threshold = sizes["stage3_param_persistence_threshold"]
    small = parameters.up_to(threshold)
    kept = min(count, sizes["stage3_max_live_parameters"], sizes["stage3_max_reuse_distance"] // 2)
    fetches = micro_batches * parameters.buckets(sizes["stage3_prefetch_bucket_size"], above=threshold)
    forward = Collectives(weight * micro_batches * (count - small), fetches)
    backward = Collectives(weight * micro_batches * (count - kept), fetches * (count - kept) / count)
    scattered = Collectives(gradients * micro_batches, buckets * micro_batches)
    updated = Collectives(weight * small, parameters.number_up_to(threshold))
    if not setting.overlap:
        return Traffic([], [], [forward, backward, scattered, updated])
    return Traffic([forward], [backward, scattered.part(early)], [scattered.part(1 - early), updated])


@dataclass(frozen=True)
class Step:
    """Seconds of a step: `compute`, and `exposed`, in which GPUs wait for each other.

    `latency`: those that collectives take beside the time of their bytes at full bandwidth, hidden or not. `hidden`:
    the share of the time of communication in which the GPUs compute. `mfu`: of the whole step; waiting and recomputing
    are no useful work.
    """

    compute: float
    exposed: float
    latency: float
    hidden: float
    mfu: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def step(
    flops: float,
    of_layers: float,
    sent: Traffic,
    cluster: Cluster,
    setting: Setting,
    peak: float,
    mfu: float,
    of_teacher: float = 0.0,
) -> Step:
    """A step of `flops` of the model, of which the layers, which checkpointing computes again, take `of_layers`.

    `peak`: FLOP/s of a GPU by its data sheet. `mfu`: the share of it that a GPU reaches while it computes.
    `of_teacher`: FLOPs of a teacher's forward pass, which comes before the model's and sends nothing.
    """
    needed = flops / cluster.gpus / peak
    before = of_teacher / cluster.gpus / peak
    forward = needed * (1 - _BACKWARD) / mfu
    backward = needed * _BACKWARD / mfu
    if setting.checkpointing:
        backward += of_layers / cluster.gpus / peak * _RECOMPUTED / mfu
    beside, behind, waited = (
        sum(map(cluster.seconds, part)) for part in (sent.beside_forward, sent.beside_backward, sent.waited_for)
    )
    exposed = max(0.0, beside - forward) + max(0.0, behind - backward) + waited
    travelling = beside + behind + waited
    hidden = 1 - exposed / travelling if travelling else 0.0
    latency = travelling - sent.bytes / cluster.bandwidth
    compute = before / mfu + forward + backward
    return Step(compute, exposed, latency, hidden, (before + needed) / (compute + exposed))
