"""Prefix and full language modelling: where rows are split, and how two examples share a row."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.objectives.objective import Examples, Padded, together
from data_pipeline.objectives.prefix_lm import FullLM, PrefixLM
from data_pipeline.objectives.randomness import row_keys
from tests.data_pipeline.example_rows import (
    EOS,
    PAD,
    TEXT,
    VOCABULARY,
    as_lists,
    assert_alike,
    assert_rows_stand_alone,
    make_rows,
    ragged_rows,
)
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
@given(st.lists(st.integers(2, 120), min_size=1, max_size=8), st.floats(0.02, 0.5), st.integers(0, 2**40))
def test_prefix_and_rest_give_back_the_row(lengths, density, seed):
    objective = PrefixLM(length=max(lengths), noise_density=density)
    rows, keys = ragged_rows(lengths, seed)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    sides = as_lists(examples.inputs), as_lists(examples.targets)
    for row, inputs, targets in zip(as_lists(rows), *sides, strict=True):
        assert [*inputs[:-1], *targets[:-1]] == row
        assert inputs[-1] == targets[-1] == EOS
        assert min(len(inputs), len(targets)) > 1
    for side, longest in zip((examples.inputs, examples.targets), objective.shape, strict=True):
        assert side.lengths.max() <= longest


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


@each("density, most", [(0.5, 39), (0.25, 19), (0.1, 7)])
def test_the_decoders_part_is_uniform_with_the_density_as_mean_share(density, most):
    """The decoder gets 1 … 2·density·40 − 1 of 40 tokens; at 0.5 that is T5's prefix, uniform over 1 … 39."""
    rows, keys = make_rows(20_000, 40)
    examples = PrefixLM(length=40, noise_density=density).apply(rows, keys, VOCABULARY, {})
    left = examples.targets.lengths - 1
    counts = np.bincount(left, minlength=most + 1)
    assert counts[0] == 0
    assert len(counts) == most + 1
    share = 1 / most
    assert np.abs(counts[1:] / 20_000 - share).max() < 4.5 * np.sqrt(share * (1 - share) / 20_000)
    assert abs(left.mean() - density * 40) < 4 * np.sqrt((most**2 - 1) / 12 / 20_000)


def test_packed_splits_are_uniform():
    rows, keys = make_rows(20_000, 2 * 20)
    examples = PrefixLM(length=22, packed=True).apply(rows, keys, VOCABULARY, {})
    counts = np.bincount((examples.input_segments == 1).sum(axis=1) - 1, minlength=20)
    assert counts[0] == 0
    assert len(counts) == 20  # 1 … 19
    assert np.abs(counts[1:] / 20_000 - 1 / 19).max() < 4.5 * np.sqrt(1 / 19 * 18 / 19 / 20_000)


def test_the_worked_example_of_a_packed_row():
    row = Padded.full(np.arange(12)[None] + TEXT[0])
    keys = row_keys(0, "test", 0, np.arange(100))
    everything = Padded(np.repeat(row.values, 100, axis=0), np.full(100, 12))
    examples = PrefixLM(length=8, packed=True).apply(everything, keys, VOCABULARY, {})
    split_at_2 = np.flatnonzero((examples.input_segments == 1).sum(axis=1) == 3)[0]
    a, end = TEXT[0], EOS
    assert examples.inputs.values[split_at_2].tolist() == [a, a + 1, end, a + 6, a + 7, a + 8, a + 9, end]
    assert examples.input_segments[split_at_2].tolist() == [1, 1, 1, 2, 2, 2, 2, 2]
    assert examples.targets.values[split_at_2].tolist() == [a + 2, a + 3, a + 4, a + 5, end, a + 10, a + 11, end]
    assert examples.target_segments[split_at_2].tolist() == [1, 1, 1, 1, 1, 2, 2, 2]


def test_full_lm_says_the_whole_row_after_nothing():
    rows, keys = ragged_rows([9, 1, 5, 9])
    examples = assert_rows_stand_alone(FullLM(length=10), rows, keys)
    assert as_lists(examples.inputs) == [[EOS]] * 4
    assert as_lists(examples.targets) == [[*row, EOS] for row in as_lists(rows)]


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
    assert joined.input_segments is not None
    assert joined.target_segments is not None
    assert (joined.input_segments[parts[1][0]] == whole.input_segments[parts[1][0]]).all()
    for place in parts[0][0]:
        assert joined.input_segments[place].sum() == joined.inputs.lengths[place]
        assert joined.target_segments[place].max() == 1
