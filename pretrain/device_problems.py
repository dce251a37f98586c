"""What a run file asks of this machine that it can't do."""

from pretrain.config import RunConfig
from pretrain.deepspeed_keys import offloads_to
from pretrain.run.hardware import count_gpus


def device_problems(config: RunConfig) -> list[str]:
    """A line for each key."""
    problems = []
    if config.precision == "bf16" and count_gpus() and (gpu := _gpu_without_bf16()):
        problems.append(f"precision: {gpu} has no bf16; take fp32")
    if (on_nvme := offloads_to(config.deepspeed, "nvme")) and not _reads_asynchronously():
        problems += [
            f"deepspeed.{key}.device: nvme needs DeepSpeed's async_io, which can't be built here: "
            "install libaio's headers (libaio-dev) and a C++ compiler, or take cpu"
            for key in on_nvme
        ]
    if config.deepspeed.get("zero_optimization", {}).get("zero_quantized_weights") and not count_gpus():
        problems.append("deepspeed.zero_optimization.zero_quantized_weights: DeepSpeed's quantizer needs a GPU")
    return problems


def _gpu_without_bf16() -> str | None:
    import torch  # seconds, which the launcher spends only where there is a GPU to ask

    without = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cuda.get_device_name() if without else None


def _reads_asynchronously() -> bool:
    """Whether DeepSpeed's extension for files can be built, or has been."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible(verbose=False)
