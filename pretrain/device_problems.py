"""What a run file asks of this machine that it can't do."""

import torch

from pretrain.config import RunConfig
from pretrain.deepspeed_keys import offloads_to


def device_problems(config: RunConfig) -> list[str]:
    """A line for each key."""
    problems = []
    if config.precision == "bf16" and torch.cuda.is_available() and not _computes_in_bf16():
        problems.append(f"precision: {torch.cuda.get_device_name()} has no bf16; take fp32")
    if (on_nvme := offloads_to(config.deepspeed, "nvme")) and not _reads_asynchronously():
        problems += [
            f"deepspeed.{key}.device: nvme needs DeepSpeed's async_io, which can't be built here: "
            "install libaio's headers (libaio-dev) and a C++ compiler, or take cpu"
            for key in on_nvme
        ]
    return problems


def _computes_in_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _reads_asynchronously() -> bool:
    """Whether DeepSpeed's extension for files can be built, or has been."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible(verbose=False)
