"""The DeepSpeed engine: one optimizer step over a global batch.

The loss of a step is the mean over the valid target tokens of the whole global batch, however that is cut: DeepSpeed
averages gradients over ranks, so each micro-batch contributes its sum of losses × ranks ÷ all valid tokens.
"""

import hashlib
from collections import Counter

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from data_pipeline.loading.batches import IGNORED, LABELS, Batch
from data_pipeline.loading.cut import Cut
from pretrain.config import RunConfig
from pretrain.construction import broadcast_buffers
from pretrain.deepspeed_config import deepspeed_config
from pretrain.optimizers.adamw import adamw
from pretrain.optimizers.schedules import learning_rate
from pretrain.stale_gradients import forget_gradients

_METRICS = {"labels": "loss", "next_sentence_labels": "next_sentence_loss"}  # others by the names of their losses


class Engine:
    """A model under DeepSpeed. `step` trains on one global batch; `evaluate` gives losses without gradients."""

    def __init__(self, model: nn.Module, config: RunConfig, cut: Cut):
        self.config, self.cut = config, cut
        self.deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(model, config.optimizer),
            config=deepspeed_config(config, cut),
        )
        broadcast_buffers(self.deepspeed.module)
        self.device = self.deepspeed.device
        self._sums: dict[str, torch.Tensor] = {}  # of this rank's losses since the last metrics, by name
        self._counts: Counter[str] = Counter()  # of what they are means over, on all ranks

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
        forget_gradients(self.deepspeed.optimizer)
        for number, batch in enumerate(batches):
            self.deepspeed.set_gradient_accumulation_boundary(number + 1 == len(batches))
            losses = {name: values.sum() for name, values in self.deepspeed(**self._to_device(batch)).items()}
            share = sum((total / max(counted.get(name, targets), 1) for name, total in losses.items()), zero)
            self.deepspeed.backward(share * self.cut.ranks, scale_wrt_gas=False)
            for name, total in losses.items():
                self._sums[name] = self._sums.get(name, 0) + total.detach().double()
            rate = learning_rate(self.config, step)
            for group in self.deepspeed.optimizer.param_groups:
                group["lr"] = rate
            self.deepspeed.step()
        self._counts.update({name: counted.get(name, targets) for name in losses})
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

        train/loss: mean per target token, nats. train/NAME_loss: what a family adds to it, as the gradient has it
        ("embedding_loss", "next_sentence_loss"). train/gradient_norm: L2 norm of the last step's gradient before
        clipping, infinite if that step was skipped. train/skipped_steps: steps not taken for a gradient that isn't
        finite, since the start of this process.
        """
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name] for name in names])
        dist.all_reduce(totals)
        means = {name: total / max(self._counts[name], 1) for name, total in zip(names, totals.tolist(), strict=True)}
        metrics = {
            **{f"train/{_METRICS.get(name, name)}": mean for name, mean in means.items()},
            "train/learning_rate": float(self.deepspeed.optimizer.param_groups[0]["lr"]),
            "train/gradient_norm": float(self.deepspeed.get_global_grad_norm()),
            "train/skipped_steps": float(self.deepspeed.skipped_steps),
        }
        self._sums.clear()
        self._counts.clear()
        return metrics

    def close(self) -> None:
        """Ends DeepSpeed's threads and hooks, once all ranks are through."""
        dist.barrier()
        self.deepspeed.destroy()

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}


def _counts(batch: Batch) -> torch.Tensor:
    """(labels,) of each kind that count in a micro-batch."""
    none = batch["labels"].new_zeros(())  # where the batch is, which may be the accelerator by now
    return torch.stack([(batch[name] != IGNORED).sum() if name in batch else none for name in LABELS])


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/dropout/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
