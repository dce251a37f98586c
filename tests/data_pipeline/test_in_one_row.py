"""Inputs and targets of another objective in one row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import as_batch
from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.in_one_row import InOneRow
from data_pipeline.objectives.objective import together
from data_pipeline.objectives.prefix_lm import PrefixLM
from data_pipeline.packing.examples import balanced
from tests.data_pipeline.example_rows import VOCABULARY, as_lists, make_rows, ragged_rows


@settings(max_examples=40)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=8), st.integers(0, 2**40))
def test_it_is_the_inputs_and_then_the_targets_which_alone_have_a_loss(lengths, seed):
    rows, keys = ragged_rows(lengths, seed)
    inner = PrefixLM(length=40)
    apart = inner.apply(rows, keys, VOCABULARY, {})
    joined = InOneRow(of=inner).apply(rows, keys, VOCABULARY, {})
    batch = as_batch(joined, VOCABULARY.pad)
    sides = zip(as_lists(apart.inputs), as_lists(apart.targets), strict=True)
    for number, (first, second) in enumerate(sides):
        length = len(first) + len(second) - 1
        assert batch["encoder_input_ids"][number, :length].tolist() == [*first, *second][:-1]
        assert batch["labels"][number, len(first) - 1 : length].tolist() == second
        scored = (batch["labels"][number] != IGNORE_INDEX).nonzero().flatten().tolist()
        assert scored == [*range(len(first) - 1, length)]
        assert batch["prefix_mask"][number].nonzero().flatten().tolist() == [*range(len(first))]
        if "encoder_attention_mask" in batch:
            assert batch["encoder_attention_mask"][number].sum() == length


def test_examples_with_a_prefix_stand_beside_those_without():
    rows, keys = make_rows(4, 20)
    joined = InOneRow(of=PrefixLM(length=20)).apply(rows, keys, VOCABULARY, {})
    plain = CausalLM(length=19).apply(rows, keys, VOCABULARY, {})
    both = together([(np.array([0, 2, 4, 6]), joined), (np.array([1, 3, 5, 7]), plain)], VOCABULARY.pad)
    assert not both.prefix_mask[1::2].any()
    width = joined.prefix_mask.shape[1]
    assert (both.prefix_mask[::2, :width] == joined.prefix_mask).all()
    assert (both.predicted[1::2].sum(axis=1) == 19).all()
    assert (both.predicted[::2].sum(axis=1) == joined.predicted.sum(axis=1)).all()


def test_packed_rows_keep_each_examples_prefix():
    rows, keys = ragged_rows([20, 6, 9, 14, 20, 3])
    examples = InOneRow(of=PrefixLM(length=20)).apply(rows, keys, VOCABULARY, {})
    packed = balanced(examples, 3)
    assert packed.prefix_mask.sum() == examples.prefix_mask.sum()
    assert packed.predicted.sum() == examples.predicted.sum()
    for row, segments in zip(packed.prefix_mask, packed.input_segments, strict=True):
        for segment in set(segments.tolist()) - {0}:
            own = row[segments == segment]
            assert own[0] == 1
            assert (np.diff(own.astype(int)) <= 0).all()  # a prefix of the example
