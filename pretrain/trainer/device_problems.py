"""Checks whether this machine can do what a run file asks for."""

import os
import shutil
from pathlib import Path

from data_pipeline.foundation.lazy_imports import imported_at_first_use
from pretrain.config import RunConfig
from pretrain.hardware.machine import count_gpus

with imported_at_first_use():  # PyTorch takes 2 s and 190 MB, DeepSpeed 3 s: the launcher does without where it can
    import torch

    from pretrain.zero import deepspeed_private


def device_problems(config: RunConfig) -> list[str]:
    """The settings that this machine can't fulfil, one line for each key."""
    problems = _gpu_problems(config) if count_gpus() else []
    if config.compute.attention == "triton" and not count_gpus():
        problems.append("compute.attention: triton needs a GPU; set auto")
    zero = config.deepspeed.zero_optimization
    if (on_nvme := zero.offloaded_to("nvme")) and not _reads_asynchronously():
        problems += [
            f"deepspeed.zero_optimization.{key}.device: nvme needs DeepSpeed's async_io, which can't be built here: "
            "install libaio's headers (libaio-dev) and a C++ compiler, or set cpu"
            for key in on_nvme
        ]
    if zero.zero_quantized_weights:
        key = "deepspeed.zero_optimization.zero_quantized_weights"
        if not count_gpus():
            problems.append(f"{key}: DeepSpeed's quantizer needs a GPU")
        elif not (_compiles_for_gpus() or _was_built("quantizer")):
            problems.append(
                f"{key}: DeepSpeed compiles its quantizer at the start, but there is no nvcc; install CUDA's toolkit "
                "and set CUDA_HOME, or set false"
            )
    return problems


def _gpu_problems(config: RunConfig) -> list[str]:
    if not torch.cuda.is_available():
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
        return [
            f"this machine has GPUs, but PyTorch {torch.__version__} can't use them; it {built} (nvidia-smi shows the "
            "driver's version); DS_ACCELERATOR=cpu in the environment trains on the CPU"
        ]
    if config.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return [f"precision: {torch.cuda.get_device_name()} has no bf16; set fp32"]
    return []


def _compiles_for_gpus() -> bool:
    """True if there is nvcc where PyTorch looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return Path(home, "bin/nvcc").exists() or shutil.which("nvcc") is not None


def _was_built(extension: str) -> bool:
    """True if DeepSpeed was installed with this extension."""
    return bool(deepspeed_private.deepspeed.git_version_info.installed_ops.get(extension))


def _reads_asynchronously() -> bool:
    """True if DeepSpeed's async_io extension is built or can be built."""
    return deepspeed_private.deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False)
