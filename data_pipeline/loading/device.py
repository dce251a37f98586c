"""Copies each step's batches to the accelerator on a separate stream while the previous step computes."""

from collections.abc import Iterable, Iterator

import torch

from data_pipeline.loading.batch_layout import IGNORE_INDEX

Batches = list[dict[str, torch.Tensor]]


def on_device(steps: Iterable[Batches], device: torch.device) -> Iterator[Batches]:
    """The same batches on `device`. On CUDA the next step's batches are copied from pinned memory during this step.

    There they also have `target_indices` (n,): the numbers of the labels that count, among all labels. A model that
    counted them itself would wait for the device.
    """
    if device.type != "cuda":
        yield from steps
        return
    stream = torch.cuda.Stream(device)
    ahead: Batches | None = None
    for step in steps:
        with torch.cuda.stream(stream):
            copied = [
                {name: tensor.to(device, non_blocking=True) for name, tensor in with_target_indices(batch).items()}
                for batch in step
            ]
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream(device).wait_stream(stream)
        for tensor in (tensor for batch in copied for tensor in batch.values()):
            tensor.record_stream(torch.cuda.current_stream(device))
        ahead = copied
    if ahead is not None:
        yield ahead


def with_target_indices(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with its `target_indices`, pinned where its labels are."""
    labels = batch["labels"]
    indices = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    return {**batch, "target_indices": indices.pin_memory() if labels.is_pinned() else indices}
