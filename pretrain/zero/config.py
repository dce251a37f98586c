"""What DeepSpeed is told: the run file's `deepspeed` section with all that the rest of the run file decides."""

import logging
import warnings
from typing import Any

from data_pipeline.loading.cut import Cut
from pretrain.config import RunConfig


def deepspeed_config(config: RunConfig, cut: Cut) -> dict[str, Any]:
    """The config of `deepspeed.initialize`.

    DeepSpeed believes in one micro-batch a step: the engine itself says which is a step's last, since a ramp-up makes
    their number vary.
    """
    decided: dict[str, Any] = {
        "train_batch_size": cut.ranks * cut.micro_batch,
        "train_micro_batch_size_per_gpu": cut.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # optimizers here step on the CPU too
        "communication_data_type": "fp32",  # unset, bf16 gradients would be reduced in bf16
        "steps_per_print": 2**62,
    }
    if config.precision == "bf16":
        decided["bf16"] = {"enabled": True}
        decided["data_types"] = {
            "grad_accum_dtype": "fp32",  # unset, they would be accumulated in bf16
            "keep_in_fp32_modules": ["*"],  # all buffers; unset, stage 3 alone would have them in bf16
        }
    return {**config.deepspeed, **decided}


def quiet_deepspeed() -> None:
    """Leaves DeepSpeed's warnings and errors, not its narration."""
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
