"""Passes before the first step, which leave the weights as they are: to measure memory and time."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import LABELS, Batch, TrainingBatches
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.deepspeed_private import keeping_counters
from pretrain.zero.engine import Engine


def discarded_pass(engine: Engine, batch: Batch) -> None:
    """Runs a step whose gradient isn't finite, so that DeepSpeed discards it; then resets DeepSpeed's counters."""
    deepspeed = engine.deepspeed
    with keeping_counters(deepspeed):
        deepspeed.set_gradient_accumulation_boundary(True)
        losses = engine.training_losses(batch)
        loss = torch.stack([values.sum() for values in losses.values() if values.requires_grad]).sum()
        deepspeed.backward(loss * float("nan"), scale_wrt_gas=False)
        deepspeed.step()


def full_rows(run: ValidatedRun, count: int) -> Batch:
    """`count` rows of the run, padded to the greatest width that their objective allows."""
    inputs, targets = run.lengths
    batch = TrainingBatches(run.stream, replace(run.plan, measured=count).layout)[0].batch
    ids = batch["encoder_input_ids"]
    batch.setdefault("encoder_attention_mask", torch.ones_like(ids))
    return {name: _widened(name, tensor, inputs, targets) for name, tensor in batch.items()}


def _widened(name: str, tensor: torch.Tensor, inputs: int, targets: int) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    width = targets if name in LABELS or name.startswith("decoder") else inputs
    return F.pad(tensor, (0, max(0, width - tensor.size(1))), value=IGNORE_INDEX if name in LABELS else 0)
