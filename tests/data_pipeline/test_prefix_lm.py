"""Prefix language modelling: where rows are split, how two examples share a row, and how one fills a row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import as_batch
from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.in_one_row import InOneRow
from data_pipeline.objectives.objective import Examples, Padded, together
from data_pipeline.objectives.prefix_lm import PrefixLM
from data_pipeline.packing.examples import balanced
from tests.data_pipeline.example_rows import EOS, PAD, VOCABULARY, as_lists, assert_alike, make_rows, ragged_rows
from tests.tables import each


def segments_of(side: Padded, segments: np.ndarray) -> list[list[list[int]]]:
    """For each row, the tokens of segment 1 and those of segment 2."""
    assert (segments[~side.filled] == 0).all()
    assert (segments[side.filled] > 0).all()
    return [
        [row[numbers == number].tolist() for number in (1, 2)]
        for row, numbers in zip(side.values, segments, strict=True)
    ]


@settings(max_examples=60)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(0, 2**40))
def test_packed_segments_give_back_both_examples(halves, seed):
    rows, keys = ragged_rows([2 * half for half in halves], seed)
    objective = PrefixLM(length=max(halves) + 2, packed=True)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert examples.inputs.lengths.tolist() == examples.targets.lengths.tolist() == [half + 2 for half in halves]
    inputs = segments_of(examples.inputs, examples.input_segments)
    targets = segments_of(examples.targets, examples.target_segments)
    for row, half, prefixes, rests in zip(as_lists(rows), halves, inputs, targets, strict=True):
        for example, prefix, rest in zip((row[:half], row[half:]), prefixes, rests, strict=True):
            assert [*prefix[:-1], *rest[:-1]] == example
            assert prefix[-1] == rest[-1] == EOS
            assert min(len(prefix), len(rest)) > 1
        assert len(prefixes[0]) + len(prefixes[1]) == half + 2  # splits p and half − p
        assert len(prefixes[0]) == len(rests[1])


@each(
    "objective, most",
    [
        *((PrefixLM(length=40, noise_density=density), most) for density, most in ((0.5, 39), (0.25, 19), (0.1, 7))),
        (PrefixLM(length=22, packed=True), 19),  # of 20 tokens each
    ],
)
def test_the_decoders_part_is_uniform_with_the_density_as_mean_share(objective, most):
    """The decoder gets 1 … 2·density·40 − 1 of 40 tokens; at 0.5 that is T5's prefix, uniform over 1 … 39."""
    rows, keys = make_rows(20_000, 40)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    left = (examples.target_segments == 1).sum(axis=1) if objective.packed else examples.targets.lengths
    counts = np.bincount(left - 1, minlength=most + 1)
    assert counts[0] == 0
    assert len(counts) == most + 1
    share = 1 / most
    assert np.abs(counts[1:] / 20_000 - share).max() < 4.5 * np.sqrt(share * (1 - share) / 20_000)


def test_packed_examples_of_several_sources_are_put_together_with_their_segments():
    objective = PrefixLM(length=22, packed=True)
    rows, keys = ragged_rows([40, 40, 12, 12, 40])
    whole = objective.apply(rows, keys, VOCABULARY, {})
    parts = []
    for places in (np.array([2, 3]), np.array([4, 0, 1])):
        part = Padded(rows.values[places][:, : rows.lengths[places].max()], rows.lengths[places])
        parts.append((places, objective.apply(part, keys[places], VOCABULARY, {})))
    assert_alike(together(parts, PAD), whole)
    plain = Examples(parts[0][1].inputs, parts[0][1].targets)
    joined = together([(parts[0][0], plain), parts[1]], PAD)  # each row of a corpus that isn't packed is one segment
    assert (joined.input_segments[parts[1][0]] == whole.input_segments[parts[1][0]]).all()
    for place in parts[0][0]:
        assert joined.input_segments[place].sum() == joined.inputs.lengths[place]
        assert joined.target_segments[place].max() == 1


@settings(max_examples=40)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=8), st.integers(0, 2**40))
def test_one_row_is_the_inputs_and_then_the_targets_which_alone_have_a_loss(lengths, seed):
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
