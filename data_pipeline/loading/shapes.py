"""Pads batches to few shapes: a new shape takes a new CUDA graph and a new plan of cuDNN, which take long to make."""

import torch
import torch.nn.functional as F

from data_pipeline.corpus.packing import width_of
from data_pipeline.loading.batch_layout import IGNORE_INDEX

Batch = dict[str, torch.Tensor]
_DIGITS = 4  # leading binary digits of a number of targets, which grows by an eighth at most


def in_few_widths(batch: Batch, longest: tuple[int, int], pad: int) -> Batch:
    """The batch with the widths of its inputs and targets rounded up to multiples of 64, up to the `longest` of each.

    The added columns are padding, as behind shorter rows: losses change only by rounding.
    """
    inputs, targets = batch["encoder_input_ids"].size(1), batch["labels"].size(1)
    to_inputs, to_targets = (
        max(width, min(width_of(width), most)) for width, most in zip((inputs, targets), longest, strict=True)
    )
    if to_inputs > inputs:
        batch = {"encoder_attention_mask": torch.ones_like(batch["encoder_input_ids"]), **batch}
    fill = {"encoder_input_ids": pad, "labels": IGNORE_INDEX}

    def widened(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            return tensor
        added = to_targets - targets if name == "labels" or name.startswith("decoder") else to_inputs - inputs
        return F.pad(tensor, (0, added), value=fill.get(name, 0)) if added else tensor

    return {name: widened(name, tensor) for name, tensor in batch.items()}


def in_few_numbers(indices: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Pads the `indices` (n,) of the labels that aren't ignored with the index of an ignored one, if there is one. The
    new number of indices is the next one whose binary digits are 0 after the first four.

    9 of 32 → 9        100 of 512 → 104        500 of 500 → 500
    """
    count = len(indices)
    unit = 1 << max(0, count.bit_length() - _DIGITS)
    added = min(-(-count // unit) * unit, labels.numel()) - count
    return F.pad(indices, (0, added), value=int((labels.flatten() != IGNORE_INDEX).int().argmin()))
