"""The steps that checks of speed take: of shipped runs, through the product's own engine and loader."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from checks.gpu.report import Report
from checks.gpu.runner import ROOT
from data_pipeline.base.config_file import load
from data_pipeline.loading.batches import Batch
from data_pipeline.loading.prefetch import on_device
from pretrain import models
from pretrain.config import RunConfig
from pretrain.device_speed import gpu_of_device
from pretrain.engine.sharding import Sharding
from pretrain.models.flops import Sizes, count_flops

BASE, LARGE = "t5-v1.1-base-c4", "t5-v1.1-large-c4"
WARM = 3  # steps before one is timed: PyTorch compiles, measures products and allocates
_SMALL = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}
_SMALL |= {"vocab_size": 256}


class Form(NamedTuple):
    """How layers are computed. `graph`: a micro-batch is a CUDA graph."""

    compiled: bool
    graph: bool


FORMS = {"eager": Form(False, False), "compiled": Form(True, False), "graph": Form(True, True)}


class Workload:
    """128 rows of 512 inputs and 114 targets of a shipped T5 v1.1, with its run's settings but AdamW, the optimizer of
    the peers; on a CPU 8 rows of 16 and 8, a tiny T5, and nothing compiled."""

    def __init__(self, report: Report, run: str = BASE):
        self.device, self._report = report.device, report
        if report.small:
            report.skip("compiled layers", "the compiler takes too long on a CPU: they are eager")
        self._path, self._weights = ROOT / f"configs/runs/{run}.yaml", dict[str, Tensor]()
        self.told: list[str] = []  # what the last engine warned of
        self.rows, self.inputs, self.targets = (8, 16, 8) if report.small else (128, 512, 114)

    @property
    def tokens(self) -> int:
        """Tokens of a step, as `train/tokens_per_second` counts them."""
        return self.rows * (self.inputs + self.targets)

    @property
    def flops(self) -> float:
        """FLOPs of a step, forward and backward."""
        one = Sizes.of_example(self.inputs, self.targets)
        meta_model = models.meta_model(self.config("eager", self.rows).model)
        return count_flops(meta_model, Sizes(*(self.rows * size for size in one)))

    def config(self, form: str, micro_batch: int, *changes: str) -> RunConfig:
        """The run file in a form of `FORMS`, with `changes` as on the command line."""
        compiled, graph = FORMS[form]
        settings = ["optimizer.name=adamw", "optimizer.learning_rate=1e-4", "optimizer.gradient_clipping=1.0"]
        settings += [f"batch.global_batch_size={self.rows}", f"batch.micro_batch_size={micro_batch}"]
        settings += [f"compute.compile={str(compiled and self._report.cuda).lower()}"]
        settings += [f"compute.cuda_graphs={str(graph).lower()}"]
        settings += [f"model.{name}={value}" for name, value in _SMALL.items()] if self._report.small else []
        return load(self._path, [*settings, *changes], RunConfig)

    def batches(self, micro_batch: int) -> list[Batch]:
        """The micro-batches of a step on the host, as the loader makes them."""
        generator = torch.Generator().manual_seed(0)

        def ids(width: int) -> Tensor:
            drawn = torch.randint(3, 100, (micro_batch, width), generator=generator)
            return drawn.pin_memory() if self._report.cuda else drawn

        return [
            {"encoder_input_ids": ids(self.inputs), "labels": ids(self.targets)}
            for _ in range(self.rows // micro_batch)
        ]

    @contextmanager
    def stepping(
        self, config: RunConfig, batches: list[Batch] | None = None
    ) -> Iterator[tuple[Any, Callable[[], float]]]:
        """An engine, and a function that takes its next step and returns its loss. The ranks must have joined.

        The weights are drawn for the first engine; later ones begin with the same. Each step's `batches` come to the
        device as in a run.
        """
        from pretrain.engine.construction import construct
        from pretrain.engine.engine import Engine

        free(self.device)
        sharding = Sharding.of(config, dist.get_world_size())
        model: Any = construct(config, config.model, sharding, skip_init=bool(self._weights))
        if self._weights:
            model.load_state_dict(self._weights)
        else:
            self._weights = {name: one.clone() for name, one in model.state_dict().items()}
        self.told = []
        engine: Any = Engine.initialize(model, config, sharding, warn=self.told.append)
        given = batches or self.batches(int(config.batch.micro_batch_size))
        steps: Any = on_device(repeat(given), self.device, engine.in_few_shapes)
        taken = 0

        def step() -> float:
            nonlocal taken
            row_offsets = [taken * self.rows + number * (self.rows // len(given)) for number in range(len(given))]
            outcome = engine.step(taken, row_offsets, next(steps))
            assert outcome.applied, f"step {taken} wasn't applied; its loss is {outcome.loss}"
            taken += 1
            return outcome.loss

        try:
            yield engine, step
        finally:
            engine.close()
            engine = model = steps = None  # `step` refers to them
            free(self.device)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(work: Callable[[], object], device: torch.device, at_least: float, warm: int = 1) -> float:
    """The median seconds of `work`, over `at_least` seconds and three calls, after `warm` calls that don't count."""
    for _ in range(warm):
        work()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < at_least:
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def wait(device: torch.device) -> None:
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


def measured_peak(report: Report) -> float:
    """FLOP/s of a large product, as a fact."""
    width = 256 if report.small else 8192
    found = product_rate(width, width, width, report.device, 0.05 if report.small else 0.3)
    report.fact("measured_tflops", found / 1e12)
    return found
