"""DeepSpeed's config: the run file's `deepspeed` section, plus what the rest of the run file determines."""

from typing import Any

from pretrain.config import RunConfig
from pretrain.config.batch import BatchPlan
from pretrain.config.deepspeed_keys import zero_defaults
from pretrain.zero.deepspeed_private import deepspeed


def stage_on(config: RunConfig, ranks: int) -> int:
    """ZeRO's stage on `ranks` ranks. One rank has nothing to shard: unless it offloads, stage 3 is stage 2 there."""
    zero = config.deepspeed.zero_optimization
    offloads = zero.offloaded_to("cpu") or zero.offloaded_to("nvme")
    return min(zero.stage, 2) if ranks == 1 and not offloads else zero.stage


def deepspeed_config(config: RunConfig, ranks: int) -> dict[str, Any]:
    """The config for `deepspeed.initialize` on `ranks` ranks.

    It declares one micro-batch per step. The engine itself marks the last micro-batch of a step, since their number
    varies during a batch-size ramp-up.
    """
    rows = BatchPlan(config.batch, ranks).micro_batch
    decided: dict[str, Any] = {
        "train_batch_size": ranks * rows,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # optimizers here step on the CPU too
        "communication_data_type": "fp32",  # unset, bf16 gradients would be reduced in bf16
        "steps_per_print": 2**62,
    }
    if config.precision == "bf16":
        decided["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,  # without it, a step whose gradient isn't finite would be applied
            "immediate_grad_update": True,  # a gradient goes to the fp32 ones while it is in the cache, and is freed
        }
        decided["data_types"] = {
            "grad_accum_dtype": "fp32",  # unset, they would be accumulated in bf16
            "keep_in_fp32_modules": ["*"],  # all buffers; unset, only stage 3 would cast them to bf16
        }
    given = config.deepspeed.model_dump()
    given["timers"] = given.get("timers") or {"throughput": {"enabled": False}}  # it would wait for the GPU twice
    stage = stage_on(config, ranks)
    defaults = zero_defaults(stage, deepspeed.accelerator.get_accelerator().device_name())
    if ranks == 1 and stage < 3:  # nothing is reduced, but DeepSpeed would wait for the GPU after each backward pass
        defaults.pop("overlap_comm", None)
    given["zero_optimization"] = {
        **defaults,
        **given["zero_optimization"],
        "stage": stage,
    }
    return {**given, **decided}
