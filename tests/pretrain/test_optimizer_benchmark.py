"""benchmarks/optimizers.py runs to its end with every optimizer, on CPUs with arithmetic for bf16 too."""

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from pretrain import models

FOLDER = Path(__file__).parents[2] / "benchmarks"
T5 = {"family": "t5", "vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("optimizers")


def small_model(*_: str) -> nn.Module:
    torch.manual_seed(0)
    return models.build(models.parse({**T5, "num_encoder_layers": 1, "num_decoder_layers": 1}))


def test_every_optimizer_is_measured(benchmark, monkeypatch):
    harness = import_module("harness")
    monkeypatch.setattr(benchmark, "our_model", small_model)
    monkeypatch.setattr(harness, "MULTIPLIES_BF16", True)  # else Muon is left out
    options = harness.Options("cpu", (1,), ("fp32",), 0.0, argparse.Namespace())
    (table,) = benchmark.measure(options)
    assert [row[0] for row in table.rows] == list(benchmark.PEERS)


def test_a_step_on_flat_tensors_is_a_step_on_the_parameters(benchmark):
    from pretrain import optimizers
    from pretrain.config.optimizers import MuonConfig

    settings = MuonConfig(name="muon", learning_rate=0.1, newton_schulz_dtype="fp32")
    plain, flat = small_model(), small_model()
    for model in (plain, flat):
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = benchmark.gradient_like(parameter, generator)
    on_parameters = optimizers.build(plain, settings)
    on_flat_tensors = benchmark.flattened(optimizers.build(flat, settings))
    for optimizer in (on_parameters, on_flat_tensors):
        optimizer.step()
    for group, flat_group in zip(on_parameters.param_groups, on_flat_tensors.param_groups, strict=True):
        wanted = torch.cat([one.detach().flatten() for one in group["params"]])
        torch.testing.assert_close(flat_group["params"][0].detach(), wanted, rtol=1e-6, atol=1e-7)
