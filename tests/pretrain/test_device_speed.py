"""The peaks of known GPUs, compared with data sheets."""

from pretrain.device_speed import GPUS, gpu_of_device
from tests.support.tables import each

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
