"""Run files that ask for what the machine can't do."""

import torch

from pretrain import device_problems as module
from pretrain.device_problems import device_problems
from tests.pretrain.small_runs import run_config


def test_bf16_is_refused_on_a_device_without_it(monkeypatch):
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    assert device_problems(run_config(precision="bf16")) == ["precision: Tesla V100 has no bf16; set fp32"]
    assert device_problems(run_config(precision="fp32")) == []


def test_nvme_is_refused_where_files_cannot_be_read_asynchronously(monkeypatch):
    offload = {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}, "offload_optimizer": {"device": "cpu"}}
    monkeypatch.setattr(module, "_reads_asynchronously", lambda: False)
    (line,) = device_problems(run_config(3, zero=offload))
    assert line.startswith("deepspeed.zero_optimization.offload_param.device: nvme needs DeepSpeed's async_io")
    monkeypatch.setattr(module, "_reads_asynchronously", lambda: True)
    assert device_problems(run_config(3, zero=offload)) == []


def test_quantized_weights_are_refused_without_a_gpu(monkeypatch):
    quantized = run_config(3, zero={"zero_quantized_weights": True})
    monkeypatch.setattr(module, "count_gpus", lambda: 0)
    expected = "deepspeed.zero_optimization.zero_quantized_weights: DeepSpeed's quantizer needs a GPU"
    assert device_problems(quantized) == [expected]
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    assert device_problems(quantized) == []
