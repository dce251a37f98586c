"""Checks whether this machine can do what a run file asks for."""

from pretrain.config import RunConfig
from pretrain.deepspeed_keys import offloads_to
from pretrain.run.hardware import count_gpus


def device_problems(config: RunConfig) -> list[str]:
    """What this machine can't do, one line for each key."""
    problems = []
    deepspeed = config.deepspeed.model_dump()
    if config.precision == "bf16" and count_gpus() and (gpu := _gpu_without_bf16()):
        problems.append(f"precision: {gpu} has no bf16; set fp32")
    if (on_nvme := offloads_to(deepspeed, "nvme")) and not _reads_asynchronously():
        problems += [
            f"deepspeed.{key}.device: nvme needs DeepSpeed's async_io, which can't be built here: "
            "install libaio's headers (libaio-dev) and a C++ compiler, or set cpu"
            for key in on_nvme
        ]
    if deepspeed["zero_optimization"].get("zero_quantized_weights") and not count_gpus():
        problems.append("deepspeed.zero_optimization.zero_quantized_weights: DeepSpeed's quantizer needs a GPU")
    return problems


def _gpu_without_bf16() -> str | None:
    import torch  # takes seconds, so the launcher imports it only if there is a GPU

    without = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cuda.get_device_name() if without else None


def _reads_asynchronously() -> bool:
    """Whether DeepSpeed's async_io extension is built or can be built."""
    from pretrain.zero.internals import deepspeed

    return deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False)
