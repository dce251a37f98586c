"""Passes before the first step, which leave the weights as they are: to measure memory and time, to compile kernels."""

import torch
import torch.nn.functional as F

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import LABELS, Batch, TrainingBatches
from pretrain.models.logit_bias import has_triton
from pretrain.run import watchdog
from pretrain.run.hardware import local_ranks, threads_per_rank
from pretrain.trainer.validate import ValidatedRun
from pretrain.zero.deepspeed_private import keeping_counters
from pretrain.zero.engine import Engine

_ROWS = 2  # of the passes that find out which kernels there are: these don't depend on the number of rows


def compile_kernels(run: ValidatedRun, engine: Engine) -> None:
    """Compiles, on a GPU, the kernels that the run's rows need: all at once, each rank its share.

    Otherwise the first steps would compile one kernel after the other. All ranks call this together.
    """
    if engine.device.type != "cuda" or not has_triton():
        return
    from pretrain.kernels.compilation import compile_requests, requests, watch  # imports Triton, which only GPUs need

    watch(watchdog.compiling)  # of those that only later rows or an evaluation need
    batches = batches_with_all_kernels(run)

    def launches() -> None:
        for batch in batches:
            discarded_pass(engine, batch)

    found = requests(launches)
    compile_requests(found[run.rank % local_ranks() :: local_ranks()], threads_per_rank(local_ranks()))


def batches_with_all_kernels(run: ValidatedRun) -> list[Batch]:
    """A micro-batch as the run has them; and where the size is still to be measured, a small one as that takes.

    Sizes are the run's own, since layers are compiled for the first ones that they see.
    """
    batch = run.config.batch
    auto = batch.micro_batch_size == "auto"
    rows = min(_ROWS, batch.share(run.ranks)) if auto else batch.micro_batch(run.ranks)
    own = TrainingBatches(run.stream, run.plan(rows).layout)[0].batch
    return [own, full_rows(run, rows)] if auto else [own]


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
    batch = TrainingBatches(run.stream, run.plan(count).layout)[0].batch
    ids = batch["encoder_input_ids"]
    batch.setdefault("encoder_attention_mask", torch.ones_like(ids))
    return {name: _widened(name, tensor, inputs, targets) for name, tensor in batch.items()}


def _widened(name: str, tensor: torch.Tensor, inputs: int, targets: int) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    width = targets if name in LABELS or name.startswith("decoder") else inputs
    return F.pad(tensor, (0, max(0, width - tensor.size(1))), value=IGNORE_INDEX if name in LABELS else 0)
