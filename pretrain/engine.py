"""The DeepSpeed engine: its config, and one optimizer step over a global batch.

The loss of a step is the mean over the valid target tokens of the whole global batch, however that is cut: DeepSpeed
averages gradients over ranks, so each micro-batch contributes its sum of losses × ranks ÷ all valid tokens.
"""

import hashlib
import logging
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from data_pipeline.loading.batches import IGNORED, LABELS, Batch
from data_pipeline.loading.cut import Cut
from pretrain.config import RunConfig
from pretrain.optimizers.adamw import adamw
from pretrain.optimizers.schedules import learning_rate


def deepspeed_config(config: RunConfig, cut: Cut) -> dict[str, Any]:
    """The run file's `deepspeed` section with all that the rest of the run file decides."""
    decided: dict[str, Any] = {
        "train_batch_size": cut.global_batch,
        "train_micro_batch_size_per_gpu": cut.micro_batch,
        "gradient_accumulation_steps": cut.accumulation,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",  # unset, bf16 gradients would be reduced in bf16
        "steps_per_print": 2**62,
    }
    if config.precision == "bf16":
        decided["bf16"] = {"enabled": True}
        decided["data_types"] = {"grad_accum_dtype": "fp32"}  # unset, they would be accumulated in bf16
    return {**config.deepspeed, **decided}


def quiet_deepspeed() -> None:
    """Leaves DeepSpeed's warnings and errors, not its narration."""
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


class Engine:
    """A model under DeepSpeed. `step` trains on one global batch; `evaluate` gives losses without gradients."""

    def __init__(self, model: nn.Module, config: RunConfig, cut: Cut):
        self.config, self.cut = config, cut
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(model, config.optimizer),
            config=deepspeed_config(config, cut),
        )
        self.device = self.deepspeed.device
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._targets = 0

    def step(self, step: int, batches: list[Batch], stop: bool) -> bool:
        """Trains on this rank's micro-batches of `step`; returns whether any rank asks to `stop`.

        Dropout is keyed by (seed, step, rank), so that a resumed run draws the same.
        """
        counts = torch.stack([_counts(batch) for batch in batches]).sum(dim=0).to(self.device)
        agreed = torch.cat([counts, counts.new_tensor([int(stop)])])
        dist.all_reduce(agreed)
        *totals, asked = agreed.tolist()
        counted = dict(zip(LABELS, totals, strict=True))
        targets, zero = counted["labels"], torch.zeros((), device=self.device)
        torch.manual_seed(_dropout_seed(self.config.run.seed, step, self.cut.rank))
        for batch in batches:
            losses = self.deepspeed(**self._to_device(batch))
            share = sum((values.sum() / max(counted.get(name, targets), 1) for name, values in losses.items()), zero)
            self._loss += share.detach().double() * targets
            self.deepspeed.backward(share * self.cut.ranks, scale_wrt_gas=False)
            rate = learning_rate(self.config, step)
            for group in self.deepspeed.optimizer.param_groups:
                group["lr"] = rate
            self.deepspeed.step()
        self._targets += targets
        return asked > 0

    @torch.no_grad()
    def losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The model's losses, fp32, without dropout; all ranks must call it together."""
        self.deepspeed.eval()
        try:
            return self.deepspeed(**self._to_device(batch))
        finally:
            self.deepspeed.train()

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call, over all ranks, which must call it together.

        train/loss: mean per target token, nats. train/gradient_norm: L2 norm of the last step's gradient before
        clipping, infinite if that step was skipped. train/skipped_steps: steps not taken for a gradient that isn't
        finite, since the start of this process.
        """
        total = self._loss.clone()
        dist.all_reduce(total)
        metrics = {
            "train/loss": float(total) / max(self._targets, 1),
            "train/learning_rate": float(self.deepspeed.optimizer.param_groups[0]["lr"]),
            "train/gradient_norm": float(self.deepspeed.get_global_grad_norm()),
            "train/skipped_steps": float(self.deepspeed.skipped_steps),
        }
        self._loss.zero_()
        self._targets = 0
        return metrics

    def close(self) -> None:
        """Ends DeepSpeed's threads and hooks, once all ranks are through."""
        dist.barrier()
        self.deepspeed.destroy()

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


def _counts(batch: Batch) -> torch.Tensor:
    """(labels,) of each kind that count in a micro-batch."""
    return torch.stack([(batch[name] != IGNORED).sum() if name in batch else torch.tensor(0) for name in LABELS])


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/dropout/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
