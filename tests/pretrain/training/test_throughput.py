"""Tokens per second and MFU: FLOPs compared with torch's count for a real model, peaks with data sheets."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.prefetch import example_sizes
from pretrain.config.batch import BatchPlan
from pretrain.device_speed import GPUS, gpu_of_device
from pretrain.models.flops import Sizes, count_flops
from pretrain.models.stacks import EncoderDecoder
from pretrain.run.world import World
from pretrain.training.callbacks import reporting
from pretrain.training.callbacks.reporting import measured_peak, peak_flops
from pretrain.training.throughput import rows_per_step
from tests.support.slow import slow
from tests.support.small_models import MODELS, ONE_OF_EACH_FAMILY, as_at_the_start, examples_of, packed
from tests.support.small_runs import run_config
from tests.support.tables import each


def rows(model, *lengths):
    """A batch of rows of these numbers of inputs and targets, padded as the loader does it."""
    batch = packed(examples_of(model, [[one] for one in lengths]), padding=0)
    batch = {name: tensor for name, tensor in batch.items() if not name.endswith(("segment_ids", "positions"))}
    if model.config.family == "encoder_only":
        batch["labels"][:, ::3] = IGNORE_INDEX
    return batch


def counted(model, batch):
    """Floating-point operations of matrix products, forward and backward, as torch dispatches them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sum(losses.sum() for losses in model(**batch).values()).backward()
    return counter.get_total_flops()


LENGTHS = [(20, 12), (9, 5), (14, 7)]
# the pairs of double_decoder: examples/double_decoder
NAMES = ["t5, in every layer", *(name for name in ONE_OF_EACH_FAMILY if name != "double_decoder")]
FIRST = ("t5gemma2", "autoregressive, plain", "t5, in every layer")  # of each way to count


@each("name", [*FIRST, *slow(*(name for name in NAMES if name not in FIRST))])
def test_flops_are_those_that_torch_counts(name):
    """Rows without padding, and padded and packed ones, for which torch counts each example by itself."""
    model = as_at_the_start(name, **({"sliding_window": 64} if "sliding_window" in MODELS[name] else {}))  # sees all
    alone = [counted(model, rows(model, one)) for one in LENGTHS]
    assert count_flops(model, Sizes(*example_sizes(rows(model, LENGTHS[0])).tolist())) == alone[0]
    padded = rows(model, *LENGTHS)
    assert count_flops(model, Sizes(*example_sizes(padded).tolist())) == sum(alone) < counted(model, padded)
    if isinstance(model, EncoderDecoder):
        together = packed(examples_of(model, [LENGTHS]))
        assert count_flops(model, Sizes(*example_sizes(together).tolist())) == sum(alone)


@each("name, tokens", [("t5", 20 + 9 + 12 + 5), ("decoder_only", 20 + 9)])
def test_the_meter_counts_real_tokens_once(one_rank, name, tokens):
    """Targets count too if a decoder reads them, and so do the steps before a pause. Ratios of metrics don't depend on
    the clock."""
    from pretrain.training.callbacks.reporting import Speed

    model = as_at_the_start(name)
    batch = rows(model, *LENGTHS[:2])
    speed, trainer = Speed(), SimpleNamespace(meta_model=model)
    trainer.config, trainer.run = run_config(), SimpleNamespace(world=World.on_this_node())
    trainer.engine = SimpleNamespace(device=torch.device("cpu"))

    def metrics_with(peak: float) -> dict[str, float]:
        speed._peak = peak
        speed.before_steps(trainer)
        for _ in range(3):
            speed.after_step(trainer, SimpleNamespace(waited=0.0, micro_batches=[batch, batch]))
            speed.after_pause(trainer)
        return speed.metrics(trainer)

    metrics = metrics_with(1e18)
    assert metrics["train/tokens_per_second"] / metrics["train/steps_per_second"] == pytest.approx(2 * tokens)
    flops = count_flops(model, Sizes(*example_sizes(batch).tolist()))
    assert metrics["train/mfu"] * 1e18 / metrics["train/steps_per_second"] == pytest.approx(2 * flops)
    assert 0 < metrics_with(1.0)["train/mfu"] <= 1  # a peak that was measured beside other programs is measured again


def test_the_rows_before_a_step_are_those_of_the_steps_before_it():
    """On 2 ranks, with 4 rows in a micro-batch: 1, 2 and 3 micro-batches a step."""
    ramp = [{"until_step": 2, "global_batch_size": 8}, {"until_step": 5, "global_batch_size": 16}]
    ramped = [1, 1, 2, 2, 2, 3, 3, 3, 3]
    for changes, counts in (({"ramp_up": ramp}, ramped), ({}, [3] * 9)):
        batch = run_config(batch={"global_batch_size": 24, "micro_batch_size": 4, **changes}).batch
        plan = BatchPlan(batch, ranks=2)
        assert [batch.rows_before(step) for step in range(10)] == [8 * sum(counts[:step]) for step in range(10)]
        for start in range(10):
            assert list(plan.accumulations(start, 9)) == counts[start:]
        assert list(plan.accumulations(1, 4)) == counts[1:4]


def test_the_rows_of_a_billion_steps_are_not_counted_one_by_one():
    """2 steps of 8 rows, 3 of 16, and all others of 24."""
    ramp = [{"until_step": 2, "global_batch_size": 8}, {"until_step": 5, "global_batch_size": 16}]
    long = {"name": "test", "directory": "run", "max_steps": 10**9}
    config = run_config(run=long, batch={"global_batch_size": 24, "ramp_up": ramp})
    assert rows_per_step(config) == (2 * 8 + 3 * 16 + (10**9 - 5) * 24) / 10**9


A100, HOPPER = [312, 156, 19.5], [989.4, 494.7, 66.9]


@each(
    "device, name, peaks",
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm", HOPPER),
        ("NVIDIA H100 PCIe", "h100-pcie", [756, 378, 51]),
        ("NVIDIA H100 NVL", "h100-nvl", [835.5, 417.5, 60]),
        ("NVIDIA H200", "h200", HOPPER),
        ("NVIDIA B200", "b200", [2250, 1100, 80]),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", A100),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", A100),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie", A100),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie", A100),
        ("NVIDIA L40S", "l40s", [362, 183, 91.6]),
        *((name, None, None) for name in ("NVIDIA H20", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX 4090")),
    ],
)
def test_peaks_are_the_data_sheets_without_sparsity(device, name, peaks):
    """In TFLOP/s, by the name that CUDA gives a device. Others have none: they are measured."""
    gpu = gpu_of_device(device)
    assert gpu == GPUS.get(name)
    assert gpu is None or [gpu.flops(arithmetic) / 1e12 for arithmetic in ("bf16", "tf32", "fp32")] == peaks


@each("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_work_over_time(monkeypatch, dtype):
    """By a clock that advances a second at each reading, twice a product, of all products that torch counts."""
    clock = itertools.count()
    monkeypatch.setattr(reporting, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    before = torch.random.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        peak = measured_peak(dtype, torch.device("cpu"))
    assert peak == pytest.approx(counter.get_total_flops() / (next(clock) / 2))
    assert torch.equal(torch.random.get_rng_state(), before)


@each("precision, tf32, arithmetic", [("bf16", True, "bf16"), ("fp32", True, "tf32"), ("fp32", False, "fp32")])
def test_the_peak_is_that_of_the_runs_arithmetic(monkeypatch, precision, tf32, arithmetic):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    config = run_config(precision=precision, compute={"tf32": tf32})
    assert peak_flops(config, torch.device("cuda")) == GPUS["h100-pcie"].flops(arithmetic)
