"""Span corruption, compared with T5's helper and the properties that the paper states (Raffel et al. 2020)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.objectives import Padded
from data_pipeline.objectives.randomness import permutation, random_bits, row_keys, uniform
from data_pipeline.objectives.sentinels import with_sentinels
from data_pipeline.objectives.span_corruption import SpanCorruption
from tests.data_pipeline.example_rows import (
    EOS,
    FIRST_SENTINEL,
    TEXT,
    VOCABULARY,
    as_lists,
    assert_rows_stand_alone,
    make_rows,
    ragged_rows,
    restored,
)


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


def corrupt(objective, count, length=None, seed=0):
    rows, keys = make_rows(count, length or objective.raw_length, seed)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    return rows.values, keys, examples.inputs.values, examples.targets.values


def test_shapes_sentinels_and_ends():
    rows, _, inputs, targets = corrupt(SpanCorruption(), 200)
    assert inputs.shape == (200, 512)
    assert targets.shape == (200, 114)
    assert (inputs[:, -1] == EOS).all()
    assert (targets[:, -1] == EOS).all()
    for side in (inputs, targets):
        for row in side:
            assert row[row >= TEXT[1]].tolist() == [FIRST_SENTINEL - k for k in range(28)]
    assert (inputs[:, 0] == rows[:, 0]).all()  # the first token is always kept
    assert (inputs[:, -2] == FIRST_SENTINEL - 27).all()  # the last is always masked
    assert (targets[:, 0] == FIRST_SENTINEL).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 200), st.floats(0.05, 0.45), st.floats(2.0, 8.0), st.booleans(), st.integers(0, 2**40))
def test_inputs_and_targets_give_back_the_row(inputs_length, density, span, roll, seed):
    try:
        objective = SpanCorruption(
            inputs_length=inputs_length, noise_density=density, mean_span_length=span, random_roll=roll
        )
    except ValidationError:
        return
    accepted = [length for length in range(2, objective.raw_length) if objective.accepts(length)]
    rows, keys = ragged_rows([objective.raw_length] * 8 + accepted[:: len(accepted) // 4 + 1], seed)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert restored(examples) == as_lists(rows)
    for side, longest in zip((examples.inputs, examples.targets), objective.shape, strict=True):
        assert side.lengths.max() <= longest
        assert (side.values >= TEXT[1]).sum(axis=1).max() <= objective.sentinels


@pytest.mark.parametrize("roll", [False, True])
def test_noise_of_a_row_depends_on_its_key_alone(roll):
    objective = SpanCorruption(inputs_length=64, random_roll=roll)
    for rows, keys in (make_rows(32, objective.raw_length), ragged_rows([70, 12, 41, 70, 12, 2, 33, 70, 69, 5])):
        assert_rows_stand_alone(objective, rows, keys)


@pytest.mark.parametrize("length", [190, 350, 390, 670])
def test_masked_tokens_are_counted_in_float32_as_the_reference_does(length):
    _, _, inputs, targets = corrupt(SpanCorruption(), 1, length=length)
    noise = int(np.round(np.float32(length) * np.float32(0.15)))
    assert noise == round(length * 0.15) + 1  # doubles round the other way at these lengths
    assert (targets[0] < TEXT[1]).sum() - 1 == noise
    assert (inputs[0] < TEXT[1]).sum() - 1 == length - noise


def test_every_segmentation_is_equally_likely():
    """6 noise tokens in 2 spans can be cut in 5 ways; T5 chooses the cuts uniformly."""
    objective = SpanCorruption(inputs_length=64, noise_density=0.15, mean_span_length=3.0)
    _, _, _, targets = corrupt(objective, 20_000, length=40)
    first_span = [row.index(FIRST_SENTINEL - 1) - 1 for row in targets.tolist()]
    counts = np.bincount(first_span, minlength=6)[1:]
    assert counts.sum() == 20_000
    assert np.abs(counts / 20_000 - 0.2).max() < 4 * np.sqrt(0.2 * 0.8 / 20_000)


def test_kept_and_masked_segments_and_the_roll_are_drawn_independently():
    """6 masked and 34 kept tokens in 2 spans each can be cut in 5 × 33 ways, and there are 40 offsets."""
    values = np.tile(np.arange(40) + TEXT[0], (20_000, 1))
    keys = row_keys(0, "test", 0, np.arange(20_000))
    masks = []
    for roll in (False, True):
        objective = SpanCorruption(inputs_length=64, random_roll=roll)
        inputs = objective.apply(Padded.full(values), keys, VOCABULARY, {}).inputs.values
        masks.append(~(inputs[:, :, None] == np.arange(40) + TEXT[0]).any(axis=1))
    mask, rolled = masks
    kept = np.argmax(mask, axis=1)  # the first kept segment's length, 1 … 33
    masked = np.argmax(~mask & (np.arange(40) > kept[:, None]), axis=1) - kept  # the first span's, 1 … 5
    joint = np.bincount(kept * 6 + masked, minlength=34 * 6).reshape(34, 6)[1:, 1:] / 20_000
    expected = 1 / (33 * 5)
    assert np.abs(joint - expected).max() < 5 * np.sqrt(expected / 20_000)
    same = np.stack([(np.roll(mask, offset, axis=1) == rolled).all(axis=1) for offset in range(40)], axis=1)
    assert same.any(axis=1).all()
    offsets = np.argmax(same, axis=1)
    for cut in (1, 2):
        for length in (kept, masked):
            chosen = (length == cut) & (same.sum(axis=1) == 1)
            assert abs(offsets[chosen].mean() - 19.5) < 4.5 * np.sqrt((40**2 - 1) / 12 / chosen.sum())


def test_span_lengths_follow_their_distribution():
    """A span of a uniform composition of N into k parts has length s with probability C(N−s−1, k−2) / C(N−1, k−1)."""
    from math import comb

    _, _, _, targets = corrupt(SpanCorruption(), 5_000)
    lengths = np.diff(np.flatnonzero(targets.reshape(-1) >= TEXT[1]))  # within a row: span + its sentinel
    starts = np.flatnonzero(targets.reshape(-1) >= TEXT[1])
    inside = starts[:-1] // 114 == starts[1:] // 114
    spans = (lengths - 1)[inside]
    for size in range(1, 8):
        expected = comb(85 - size - 1, 26) / comb(84, 27)
        share = float((spans == size).mean())
        assert abs(share - expected) < 5 * np.sqrt(expected / len(spans))


@pytest.mark.parametrize(
    ("masked", "inputs", "targets"),
    [
        ({2, 3, 9}, "Thank you <0> me to your party last <1> </s>", "<0> for inviting <1> week </s>"),
        # shifted by 7, and by 1: each side numbers its own runs
        ({9, 0, 6}, "<0> you for inviting me to <1> party last <2> </s>", "Thank <0> your <1> week </s>"),
        ({3, 4, 0}, "<0> you for <1> to your party last week </s>", "Thank <0> inviting me <1> </s>"),
    ],
)
def test_a_row_begins_with_whatever_the_mask_begins_with(masked, inputs, targets):
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    ids = {word: TEXT[0] + number for number, word in enumerate(words)}
    ids |= {"</s>": EOS} | {f"<{number}>": FIRST_SENTINEL - number for number in range(3)}
    mask = np.array([[position in masked for position in range(10)]])
    row = Padded.full(np.array([[ids[word] for word in words]]))
    examples = with_sentinels(row, mask, VOCABULARY)
    assert as_lists(examples.inputs) == [[ids[word] for word in inputs.split()]]
    assert as_lists(examples.targets) == [[ids[word] for word in targets.split()]]


def test_rolled_rows_leave_room_for_a_span_in_two_parts():
    """At most 567 − 85 + 29 + 1 = 512 inputs; 568 tokens would give 513."""
    objective = SpanCorruption(random_roll=True)
    assert (objective.raw_length, objective.shape, objective.sentinels) == (567, (512, 115), 29)
    rows, keys = make_rows(2000, 567)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert ((examples.inputs.values[:, 0] < TEXT[1]) != (examples.targets.values[:, 0] < TEXT[1])).all()
    assert sorted(set(examples.inputs.lengths.tolist())) == [511, 512]
    assert sorted(set(examples.targets.lengths.tolist())) == [114, 115]
    # of 567 offsets, 85 − 28 split one of 28 masked spans, and 482 − 28 split a kept run
    for side, longest, parted in ((examples.inputs, 512, 85 - 28), (examples.targets, 115, 482 - 28)):
        share = float((side.lengths == longest).mean())
        expected = parted / 567
        assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / 2000)


def test_a_mask_is_rolled_by_every_offset_equally_often():
    """10 tokens have one span of 2 at the end, so its place shows the offset."""
    objective = SpanCorruption(inputs_length=64, random_roll=True)
    values = np.tile(np.arange(10) + TEXT[0], (20_000, 1))
    keys = row_keys(0, "test", 0, np.arange(20_000))
    inputs = objective.apply(Padded.full(values), keys, VOCABULARY, {}).inputs.values
    kept = (inputs[:, :, None] == np.arange(10) + TEXT[0]).any(axis=1)
    assert (kept.sum(axis=1) == 8).all()
    last = ~kept & np.roll(kept, -1, axis=1)  # masked, while the next token, round the end, is kept
    assert (last.sum(axis=1) == 1).all()
    shares = np.bincount(np.argmax(last, axis=1), minlength=10) / 20_000
    assert np.abs(shares - 0.1).max() < 4 * np.sqrt(0.1 * 0.9 / 20_000)
    assert np.abs(1 - kept.mean(axis=0) - 0.2).max() < 4 * np.sqrt(0.2 * 0.8 / 20_000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise_density": 0.0}, "greater than 0"),
        ({"noise_density": 1.0}, "less than 1"),
        ({"noise_density": 0.8, "mean_span_length": 1.0}, "spans can't be kept apart"),
        ({"inputs_length": 2}, "leaves no room for a masked span"),
        ({"inputs_length": 3, "random_roll": True}, "leaves no room for a masked span"),
        ({"mean_span_length": 0.5}, "greater than or equal to 1"),
    ],
)
def test_settings_that_mask_nothing_or_too_much_are_refused(changes, reason):
    with pytest.raises(ValidationError, match=reason):
        SpanCorruption(**changes)


def test_sentinels_have_to_suffice():
    few = replace(VOCABULARY, sentinels=28)
    assert SpanCorruption().problems(few) == []
    [problem] = SpanCorruption(random_roll=True).problems(few)
    assert "29" in problem
    assert "28" in problem


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


def test_every_number_below_a_count_is_equally_likely():
    numbers = uniform(random_bits(row_keys(0, "test", 0, np.arange(20_000)), 0, 1)[:, 0], 7)
    counts = np.bincount(numbers, minlength=7)
    assert len(counts) == 7
    assert np.abs(counts / 20_000 - 1 / 7).max() < 4 * np.sqrt(1 / 7 * 6 / 7 / 20_000)


def test_a_permutation_holds_each_number_once():
    assert sorted(permutation(7, 1000).tolist()) == list(range(1000))
    assert permutation(7, 1000).tolist() != permutation(8, 1000).tolist()
