"""Span corruption against T5's helper and its stated properties (Raffel et al. 2020)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.objectives import Padded
from data_pipeline.objectives.randomness import permutation, random_bits, row_keys
from data_pipeline.objectives.span_corruption import SpanCorruption
from data_pipeline.vocabulary import Vocabulary

EOS, FIRST_SENTINEL = 1, 32_099
VOCABULARY = Vocabulary(32_100, (3, 32_000), pad=0, eos=EOS, unk=2, first_sentinel=FIRST_SENTINEL, sentinels=100)


@pytest.mark.parametrize(
    ("inputs", "density", "span", "raw", "targets"),
    [
        (512, 0.15, 3, 568, 114),
        (1024, 0.15, 3, 1137, 229),
        (256, 0.15, 3, 284, 58),
        (128, 0.15, 3, 141, 29),
        (512, 0.15, 8, 588, 100),
        (512, 0.15, 32, 598, 94),
        (512, 0.5, 3, 766, 512),
        (512, 0.5, 32, 990, 512),
        (512, 0.5, 64, 1006, 512),
        (64, 0.2, 2, 70, 22),
        (64, 0.2, 1, 63, 27),
    ],
)
def test_lengths_are_those_of_t5s_helper(inputs, density, span, raw, targets):
    objective = SpanCorruption(inputs_length=inputs, noise_density=density, mean_span_length=span)
    assert (objective.raw_length, objective.shape) == (raw, (inputs, targets))


def apply(objective, rows, keys):
    examples = objective.apply(Padded.full(rows), keys, VOCABULARY, {})
    return examples.inputs.values, examples.targets.values


def corrupt(objective, count, length=None, seed=0):
    length = length or objective.raw_length
    rows = np.random.default_rng(seed).integers(3, 32_000, (count, length)).astype(np.uint16)
    keys = row_keys(seed, "test", 0, np.arange(count))
    return rows, keys, *apply(objective, rows, keys)


def restore(inputs, targets):
    """The row that inputs and targets were made of."""
    spans, row = {}, []
    for token in targets[:-1]:
        if token > 32_000:
            spans[token] = current = []
        else:
            current.append(token)
    for token in inputs[:-1]:
        row += spans[token] if token > 32_000 else [token]
    return row


def test_shapes_sentinels_and_ends():
    rows, _, inputs, targets = corrupt(SpanCorruption(), 200)
    assert inputs.shape == (200, 512)
    assert targets.shape == (200, 114)
    assert (inputs[:, -1] == EOS).all()
    assert (targets[:, -1] == EOS).all()
    for side in (inputs, targets):
        for row in side:
            assert row[row > 32_000].tolist() == [FIRST_SENTINEL - k for k in range(28)]
    assert (inputs[:, 0] == rows[:, 0]).all()  # the first token is always kept
    assert (inputs[:, -2] == FIRST_SENTINEL - 27).all()  # the last is always masked
    assert (targets[:, 0] == FIRST_SENTINEL).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 200), st.floats(0.05, 0.45), st.floats(2.0, 8.0), st.integers(0, 2**40))
def test_inputs_and_targets_give_back_the_row(inputs_length, density, span, seed):
    try:
        objective = SpanCorruption(inputs_length=inputs_length, noise_density=density, mean_span_length=span)
    except ValidationError:
        return
    rows, _, inputs, targets = corrupt(objective, 3, seed=seed)
    for row, given_inputs, given_targets in zip(rows, inputs, targets, strict=True):
        assert restore(given_inputs.tolist(), given_targets.tolist()) == row.tolist()


def test_noise_of_a_row_depends_on_its_key_alone():
    objective = SpanCorruption(inputs_length=64)
    rows, keys, inputs, targets = corrupt(objective, 32)
    for start, stop in ((0, 1), (5, 13), (31, 32)):
        part = apply(objective, rows[start:stop], keys[start:stop])
        assert (part[0] == inputs[start:stop]).all()
        assert (part[1] == targets[start:stop]).all()
    assert (apply(objective, rows[::-1], keys[::-1])[0] == inputs[::-1]).all()


@pytest.mark.parametrize("length", [190, 350, 390, 670])
def test_masked_tokens_are_counted_in_float32_as_the_reference_does(length):
    _, _, inputs, targets = corrupt(SpanCorruption(), 1, length=length)
    noise = int(np.round(np.float32(length) * np.float32(0.15)))
    assert noise == round(length * 0.15) + 1  # doubles round the other way at these lengths
    assert (targets[0] < 32_000).sum() - 1 == noise
    assert (inputs[0] < 32_000).sum() - 1 == length - noise


def test_every_segmentation_is_equally_likely():
    """6 noise tokens in 2 spans: 5 ways to cut them, by T5's uniform choice of cuts."""
    objective = SpanCorruption(inputs_length=64, noise_density=0.15, mean_span_length=3.0)
    _, _, _, targets = corrupt(objective, 20_000, length=40)
    first_span = [row.index(FIRST_SENTINEL - 1) - 1 for row in targets.tolist()]
    counts = np.bincount(first_span, minlength=6)[1:]
    assert counts.sum() == 20_000
    assert np.abs(counts / 20_000 - 0.2).max() < 4 * np.sqrt(0.2 * 0.8 / 20_000)


def test_span_lengths_follow_their_distribution():
    """A span of a uniform composition of N into k parts has length s with probability C(N−s−1, k−2) / C(N−1, k−1)."""
    from math import comb

    _, _, _, targets = corrupt(SpanCorruption(), 5_000)
    lengths = np.diff(np.flatnonzero(targets.reshape(-1) > 32_000))  # within a row: span + its sentinel
    starts = np.flatnonzero(targets.reshape(-1) > 32_000)
    inside = starts[:-1] // 114 == starts[1:] // 114
    spans = (lengths - 1)[inside]
    for size in range(1, 8):
        expected = comb(85 - size - 1, 26) / comb(84, 27)
        share = float((spans == size).mean())
        assert abs(share - expected) < 5 * np.sqrt(expected / len(spans))


def test_epochs_and_purposes_draw_different_noise():
    rows = np.arange(1000)
    keys = [row_keys(0, "a", 0, rows), row_keys(0, "a", 1, rows), row_keys(0, "b", 0, rows), row_keys(1, "a", 0, rows)]
    assert len(np.unique(np.concatenate(keys))) == 4000
    assert (row_keys(0, "a", np.repeat([0, 1], 500), rows)[:500] == keys[0][:500]).all()


def test_random_bits_are_uniform_and_uncorrelated():
    bits = random_bits(row_keys(0, "test", 0, np.arange(4000)), 0, 64)
    shares = [(bits >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert np.abs(np.array(shares) - 0.5).max() < 5 * 0.5 / np.sqrt(bits.size)
    uniform = bits.astype(np.float64) / 2.0**64
    correlation = np.corrcoef(uniform.T) - np.eye(64)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


def test_a_permutation_holds_each_number_once():
    assert sorted(permutation(7, 1000).tolist()) == list(range(1000))
    assert permutation(7, 1000).tolist() != permutation(8, 1000).tolist()
