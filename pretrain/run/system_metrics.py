"""Samples CPU, memory, GPUs, network and disk of a machine, in a thread of its first rank, to RUN/system/NODE.jsonl.

The lines are as in metrics.jsonl; a line's step is the number of the sample. The metrics have the names of MLflow's own
monitor, which MLflow's UI shows on a page of their own: system/cpu_utilization_percentage, or
system/NODE/cpu_utilization_percentage in a run on several machines. MLflow's monitor itself would take 4 s and 175 MB
on each node, would need a store that each node reaches, and would end when the store doesn't answer.
"""

import contextlib
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil
import pynvml

from pretrain.run.metrics_file import MetricLog, last_row

_SYSTEM = "system"
_MEGABYTE = 1e6

Sample = dict[str, float]


def files_of_machines(run_dir: Path) -> list[Path]:
    """The files with the metrics of each machine."""
    return sorted((run_dir / _SYSTEM).glob("*.jsonl"))


class SystemMonitor:
    """Samples this machine, named `node`, every `seconds` seconds until `close`. `alone`: the run has no other
    machine."""

    def __init__(self, run_dir: Path, attempt: int, node: str, alone: bool, seconds: float):
        name = re.sub(r"[^\w.\-]", "_", node).lstrip(".") or "node"
        self._log = MetricLog(run_dir, attempt, f"{_SYSTEM}/{name}.jsonl")
        self._prefix = "system/" if alone else f"system/{name}/"
        self._disk = run_dir  # a path on the disk to sample
        self._received, self._sent = _network()
        self._gpus = _gpus()
        psutil.cpu_percent()  # the first call has nothing to compare with
        last = last_row(self._log.path)
        self._step = last.step + 1 if last else 0
        self._seconds = seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)

    def _work(self) -> None:
        while not self._closing.wait(self._seconds):
            with contextlib.suppress(OSError):  # a network disk that doesn't answer; a full one gets the row later
                metrics = {f"{self._prefix}{name}": value for name, value in self._sample().items()}
                self._log.log(self._step, metrics)
            self._step += 1
        self._log.close()

    def _sample(self) -> Sample:
        """The CPU load since the last sample, the network traffic since the start, the rest at this moment."""
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._disk))
        received, sent = _network()
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / _MEGABYTE,
            "system_memory_usage_percentage": 100 * memory.used / memory.total,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / _MEGABYTE,
            "disk_available_megabytes": disk.free / _MEGABYTE,
            "network_receive_megabytes": (received - self._received) / _MEGABYTE,
            "network_transmit_megabytes": (sent - self._sent) / _MEGABYTE,
            **_gpu_metrics(self._gpus),
        }


def _network() -> tuple[int, int]:
    counters = psutil.net_io_counters()  # None on a machine without a network
    return (counters.bytes_recv, counters.bytes_sent) if counters else (0, 0)


def _gpus() -> list[object]:
    """NVML's handles of all GPUs of the machine; none without NVIDIA's driver."""
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _gpu_metrics(gpus: Iterable[object]) -> Sample:
    found: Sample = {}
    for number, gpu in enumerate(gpus):
        with contextlib.suppress(pynvml.NVMLError):  # a MIG instance has no utilization
            memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
            found[f"gpu_{number}_memory_usage_megabytes"] = memory.used / _MEGABYTE
            found[f"gpu_{number}_memory_usage_percentage"] = 100 * memory.used / memory.total
        with contextlib.suppress(pynvml.NVMLError):
            found[f"gpu_{number}_utilization_percentage"] = pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu
        with contextlib.suppress(pynvml.NVMLError):
            watts = pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000
            limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
            found[f"gpu_{number}_power_usage_watts"] = watts
            found[f"gpu_{number}_power_usage_percentage"] = 100 * watts / limit
    return found
