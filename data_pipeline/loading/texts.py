"""Joins the inputs and targets of prefix LM to whole texts again, which a decoder-only teacher reads."""

import torch
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import Batch

TEXTS = ("text_ids", "text_indices", "in_text")


def with_texts(batch: Batch) -> Batch:
    """The batch of prefix LM, which may be packed, with the texts that its inputs and targets are the parts of.

    - `text_ids` (texts, longest) int64: each text without its last token, after which nothing is predicted. It begins
      where the input begins, and its parts follow each other without the EOS tokens that prefix LM gave them.
    - `text_indices` (n,) int64: for each label that counts, in order, the index in the flattened `text_ids` of the
      token before it.
    - `in_text` (n,) bool: whether the label is a token of the text. An EOS token that prefix LM added isn't; it gets
      the index of the last token that is read.

        inputs   Thank you </s> your party </s>        text_ids      Thank you for inviting
        targets  for inviting me </s> is over </s>                   your party is ∅
        segments      1     1     1  1    2   2    2   text_indices   1 2 3 3 5 6 6
                                                       in_text       1 1 1 0 1 1 0

    Examples whose labels don't count have no text. They are pinned where the labels are.
    """
    ids, labels = batch["encoder_input_ids"], batch["labels"]
    inputs = batch.get("encoder_segment_ids", batch.get("encoder_attention_mask", torch.ones_like(ids)))
    counted = labels != IGNORE_INDEX
    targets = counted * batch.get("decoder_segment_ids", torch.ones_like(labels))
    segments = int(max(inputs.max(), targets.max())) + 1  # with 0, which is padding's
    of_inputs, of_targets = (_examples(part, segments) for part in (inputs, targets))
    position, target_position = (
        batch.get(f"{side}_positions", torch.arange(part.size(1), device=ids.device).expand_as(part))
        for side, part in (("encoder", inputs), ("decoder", targets))
    )
    # tokens of both parts of each example, without their EOS tokens
    before, after = (
        torch.bincount(part.flatten(), minlength=len(ids) * segments) - 1 for part in (of_inputs, of_targets)
    )
    has_text = after >= 0
    has_text[::segments] = False
    read = before + after - 1
    longest = max(1, int(read.where(has_text, 1).max()))
    starts = (has_text.cumsum(0) - 1) * longest

    texts = ids.new_zeros(max(1, int(has_text.sum())) * longest)
    kept = (inputs > 0) & has_text[of_inputs] & (position < before[of_inputs])
    texts[(starts[of_inputs] + position)[kept]] = ids[kept]
    at = before[of_targets] + target_position  # in the text
    kept = counted & (at < read[of_targets])
    texts[(starts[of_targets] + at)[kept]] = labels[kept]

    indices = starts[of_targets] + torch.minimum(at, read[of_targets]) - 1
    found = {
        "text_ids": texts.view(-1, longest),
        "text_indices": indices[counted],
        "in_text": (target_position < after[of_targets])[counted],
    }
    return {**batch, **{name: one.pin_memory() if labels.is_pinned() else one for name, one in found.items()}}


def without_texts(batch: Batch) -> Batch:
    """The batch as it was before `with_texts`."""
    return {name: tensor for name, tensor in batch.items() if name not in TEXTS}


def _examples(segments: Tensor, count: int) -> Tensor:
    """A number for each example of each row (rows, width), of which a row has up to `count`."""
    rows = torch.arange(len(segments), device=segments.device)
    return rows[:, None] * count + segments
