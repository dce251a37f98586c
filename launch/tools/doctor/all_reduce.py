"""An all-reduce over all ranks of a run: how its ranks are started, and what their answers mean."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from launch.tools.doctor.findings import REQUEST, Finding
from pretrain.hardware.gpus import gpu_of_device
from pretrain.hardware.machine import VISIBLE

SECONDS = 180.0  # with starting Python and importing torch, which a network file system makes slow
_SHARE = 0.5  # of what the data sheet gives, or other nodes; NCCL's own tests reach about 0.8 of the former
_LONGEST_LINE = 200


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run: `per_node` of them on each node, which meet at `address` and `port` of the first."""

    per_node: list[int]
    address: str
    port: int
    seconds: float = SECONDS

    @property
    def ranks(self) -> int:
        return sum(self.per_node)

    def environments(self, node: int, on_gpus: bool) -> list[dict[str, str]]:
        """The environment of each rank of a node, for `all_reduce_rank`."""
        local, first = self.per_node[node], sum(self.per_node[:node])
        shared = {
            REQUEST: json.dumps([self.seconds, self.per_node]),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_SIZE": str(local),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "OMP_NUM_THREADS": "1",
            **({} if on_gpus else {VISIBLE: ""}),
        }
        return [{**shared, "RANK": str(first + number), "LOCAL_RANK": str(number)} for number in range(local)]


@dataclass(frozen=True)
class Measured:
    """How long the slowest rank took for an all-reduce of `bytes`. `gpu`: the name of the GPUs; None: on CPUs."""

    bytes: int
    seconds: float
    gpu: str | None


@dataclass(frozen=True)
class Part:
    """The same over the ranks of one node or of two neighbours, by their numbers."""

    nodes: list[int]
    bytes: int
    seconds: float


@dataclass
class Answers:
    """What the ranks have said: those that have joined, what rank 0 measured, single nodes and pairs of them, and a
    line for each rank that failed."""

    joined: list[int] = field(default_factory=list)
    measured: Measured | None = None
    parts: list[Part] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def add_report(self, line: str) -> None:
        """Adds a line of JSON that a rank has reported."""
        report = json.loads(line)
        if "joined" in report:
            self.joined.append(report["joined"])
        elif "nodes" in report:
            self.parts.append(Part(**report))
        else:
            self.measured = Measured(**report)


def finding(group: RankGroup, answers: Answers) -> Finding:
    """What the doctor says of an all-reduce."""
    name, nodes, measured = "all-reduce", len(group.per_node), answers.measured
    if measured is None:
        absent = [rank for rank in range(group.ranks) if rank not in answers.joined]
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent[:8]))}{' …' if len(absent) > 8 else ''}"
        error = next((f" ({who}: {line[:_LONGEST_LINE]})" for who, line in answers.errors.items()), "")
        found = f"{who} of {group.ranks} didn't join within {group.seconds:g} s{error}" if absent else f"failed{error}"
        remedy = f"{group.address}, port {group.port}, must be reachable from every rank (firewall, NCCL_SOCKET_IFNAME)"
        return Finding(name, "fault", found, "a sum over all ranks", remedy)
    if group.ranks == 1:
        return Finding(name, "ok", f"one rank on {measured.gpu or 'the CPU'}, so nothing is exchanged")
    speed = bus_bandwidth(group.ranks, measured.bytes, measured.seconds)
    found = f"{group.ranks} ranks, {measured.bytes / 2**20:.0f} MiB at {speed:.2g} GB/s ({measured.gpu or 'CPU, gloo'})"
    expected = expected_bandwidth(measured.gpu, group.per_node)
    if expected and speed < _SHARE * expected:
        where = "the network (NCCL_DEBUG=INFO shows what NCCL uses)" if nodes > 1 else "nvidia-smi topo -m"
        return Finding(name, "warning", found, f"about {expected:.3g} GB/s by the data sheet", f"look at {where}")
    return Finding(name, "ok", found + (f" of {expected:.3g} GB/s by the data sheet" if expected else ""))


def slow_parts(group: RankGroup, parts: Sequence[Part], names: Sequence[str]) -> Iterator[Finding]:
    """Warnings of nodes, and of pairs of neighbours, that take more than twice as long as the fastest of their kind.

    A node with two slow neighbours is named: its own link is the likelier cause than both of theirs.
    """
    for size, remedy in ((1, "nvidia-smi topo -m there"), (2, "network cards, cables and switch ports (ibstat)")):
        kind = [part for part in parts if len(part.nodes) == size]
        slow = [part for part in kind if part.seconds * _SHARE > min(one.seconds for one in kind)]
        counts = Counter(node for part in slow for node in part.nodes)
        for part in slow:
            speeds = [
                bus_bandwidth(sum(group.per_node[node] for node in one.nodes), one.bytes, one.seconds)
                for one in (part, min(kind, key=lambda one: one.seconds))
            ]
            where = "within the node" if size == 1 else f"between {' and '.join(names[node] for node in part.nodes)}"
            blamed = part.nodes if size == 1 else [node for node in part.nodes if counts[node] > 1]
            yield Finding(
                "all-reduce",
                "warning",
                f"{speeds[0]:.2g} GB/s {where}",
                f"about {speeds[1]:.2g} GB/s, as elsewhere",
                f"look at {remedy}",
                names[blamed[0]] if blamed else "",
            )


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """nccl-tests' bus bandwidth, 2(n-1)/n · size/time: GB/s that each rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def expected_bandwidth(gpu: str | None, per_node: list[int]) -> float | None:
    """The bus bandwidth that the links allow, GB/s; None for CPUs and unknown GPUs.

    Between nodes, the ring of each GPU goes through that GPU's own network card.
    """
    known = gpu_of_device(gpu) if gpu else None
    if known is None:
        return None
    links = [known.link] if max(per_node) > 1 else []
    return min([*links, *([known.network * min(per_node)] if len(per_node) > 1 else [])])
