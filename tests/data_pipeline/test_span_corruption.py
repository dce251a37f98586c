"""Span corruption, compared with T5's helper and the properties that the paper states (Raffel et al. 2020), and i.i.d.
denoising, compared with the binomial distribution and with all masks of a short row."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from data_pipeline.objectives import iid_denoising
from data_pipeline.objectives.iid_denoising import IidDenoising
from data_pipeline.objectives.objective import Padded
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.objectives.span_corruption import SpanCorruption, with_sentinels
from tests.data_pipeline.example_rows import EOS, FIRST_SENTINEL, TEXT, VOCABULARY, as_lists, make_rows, restored
from tests.tables import each


def corrupted(count, length):
    """The inputs and the targets."""
    examples = SpanCorruption().apply(*make_rows(count, length), VOCABULARY, {})
    return examples.inputs.values, examples.targets.values


@each("length", [190, 350, 390, 670])
def test_masked_tokens_are_counted_in_float32_as_the_reference_does(length):
    inputs, targets = corrupted(1, length)
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
    starts = np.flatnonzero(corrupted(5_000, 568)[1].reshape(-1) >= TEXT[1])
    inside = starts[:-1] // 114 == starts[1:] // 114
    spans = np.diff(starts)[inside] - 1  # a span's sentinel stands before it
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


def test_sentinels_have_to_suffice():
    few = replace(VOCABULARY, sentinels=28)
    assert SpanCorruption().problems(few) == []
    [problem] = SpanCorruption(random_roll=True).problems(few)
    assert "29" in problem
    assert "28" in problem


def masks_of(objective, keys, length):
    """(n, length) bool: which tokens of rows of `length` different tokens are in the targets."""
    tokens = np.arange(length) + TEXT[0]
    rows = Padded.full(np.tile(tokens, (len(keys), 1)))
    targets = objective.apply(rows, keys, VOCABULARY, {}).targets.values
    masks = np.zeros(rows.values.shape, dtype=bool)
    numbers, places = np.nonzero((targets >= TEXT[0]) & (targets < TEXT[1]))
    masks[numbers, targets[numbers, places] - TEXT[0]] = True
    return masks


def test_tokens_are_masked_independently():
    masks = masks_of(IidDenoising(inputs_length=41), row_keys(0, "test", 0, np.arange(20_000)), 40)
    share = masks.mean(axis=0)
    assert np.abs(share - 0.15).max() < 4.5 * np.sqrt(0.15 * 0.85 / 20_000)
    masked = masks.sum(axis=1)
    assert abs(masked.mean() - 40 * 0.15) < 4 * np.sqrt(40 * 0.15 * 0.85 / 20_000)
    assert masked.var() == pytest.approx(40 * 0.15 * 0.85, rel=0.05)  # 5 standard errors
    both = (masks[:, 1:] & masks[:, :-1]).mean(axis=0)
    assert np.abs(both - 0.15**2).max() < 4.5 * np.sqrt(0.15**2 / 20_000)
    runs = (masks[:, :1].sum(axis=1) + (masks[:, 1:] & ~masks[:, :-1]).sum(axis=1)).mean()
    assert abs(runs - (0.15 + 39 * 0.15 * 0.85)) < 4 * np.sqrt(40 * 0.15 * 0.85 / 20_000)


@each("density, length", [(0.02, 16), (0.15, 12), (0.6, 14)])
def test_sentinels_and_targets_suffice_but_for_one_row_in_a_million(density, length):
    """Computed from the probability of each of the 2^length masks."""
    masks = (np.arange(2**length)[:, None] >> np.arange(length) & 1).astype(bool)
    masked = masks.sum(axis=1)
    probability = density**masked * (1 - density) ** (length - masked)
    runs = masks[:, 0] + (masks[:, 1:] & ~masks[:, :-1]).sum(axis=1)

    def most(counts):
        return next(k for k in range(2 * length) if probability[counts > k].sum() <= 1e-6)

    objective = IidDenoising(inputs_length=length + 1, noise_density=density)
    assert objective.sentinels == most(runs) + 1
    assert objective.shape == (length + 1, most(runs + masked) + 2)


def test_masking_stops_where_the_sentinels_or_the_targets_are_used_up(monkeypatch):
    rows, keys = make_rows(3000, 63)
    free = masks_of(IidDenoising(inputs_length=64), keys, 63)
    monkeypatch.setattr(iid_denoising, "_OVERFLOW", 0.2)
    objective = IidDenoising(inputs_length=64)
    limited = masks_of(objective, keys, 63)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert restored(examples) == as_lists(rows)
    assert examples.targets.lengths.max() <= objective.shape[1]
    assert (limited <= free).all()
    changed = (limited != free).any(axis=1)
    assert 0.1 < changed.mean() < 0.4  # at most a fifth of the rows exceed either limit, and at least a tenth do
    for before, after in zip(free[changed], limited[changed], strict=True):
        first = np.argmax(before != after)
        assert not after[first:].any()
        tried = after.copy()
        tried[first] = True
        runs = tried[0] + (tried[1:] & ~tried[:-1]).sum()
        assert runs > objective.sentinels - 1 or runs + tried.sum() > objective.shape[1] - 2
