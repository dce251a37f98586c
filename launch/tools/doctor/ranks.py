"""The ranks of one machine for the all-reduce, and what their answers mean."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.tools.doctor.findings import Finding
from pretrain.run.gpus import gpu_of_device
from pretrain.run.hardware import count_gpus, interface_of

SECONDS = 180.0  # with starting Python and importing torch, which a network file system makes slow
_SHARE = 0.5  # of what the data sheet gives; NCCL's own tests reach about 0.8 of it
_LAST = 200


@dataclass(frozen=True)
class Group:
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(group: Group, node: int) -> Answers:
    """Starts the ranks of the machine with number `node` and waits for them, `group.seconds` at most."""
    local, first = group.per_node[node], sum(group.per_node[:node])
    shared = {
        "WORLD_SIZE": str(group.ranks),
        "LOCAL_SIZE": str(local),
        "MASTER_ADDR": group.address,
        "MASTER_PORT": str(group.port),
        "OMP_NUM_THREADS": "1",
    }
    if len(group.per_node) > 1 and (interface := interface_of(group.address)):
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    answers = Answers()
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(local):
            out, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            own = {"RANK": str(first + number), "LOCAL_RANK": str(number)}
            if not count_gpus():
                own["CUDA_VISIBLE_DEVICES"] = ""
            command = [sys.executable, "-P", "-m", "launch.tools.doctor.all_reduce", str(group.seconds)]
            process = subprocess.Popen(
                command, env={**os.environ, **shared, **own}, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
            started.append((first + number, process, out, errors))
        deadline = time.monotonic() + group.seconds
        for rank, process, out, errors in started:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = None
            out.seek(0)
            errors.seek(0)
            lines = [json.loads(line) for line in out if line.startswith("{")]
            answers.joined += [rank for line in lines if "joined" in line]
            answers.measured = answers.measured or next((line for line in lines if "bytes" in line), None)
            if code:
                said = [line.strip() for line in errors if line.strip()]
                answers.errors[str(rank)] = (said or [f"ended with {code}"])[-1][:_LAST]
    return answers


def finding(group: Group, answers: Answers) -> Finding:
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
