"""The checks of `launch doctor`: functions from settings to findings, and the program that runs them on a node or as a
rank."""

import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pynvml

from data_pipeline.base.errors import one_line
from data_pipeline.base.formatting import human_size
from data_pipeline.base.packages import PACKAGE, version_of
from data_pipeline.base.processes import until
from pretrain.hardware import ACCELERATOR, VISIBLE, count_gpus, device_type, local_gpu
from pretrain.run.rank_environment import rank_environment

REQUEST = "LAUNCH_DOCTOR_REQUEST"  # the variable with the name of the checks and their settings, as JSON
REPORT = "findings: "  # begins the line with the findings; a check may print other lines
SECONDS = {"node": 60, "rank": 180}  # for a check; a rank may import torch from a network file system
WAITING = "find out what the check waits for: a file system, a driver"
REACHABLE = "the first node must be reachable from every rank (firewall, NCCL_SOCKET_IFNAME)"
_BUSY = 2**30  # bytes
_SHARED = Path("/dev/shm")
_SHARED_BY_RANK = 32 * 2**20  # bytes: NCCL's buffers, and batches on their way from the loader
_WRITTEN = 4 * 2**20  # bytes
_REFUSED = "choose another run.directory, on a disk and not in a mounted bucket, or make room there"
_SECONDS_TO_SEE = 20.0  # a network file system shows a new file late
_LOOPS = 5
_REDUCED = {"cpu": 2**26, "cuda": 2**28}  # bytes
Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Settings:
    """The settings of a check.

    Attributes:
        ranks_here: number of ranks on the node.
        all_ranks: number of ranks on all nodes.
        directory: the run directory.
        shared: a file that the head has created beside the run directory.
    """

    ranks_here: int = 1
    all_ranks: int = 1
    directory: str | None = None
    shared: str | None = None


@dataclass(frozen=True)
class Finding:
    """A line of the report. An `error` would stop a run; a `warning` makes a run slower or less safe.

    Attributes:
        expected: what the check expected; "" if all is well.
        remedy: what to do; "" if all is well.
        node: the name of the machine; "" for a finding about all machines.
    """

    check: str
    level: Level
    found: str
    expected: str = ""
    remedy: str = ""
    node: str = ""


def versions(settings: Settings) -> list[Finding]:
    """The versions of the packages that ranks compute with, which must be the same on all nodes."""
    numbers = (f"{name} {version_of(name)}" for name in (PACKAGE, "torch", "deepspeed", "mlflow"))
    return [Finding("versions", "ok", ", ".join([f"python {platform.python_version()}", *numbers]))]


def gpus(settings: Settings) -> list[Finding]:
    """Whether each rank has a GPU, and the GPUs of the ranks are free."""
    number, ranks = count_gpus(), settings.ranks_here
    if number == 0:
        chosen = " and ".join(f"{name}={os.environ[name]}" for name in (ACCELERATOR, VISIBLE) if name in os.environ)
        return [Finding("GPUs", "ok", f"none{f' with {chosen}' if chosen else ''}; ranks run on the CPU")]
    if ranks > number:
        return [Finding("GPUs", "error", f"{number}", f"{ranks}, one for each rank", "ask for fewer ranks")]
    pynvml.nvmlInit()
    handles = _visible_gpus(number)
    kinds = sorted({str(pynvml.nvmlDeviceGetName(handle)) for handle in handles.values()})
    findings = [Finding("GPUs", "ok", f"{len(handles)} × {' and '.join(kinds)}")]
    used = {name: pynvml.nvmlDeviceGetMemoryInfo(handle).used for name, handle in handles.items()}
    if busy := [name for name, amount in used.items() if amount > _BUSY]:
        found = f"GPUs {', '.join(busy)}: up to {max(used.values()) / 1e9:,.1f} GB in use"
        remedy = "nvidia-smi shows the processes that use them; end these processes"
        findings.append(Finding("GPU memory", "warning", found, "free GPUs", remedy))
    return findings


def _visible_gpus(number: int) -> dict[str, Any]:
    """NVML's handles of the `number` GPUs that the ranks may use, by index, or as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return {str(place): pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())}
    return {name: _gpu(name) for name in map(str.strip, chosen.split(",")[:number])}


def _gpu(name: str) -> Any:
    """NVML's handle of a GPU by its index or UUID. The UUID may be shortened, or be that of a MIG instance."""
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    every = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
    found = [handle for handle in every if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)]
    return found[0] if found else pynvml.nvmlDeviceGetHandleByUUID(name)


