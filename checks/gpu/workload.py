"""The model, the batches and the engine that checks of speed and memory train."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import yaml

from checks.gpu.report import Json, Report
from checks.gpu.runner import ROOT
from data_pipeline.loading.batches import Batch
from pretrain.config import RunConfig
from pretrain.hardware import gpu_of_device
from pretrain.models.flops import Sizes, count_flops
from tests.pretrain.small_runs import T5, run_config

OPTIMIZERS: dict[str, Json] = {
    "adamw": {"learning_rate": 1e-4},
    "adamw_scale": {"learning_rate": 1e-3},
    "adafactor": {"learning_rate": 1e-3},
    "muon": {"learning_rate": 1e-4},
}


class Workload:
    """T5 v1.1 base with rows of 512 inputs and 114 targets in bf16; on a CPU a tiny T5 with 16 and 8."""

    def __init__(self, report: Report):
        self.device = report.device
        self.model: Json = dict(T5)
        self.rows, self.inputs, self.targets = 8, 16, 8
        if not report.small:
            self.model = yaml.safe_load((ROOT / "configs/models/t5-v1.1-base.yaml").read_text())["model"]
            self.rows, self.inputs, self.targets = 128, 512, 114

    @property
    def tokens(self) -> int:
        """Tokens of a step, as `train/tokens_per_second` counts them."""
        return self.rows * (self.inputs + self.targets)

    @property
    def flops(self) -> float:
        """FLOPs of a step, forward and backward."""
        from pretrain import models

        one = Sizes.of_example(self.inputs, self.targets)
        return count_flops(models.outline(self.config().model), Sizes(*(self.rows * size for size in one)))

    def config(self, optimizer: str = "adamw", compiled: bool = False, **changes: Any) -> RunConfig:
        settings = {"name": optimizer, "gradient_clipping": 1.0, **OPTIMIZERS[optimizer]}
        compute = {"compile": compiled}
        return run_config(1, self.model, optimizer=settings, precision="bf16", compute=compute, **changes)

    def batches(self, micro_batch: int) -> list[Batch]:
        """The micro-batches of a step, on the device."""
        generator = torch.Generator().manual_seed(0)

        def ids(width: int) -> torch.Tensor:
            return torch.randint(3, 100, (micro_batch, width), generator=generator).to(self.device)

        return [
            {"encoder_input_ids": ids(self.inputs), "labels": ids(self.targets)}
            for _ in range(self.rows // micro_batch)
        ]

    @contextmanager
    def stepping(self, micro_batch: int, config: RunConfig) -> Iterator[tuple[Any, Callable[[], None]]]:
        """An engine, and a function that takes its next step. The ranks must have joined."""
        from pretrain.zero.construction import construct
        from pretrain.zero.engine import Engine

        engine = Engine(construct(config, config.model), config)
        batches, taken = self.batches(micro_batch), 0

        def step() -> None:
            nonlocal taken
            outcome = engine.step(taken, taken * self.rows, batches)
            assert outcome.applied, f"step {taken} wasn't applied; its loss is {outcome.loss}"
            taken += 1

        try:
            yield engine, step
        finally:
            engine.close()
            engine = step = None  # type: ignore[assignment]
            free(self.device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(work: Callable[[], object], device: torch.device, at_least: float, most: int = 50) -> float:
    """The mean seconds of `work`, over `at_least` seconds and three calls, after one call that isn't counted."""
    work()
    _wait(device)
    started, calls = time.perf_counter(), 0
    while calls < 3 or (time.perf_counter() - started < at_least and calls < most):
        work()
        calls += 1
        _wait(device)
    return (time.perf_counter() - started) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def data_sheet_peak(device: torch.device) -> float | None:
    """FLOP/s in bf16 by the data sheet; None for a CPU and for an unknown GPU."""
    gpu = gpu_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return gpu and gpu.flops("bf16")


def product_rate(rows: int, inner: int, columns: int, device: torch.device, at_least: float) -> float:
    """FLOP/s of the product (rows, inner) · (inner, columns) in bf16, of random numbers: zeros are faster."""
    left, right = (torch.randn(shape, device=device).bfloat16() for shape in ((rows, inner), (inner, columns)))
    ten = 10 if device.type == "cuda" else 1

    def products() -> None:
        for _ in range(ten):
            left @ right

    return 2.0 * rows * inner * columns * ten / seconds_of(products, device, at_least)
