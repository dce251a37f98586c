"""Tokens per second and MFU: FLOPs compared with torch's count for a real model, peaks with data sheets."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pretrain.config.models import AnyModelConfig
from pretrain.models import build
from pretrain.models.flops import Sizes, count_flops
from pretrain.trainer import matmul_speed as products_module
from pretrain.trainer import throughput
from pretrain.trainer.matmul_speed import products, products_flops
from pretrain.trainer.throughput import ThroughputMeter, data_sheet_peak, measured_peak, sizes
from tests.pretrain.small_runs import run_config
from tests.slow import slow
from tests.tables import each

SIZE = {"d_model": 32, "num_heads": 4, "vocab_size": 48}
STACKS = {**SIZE, "num_encoder_layers": 2, "num_decoder_layers": 3}
WIDER = {"d_model": 32, "d_ff": 80, "num_heads": 4, "num_layers": 3}
NARROWER = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_key_value_heads": 2, "num_layers": 2}
FAMILIES = {
    "t5": {**STACKS, "d_kv": 16, "d_ff": 80},
    "bart": {**STACKS, "d_ff": 80},
    "vanilla": {**STACKS, "d_ff": 80},
    "t5gemma": {"vocab_size": 48, "encoder": {**WIDER, "d_model": 48}, "decoder": NARROWER},
    "modern": {"vocab_size": 48, "encoder": WIDER, "decoder": NARROWER},
    "t5gemma2": {**SIZE, "d_ff": 80, "num_layers": 2, "num_key_value_heads": 2},
    "autoregressive": {**STACKS, "max_positions": 64, "subtract_positions": "without_norm"},
    "decoder_only": {**SIZE, "d_ff": 80, "num_layers": 2, "max_positions": 64},
    "encoder_only": {**SIZE, "d_ff": 80, "num_layers": 2, "max_positions": 64, "next_sentence": True},
}
DECODERS_OF_TARGETS = ("t5", "bart", "vanilla", "t5gemma", "t5gemma2", "modern")


def model_of(family):
    config: AnyModelConfig = run_config(model={"family": family, **FAMILIES[family]}).model
    return build(config)


def row(family, inputs, targets):
    """One row with these numbers of tokens; if the targets are beside the inputs, as many of them are predicted."""
    generator = torch.Generator().manual_seed(inputs)
    batch = {"encoder_input_ids": torch.randint(3, 48, (1, inputs), generator=generator)}
    if family in DECODERS_OF_TARGETS:
        return {**batch, "labels": torch.randint(3, 48, (1, targets), generator=generator)}
    labels = torch.randint(3, 48, (1, inputs), generator=generator)
    if family == "encoder_only":
        labels[:, targets:] = -100
        batch["next_sentence_labels"] = torch.ones(1, dtype=torch.int64)
    return {**batch, "labels": labels}


def counted(model, batch):
    """Floating-point operations of matrix products, forward and backward, as torch dispatches them."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        sum(losses.sum() for losses in model(**batch).values()).backward()
    return counter.get_total_flops()


def padded(rows):
    """A batch of rows of different lengths, as the loader makes it."""
    widest = {name: max(one[name].size(-1) for one in rows) for name in ("encoder_input_ids", "labels")}
    batch = {
        name: torch.cat(
            [torch.nn.functional.pad(one[name], (0, width - one[name].size(1)), value=fill) for one in rows]
        )
        for (name, width), fill in zip(widest.items(), (0, -100), strict=True)
    }
    lengths = torch.tensor([one["encoder_input_ids"].size(1) for one in rows])
    batch["encoder_attention_mask"] = (torch.arange(widest["encoder_input_ids"]) < lengths[:, None]).long()
    if "next_sentence_labels" in rows[0]:
        batch["next_sentence_labels"] = torch.cat([one["next_sentence_labels"] for one in rows])
    return batch


def packed(rows):
    """One row of several examples, with two tokens of padding."""
    batch = {}
    for side, name, fill in (("encoder", "encoder_input_ids", 0), ("decoder", "labels", -100)):
        end = torch.tensor([[0, 0]])
        batch[name] = torch.cat([*(one[name] for one in rows), end + fill], dim=1)
        numbers = [torch.full_like(one[name], number) for number, one in enumerate(rows, 1)]
        batch[f"{side}_segment_ids"] = torch.cat([*numbers, end], dim=1)
    return batch


FIRST = ("t5gemma2", "autoregressive")  # of each way to count


