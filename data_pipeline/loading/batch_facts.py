"""What is counted of a batch on the host, ahead of its step: on a GPU each count would take some launches."""

import torch
from torch import Tensor

from data_pipeline.loading.batch_layout import IGNORE_INDEX, LABELS

Batch = dict[str, Tensor]


def label_counts(batch: Batch) -> Tensor:
    """(labels,) int64: how many labels of each kind count in a batch, in the order of LABELS."""
    none = batch["labels"].new_zeros(())
    return torch.stack([(batch[name] != IGNORE_INDEX).sum() if name in batch else none for name in LABELS])


def example_sizes(batch: Batch) -> Tensor:
    """(6,) int64: examples, their input and target tokens, and the pairs of two inputs, two targets, and one of each.

    The pairs are sums of squares and products of the examples' lengths, which attention takes time for.
    """
    ids, labels = batch["encoder_input_ids"], batch["labels"]
    inputs = batch.get("encoder_segment_ids", batch.get("encoder_attention_mask", torch.ones_like(ids)))
    targets = (labels != IGNORE_INDEX) * batch.get("decoder_segment_ids", 1)
    most = max(ids.size(1), labels.size(1))
    input_lengths, target_lengths = _lengths(inputs, most), _lengths(targets, most)
    pairs = (input_lengths**2, target_lengths**2, input_lengths * target_lengths)
    return torch.stack([counts.sum() for counts in (input_lengths > 0, input_lengths, target_lengths, *pairs)])


def _lengths(segments: Tensor, most: int) -> Tensor:
    """(rows, most): tokens of each example of a row, [[1, 1, 1, 2, 2, 0]] -> [[3, 2, 0, …]]."""
    counts = segments.new_zeros(segments.size(0), most + 1)
    return counts.scatter_add_(1, segments, torch.ones_like(segments))[:, 1:]


FACTS = {"label_counts": label_counts, "example_sizes": example_sizes}
"""By the names under which batches on a GPU have them; no model reads these."""


def with_facts(batch: Batch) -> Batch:
    """The batch with its facts, pinned where its labels are."""
    pinned = batch["labels"].is_pinned()
    facts = {name: count(batch) for name, count in FACTS.items()}
    return {**batch, **{name: fact.pin_memory() if pinned else fact for name, fact in facts.items()}}


def fact(name: str, batch: Batch) -> Tensor:
    """A fact of a batch that has it, or of which it is counted now."""
    return batch[name] if name in batch else FACTS[name](batch)


def without_facts(batch: Batch) -> Batch:
    """What a model reads of a batch."""
    return {name: tensor for name, tensor in batch.items() if name not in FACTS}
