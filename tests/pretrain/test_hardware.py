"""Which GPUs count, compared with PyTorch's own reading of CUDA_VISIBLE_DEVICES."""

from itertools import takewhile

import pytest
import torch

from pretrain.run.hardware import count_gpus


@pytest.mark.parametrize(
    "chosen",
    ["", "-1", "0", "0,1", "1,0", "2", "0,2,1", "0,-1,1", "0,,1", " 0, 1", "0,0", "none", "0,GPU-1f", "NoDevFiles"],
)
def test_indices_choose_gpus_as_cuda_and_pytorch_read_them(chosen, tmp_path, monkeypatch):
    """The machine has two GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    expected = list(takewhile(lambda index: index < 2, torch.cuda._parse_visible_devices()))
    assert count_gpus(tmp_path) == len(expected)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, 2),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("GPU-8932f937,GPU-1a2b3c4d", 2),
        ("GPU-8932f937,GPU-8932f937", 0),
        ("GPU-8932f937,1", 1),
        ("MIG-GPU-8932f937/1/0,MIG-GPU-8932f937/2/0", 1),  # a process sees one instance
    ],
)
def test_uuids_choose_gpus(chosen, expected, tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert count_gpus(tmp_path) == expected


def test_a_machine_without_gpus_has_none_whatever_is_chosen(tmp_path, monkeypatch):
    for chosen in ("0", "GPU-8932f937", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert count_gpus(tmp_path) == 0
