"""How fast a run is: tokens per second and model FLOPs utilisation (MFU).

MFU is the arithmetic a step needs (forward and backward, no recomputation) over what the devices could do in that
time. The peak is the vendor's dense figure for known GPUs, and the best of a few matrix products elsewhere.
"""

import time

import torch

from pretrain.models.model import Model
from pretrain.setup import Setup

# dense bf16 and TF32 tensor-core peaks, FLOP/s, from NVIDIA's data sheets
_PEAKS = {
    "A100": {"bf16": 312e12, "fp32": 156e12},
    "H100": {"bf16": 989e12, "fp32": 494e12},
    "H200": {"bf16": 989e12, "fp32": 494e12},
    "L40S": {"bf16": 362e12, "fp32": 183e12},
    "V100": {"bf16": 15.7e12, "fp32": 15.7e12},
}


def peak_flops(precision: str) -> float:
    """FLOP/s that one rank's device could do."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        for known, peaks in _PEAKS.items():
            if known in name:
                return peaks[precision]
    return _measured_peak(torch.bfloat16 if precision == "bf16" else torch.float32)


def _measured_peak(dtype: torch.dtype, size: int = 1024, repetitions: int = 10) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repetitions):
        started = time.perf_counter()
        float((left @ left)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


class Meter:
    """Times the steps between two logs. `peak`: FLOP/s of all devices together."""

    def __init__(self, tokens_per_row: int, flops_per_row: float, peak: float):
        self._tokens, self._flops, self._peak = tokens_per_row, flops_per_row, peak
        self.restart()

    @classmethod
    def of(cls, setup: Setup, model: Model) -> "Meter":
        """For a run's whole batches; `model` before its parameters are sharded."""
        config = setup.config
        objective = config.data.objective or setup.training[0].objective
        lengths = objective.shape
        return cls(sum(lengths), model.flops(*lengths), peak_flops(config.precision) * setup.cut.ranks)

    def restart(self) -> None:
        """Begins a stretch of steps; what came before it, an evaluation or a save, doesn't count."""
        self._started = time.perf_counter()
        self._steps = self._rows = 0
        self._waited = 0.0

    def step(self, waited: float, rows: int) -> None:
        """Counts a step of so many rows that waited `waited` seconds for its data."""
        self._steps += 1
        self._rows += rows
        self._waited += waited

    def take(self) -> dict[str, float]:
        """Metrics since the last restart, which this is again."""
        seconds = time.perf_counter() - self._started
        metrics = {
            "train/tokens_per_second": self._rows * self._tokens / seconds,
            "train/steps_per_second": self._steps / seconds,
            "train/mfu": self._rows * self._flops / seconds / self._peak,
            "train/data_wait_fraction": self._waited / seconds,
        }
        self.restart()
        return metrics