def shared_memory(settings: Settings) -> list[Finding]:
    """Whether /dev/shm, which is small in a container by default, has room for NCCL and loaders."""
    free, needed = shutil.disk_usage(_SHARED).free, settings.ranks_here * _SHARED_BY_RANK
    found = f"{human_size(free)} free in {_SHARED}"
    if free >= needed:
        return [Finding("shared memory", "ok", found)]
    remedy = "enlarge it: docker run --shm-size=8g or --ipc=host, mount -o remount,size=8g /dev/shm"
    return [Finding("shared memory", "error", found, f"{human_size(needed)} or more for NCCL and loaders", remedy)]


def existing(directory: Path) -> Path:
    """The directory or, if it doesn't exist, the nearest one above it."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())


def run_directory(settings: Settings) -> list[Finding]:
    """Whether the run directory's file system does what a run needs and is the head's."""
    if settings.directory is None:
        return []
    place, shared = existing(Path(settings.directory)), settings.shared
    operation = "make a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".launch-doctor-", dir=place) as scratch:
            (folder := Path(scratch, "folder")).mkdir()
            operation = "write a file"
            with (folder / "file").open("wb") as file:
                file.write(bytes(_WRITTEN))
                file.flush()
                os.fsync(file.fileno())
            operation = "append to a file"  # as to metrics.jsonl when a run resumes
            with (folder / "file").open("ab") as file:
                file.write(b"\n")
            operation = "rename a folder"  # as a checkpoint that is complete
            folder.rename(folder.with_name("renamed"))
        room = shutil.disk_usage(place).free
    except OSError as error:
        found = f"{place}: can't {operation}: {error.strerror or error}"
        expected = "a directory where files can be written and appended to, and folders renamed"
        return [Finding("run directory", "error", found, expected, _REFUSED)]
    if shared and not until(Path(shared).exists, _SECONDS_TO_SEE):
        found = f"{shared}, which launch doctor has just created, isn't seen here"
        remedy = "put run.directory on a file system that every node mounts"
        return [Finding("run directory", "error", found, "one file system for all nodes", remedy)]
    return [Finding("run directory", "ok", f"{place}: {room / 1e9:,.0f} GB free")]


def all_reduce(settings: Settings) -> list[Finding]:
    """The speed of an all-reduce over all ranks, which rank 0 returns. The environment has RANK etc., as in a run."""
    import torch  # the checks of a node don't need it
    import torch.distributed as dist

    kind, here = device_type(), rank_environment()
    device = torch.device(kind, local_gpu(here.local_rank, torch.cuda.device_count()) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=SECONDS["rank"]))
    values, ranks = torch.ones(_REDUCED[kind] // 4, device=device), settings.all_ranks
    dist.all_reduce(values)
    if values[0].item() != ranks or values[-1].item() != ranks:
        raise ValueError(f"the sum of {ranks} ones is {values[0].item():g}")
    begun = time.perf_counter()
    for _ in range(_LOOPS):
        dist.all_reduce(values)
    if kind == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor([(time.perf_counter() - begun) / _LOOPS], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = float(slowest.item())
    dist.destroy_process_group()
    device_name = torch.cuda.get_device_name(device) if kind == "cuda" else "CPU, gloo"
    return [] if here.rank else [speed(ranks, _REDUCED[kind], seconds, device_name)]


def speed(ranks: int, size: int, seconds: float, device: str) -> Finding:
    """The bus bandwidth of an all-reduce of `size` bytes over n `ranks`, as in nccl-tests: 2(n-1)/n · size/time, which
    each rank sends in a ring."""
    if ranks == 1:
        return Finding("all-reduce", "ok", f"one rank ({device}), so nothing is exchanged")
    reached = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    return Finding("all-reduce", "ok", f"{ranks} ranks, {size / 2**20:.0f} MiB at {reached:.2g} GB/s ({device})")


CHECKS: dict[str, dict[str, Callable[[Settings], list[Finding]]]] = {
    "node": {"versions": versions, "GPUs": gpus, "shared memory": shared_memory, "run directory": run_directory},
    "rank": {"all-reduce": all_reduce},
}


def main() -> None:
    """Runs the checks that REQUEST names, and prints their findings."""
    kind, settings = json.loads(os.environ[REQUEST])
    where = f"rank {os.environ['RANK']}: " if kind == "rank" else ""
    findings: list[Finding] = []

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS[kind]} s")

    signal.signal(signal.SIGALRM, late)
    for name, check in CHECKS[kind].items():
        signal.alarm(SECONDS[kind])
        try:
            findings += check(Settings(**settings))
        except Exception as error:  # of a driver or a library; the other checks still run
            found = f"{where}the check failed: {one_line(error)}"
            findings.append(Finding(name, "error", found, "", REACHABLE if kind == "rank" else WAITING))
        signal.alarm(0)
    print(f"{REPORT}{json.dumps([asdict(finding) for finding in findings])}", flush=True)


if __name__ == "__main__":
    main()
