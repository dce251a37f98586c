"""Run files that ask for what the machine can't do."""

from pathlib import Path

import torch

from data_pipeline.foundation.config_file import load
from pretrain.config import RunConfig
from pretrain.trainer import device_problems as module
from pretrain.trainer.device_problems import device_problems
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


QUANTIZED = {"zero_quantized_weights": True}
KEY = "deepspeed.zero_optimization.zero_quantized_weights"


def test_quantized_weights_are_refused_without_a_gpu_or_a_compiler_for_it(monkeypatch, tmp_path):
    quantized = run_config(3, zero=QUANTIZED)
    monkeypatch.setattr(module, "count_gpus", lambda: 0)
    assert device_problems(quantized) == [f"{KEY}: DeepSpeed's quantizer needs a GPU"]
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = device_problems(quantized)
    assert line.startswith(f"{KEY}: DeepSpeed compiles its quantizer at the start, but there is no nvcc")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert device_problems(quantized) == []


def test_no_shipped_run_needs_nvcc(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    for name, answer in (("is_available", True), ("is_bf16_supported", True)):
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer, **options: answer)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    runs = list((Path(__file__).parents[2] / "configs/runs").glob("*.yaml"))
    assert runs
    assert [device_problems(load(path, [], RunConfig)) for path in runs] == [[]] * len(runs)


def test_gpus_that_pytorch_cannot_use_are_named(monkeypatch):
    """A run would otherwise train on the CPU, as many ranks as there are GPUs, and not say so."""
    monkeypatch.setattr(module, "count_gpus", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = device_problems(run_config())
    assert line.startswith(f"this machine has GPUs, but PyTorch {torch.__version__} can't use them; it was built ")
