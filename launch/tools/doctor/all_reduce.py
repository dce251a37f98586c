"""An all-reduce over all ranks of a run: the ranks of one node, and what their answers mean.

As a program, `python -m launch.tools.doctor.all_reduce`, it runs the ranks of a node for a doctor.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from data_pipeline.foundation.processes import ProcessGroup
from launch.rank_processes import PROGRAM_REPORT
from launch.tools.doctor.checks import REQUEST
from launch.tools.doctor.findings import Finding
from pretrain.run.gpus import gpu_of_device
from pretrain.run.hardware import VISIBLE, count_gpus, interface_of

SECONDS = 180.0  # with starting Python and importing torch, which a network file system makes slow
_SHARE = 0.5  # of what the data sheet gives; NCCL's own tests reach about 0.8 of it
_LAST_LINES, _LONGEST_LINE = 1000, 200


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


@dataclass
class Answers:
    """What the ranks of one machine, or of all, have said. `errors` has a line for each rank that failed."""

    joined: list[int] = field(default_factory=list)
    measured: dict[str, Any] | None = None
    errors: dict[str, str] = field(default_factory=dict)

    def add(self, other: "Answers") -> None:
        self.joined += other.joined
        self.measured = self.measured or other.measured
        self.errors |= other.errors


def run(group: RankGroup, node: int) -> Answers:
    """Starts the ranks of the machine with number `node` and waits for them, `group.seconds` at most."""
    local, first = group.per_node[node], sum(group.per_node[:node])
    environment = {
        **os.environ,
        "WORLD_SIZE": str(group.ranks),
        "LOCAL_SIZE": str(local),
        "MASTER_ADDR": group.address,
        "MASTER_PORT": str(group.port),
        "OMP_NUM_THREADS": "1",
    }
    if len(group.per_node) > 1 and (interface := interface_of(group.address)):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    if not count_gpus():
        environment[VISIBLE] = ""
    command = [sys.executable, "-P", "-m", "launch.tools.doctor.all_reduce_rank", str(group.seconds)]
    answers, deadline = Answers(), time.monotonic() + group.seconds
    with ProcessGroup(seconds_to_end=0) as processes:
        ranks = {
            first + number: processes.start(
                command, {**environment, "RANK": str(first + number), "LOCAL_RANK": str(number)}, output="file"
            )
            for number in range(local)
        }
        for rank, process in ranks.items():
            code = process.wait(max(0.0, deadline - time.monotonic()))
            lines = process.last_lines(_LAST_LINES)
            reports = [json.loads(line) for line in lines if line.startswith("{")]
            answers.joined += [rank for one in reports if "joined" in one]
            answers.measured = answers.measured or next((one for one in reports if "bytes" in one), None)
            if code:
                said = [line for line in lines if not line.startswith("{")]
                answers.errors[str(rank)] = (said or [f"ended with {code}"])[-1][:_LONGEST_LINE]
    return answers


def finding(group: RankGroup, answers: Answers) -> Finding:
    """What the doctor says of an all-reduce."""
    name, nodes = "all-reduce", len(group.per_node)
    if answers.measured is None:
        absent = [rank for rank in range(group.ranks) if rank not in answers.joined]
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent[:8]))}{' …' if len(absent) > 8 else ''}"
        said = next((f" (rank {rank}: {line})" for rank, line in answers.errors.items()), "")
        found = f"{who} of {group.ranks} didn't join within {group.seconds:g} s{said}" if absent else f"failed{said}"
        remedy = f"{group.address}, port {group.port}, must be reachable from every rank (firewall, NCCL_SOCKET_IFNAME)"
        return Finding(name, "fault", found, "a sum over all ranks", remedy)
    size, seconds, gpu = (answers.measured[key] for key in ("bytes", "seconds", "gpu"))
    if group.ranks == 1:
        return Finding(name, "ok", f"one rank on {gpu or 'the CPU'}, so nothing is exchanged")
    speed = bus_bandwidth(group.ranks, size, seconds)
    found = f"{group.ranks} ranks, {size / 2**20:.0f} MiB at {speed:.2g} GB/s ({gpu or 'CPU, gloo'})"
    expected = expected_bandwidth(gpu, group.per_node)
    if expected and speed < _SHARE * expected:
        where = "the network (NCCL_DEBUG=INFO shows what NCCL uses)" if nodes > 1 else "nvidia-smi topo -m"
        return Finding(name, "warning", found, f"about {expected:.3g} GB/s by the data sheet", f"look at {where}")
    return Finding(name, "ok", found + (f" of {expected:.3g} GB/s by the data sheet" if expected else ""))


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


def main() -> None:
    request = json.loads(os.environ[REQUEST])
    node = request.pop("node")
    print(PROGRAM_REPORT, json.dumps(asdict(run(RankGroup(**request), node))), flush=True)


if __name__ == "__main__":
    main()
