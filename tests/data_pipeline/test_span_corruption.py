"""Span corruption, compared with T5's helper and the properties that the paper states (Raffel et al. 2020)."""

from dataclasses import replace

import numpy as np

from data_pipeline.objectives.objective import Padded
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.objectives.span_corruption import SpanCorruption, with_sentinels
from tests.data_pipeline.example_rows import (
    EOS,
    FIRST_SENTINEL,
    TEXT,
    VOCABULARY,
    as_lists,
    make_rows,
)
from tests.tables import each


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


@each("length", [190, 350, 390, 670])
def test_masked_tokens_are_counted_in_float32_as_the_reference_does(length):
    _, _, inputs, targets = corrupt(SpanCorruption(), 1, length=length)
    noise = int(np.round(np.float32(length) * np.float32(0.15)))
    assert noise == round(length * 0.15) + 1  # doubles round the other way at these lengths
    assert (targets[0] < TEXT[1]).sum() - 1 == noise
    assert (inputs[0] < TEXT[1]).sum() - 1 == length - noise


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
    shares = np.bincount(offsets[same.sum(axis=1) == 1], minlength=40) / (same.sum(axis=1) == 1).sum()
    assert np.abs(shares - 1 / 40).max() < 4.5 * np.sqrt(1 / 40 * 39 / 40 / 19_000)
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


@each(
    "masked, inputs, targets",
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


def test_sentinels_have_to_suffice():
    few = replace(VOCABULARY, sentinels=28)
    assert SpanCorruption().problems(few) == []
    [problem] = SpanCorruption(random_roll=True).problems(few)
    assert "29" in problem
    assert "28" in problem