@each("family", [*FIRST, *slow(*(family for family in FAMILIES if family not in FIRST))])
def test_flops_are_those_that_torch_counts(family):
    """Rows without padding, and padded and packed ones, for which torch counts each example by itself."""
    model = model_of(family)
    whole = row(family, 20, 12)
    assert count_flops(model, Sizes(*sizes(whole).tolist())) == counted(model, whole)
    rows = [whole, row(family, 9, 5), row(family, 14, 7)]
    alone = sum(counted(model, one) for one in rows)
    assert count_flops(model, Sizes(*sizes(padded(rows)).tolist())) == alone < counted(model, padded(rows))
    if family in DECODERS_OF_TARGETS:
        assert count_flops(model, Sizes(*sizes(packed(rows)).tolist())) == alone


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@each("family, tokens", [("t5", 20 + 9 + 12 + 5), ("decoder_only", 20 + 9)])
def test_the_meter_counts_real_tokens_once(one_rank, family, tokens):
    """Targets count too if a decoder reads them. Ratios of metrics don't depend on the clock."""
    model = model_of(family)
    batch = padded([row(family, 20, 12), row(family, 9, 5)])
    meter = ThroughputMeter(model, peak=1e9)
    for _ in range(3):
        meter.step(0.0, [batch, batch])
    metrics = meter.take()
    assert metrics["train/tokens_per_second"] / metrics["train/steps_per_second"] == pytest.approx(2 * tokens)
    flops = count_flops(model, Sizes(*sizes(batch).tolist()))
    assert metrics["train/mfu"] * 1e9 / metrics["train/steps_per_second"] == pytest.approx(2 * flops)


@each(
    "name, bf16, tf32, fp32",
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12, 51e12),
        ("NVIDIA H100 NVL", 835.5e12, 417.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 494.7e12, 66.9e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 156e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 183e12, 91.6e12),
        *((name, None, None, None) for name in ("NVIDIA H20", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA RTX 4090")),
    ],
)
def test_peaks_are_the_data_sheets_without_sparsity(name, bf16, tf32, fp32):
    """Other devices have none: they are measured."""
    found = [data_sheet_peak(name, arithmetic) for arithmetic in ("bf16", "tf32", "fp32")]
    assert found == pytest.approx([bf16, tf32, fp32])


@pytest.fixture
def readings(monkeypatch):
    """A clock of the module alone that advances a second at each reading; what it has shown."""
    shown = []

    def now():
        shown.append(float(len(shown)))
        return shown[-1]

    monkeypatch.setattr(products_module, "time", SimpleNamespace(perf_counter=now))
    return shown


@each("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_work_over_time(readings, dtype):
    """A product takes a second, so FLOP/s are the FLOPs that torch counts, of as many products as were timed."""
    readings.clear()
    before = torch.random.get_rng_state()
    with FlopCounterMode(display=False) as counter:
        peak = measured_peak(dtype, torch.device("cpu"))
    assert peak == pytest.approx(counter.get_total_flops() / (len(readings) / 2))  # two readings each
    assert torch.equal(torch.random.get_rng_state(), before)


@each("family", [*DECODERS_OF_TARGETS, "autoregressive", "decoder_only"])
def test_a_models_products_are_its_flops_without_pairs(family):
    """6 FLOPs for a weight and a token: three products of 2 each."""
    model, inputs, targets = model_of(family), 40, 24 if family in DECODERS_OF_TARGETS else 40
    shapes = products(model, inputs, targets).items()
    assert sum(6 * rows * width * out * count for (rows, width, out), count in shapes) == count_flops(
        model, Sizes(2, inputs, targets, 0, 0, 0)
    )


def test_the_rate_of_products_is_work_over_time(readings):
    """Each of the three products of a shape takes a second; with more rows than are timed, in proportion."""
    cpu = torch.device("cpu")
    shapes = products(model_of("t5"), 40, 24)
    work = sum(6 * rows * width * out * count for (rows, width, out), count in shapes.items())
    assert products_flops(shapes, torch.bfloat16, cpu) == pytest.approx(work / (3 * shapes.total()))
    shape = (4 * products_module._MOST_ROWS, 8, 16)
    rate = products_flops(Counter({shape: 5}), torch.float32, cpu)
    assert rate == pytest.approx(6 * shape[0] * 8 * 16 / (3 * 4))


ARITHMETICS = [("bf16", True, "bf16"), ("fp32", True, "tf32"), ("fp32", False, "fp32")]


@each("precision, tf32, arithmetic", ARITHMETICS)
def test_the_peak_is_that_of_the_runs_arithmetic(monkeypatch, precision, tf32, arithmetic):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    config = run_config(precision=precision, compute={"tf32": tf32})
    assert throughput.peak_flops(config, torch.device("cuda")) == data_sheet_peak("NVIDIA H100 PCIe", arithmetic)
