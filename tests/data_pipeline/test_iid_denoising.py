"""I.i.d. denoising, compared with the binomial distribution and with all masks of a short row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.objectives import iid_denoising
from data_pipeline.objectives.iid_denoising import IidDenoising
from data_pipeline.objectives.objective import Padded
from data_pipeline.objectives.randomness import row_keys
from tests.data_pipeline.example_rows import (
    EOS,
    FIRST_SENTINEL,
    TEXT,
    VOCABULARY,
    as_lists,
    make_rows,
    ragged_rows,
    restored,
)
from tests.tables import each


def masks_of(objective, keys, length):
    """(n, length) bool: which tokens of rows of `length` different tokens are in the targets."""
    tokens = np.arange(length) + TEXT[0]
    rows = Padded.full(np.tile(tokens, (len(keys), 1)))
    targets = objective.apply(rows, keys, VOCABULARY, {}).targets.values
    masks = np.zeros(rows.values.shape, dtype=bool)
    numbers, places = np.nonzero((targets >= TEXT[0]) & (targets < TEXT[1]))
    masks[numbers, targets[numbers, places] - TEXT[0]] = True
    return masks


@settings(max_examples=60)
@given(st.integers(2, 200), st.floats(0.01, 0.95), st.lists(st.integers(1, 199), max_size=6), st.integers(0, 2**40))
def test_inputs_and_targets_give_back_the_row(inputs_length, density, lengths, seed):
    objective = IidDenoising(inputs_length=inputs_length, noise_density=density)
    rows, keys = ragged_rows([objective.raw_length, *(min(length, inputs_length - 1) for length in lengths)], seed)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert restored(examples) == as_lists(rows)
    for side, longest in zip((examples.inputs, examples.targets), objective.shape, strict=True):
        assert side.lengths.max() <= longest
        assert (side.values >= TEXT[1]).sum(axis=1).max() <= objective.sentinels


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


def test_t5s_sentinels_suffice_for_t5s_length():
    objective = IidDenoising()
    assert (objective.raw_length, objective.shape[0]) == (511, 512)
    assert 65 + 4 * 6.3 < objective.sentinels <= 100  # mean and deviation of the runs: 511 tokens, 0.15 × 0.85 each
    assert objective.problems(VOCABULARY) == []
    assert IidDenoising(noise_density=0.5, inputs_length=2048).sentinels > 500
    assert len(IidDenoising(noise_density=0.5, inputs_length=4096).problems(VOCABULARY)) == 1


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


def test_a_row_of_which_nothing_is_masked_has_only_an_end_mark_to_say():
    rows, keys = make_rows(200, 3)
    examples = IidDenoising(inputs_length=64, noise_density=0.15).apply(rows, keys, VOCABULARY, {})
    empty = [targets == [EOS] for targets in as_lists(examples.targets)]
    assert 0.85**3 * 200 * 0.8 < sum(empty) < 0.85**3 * 200 * 1.2
    for nothing, row, inputs in zip(empty, as_lists(rows), as_lists(examples.inputs), strict=True):
        assert (inputs == [*row, EOS]) == nothing


def test_what_one_side_spells_out_is_a_sentinel_in_the_other():
    objective = IidDenoising(inputs_length=11, noise_density=0.3)
    keys = row_keys(0, "test", 0, np.arange(500))
    masks = masks_of(objective, keys, 10)
    rows = Padded.full(np.tile(np.arange(10) + TEXT[0], (500, 1)))
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert {True, False} == set(masks[:, 0].tolist())
    for mask, inputs, targets in zip(masks, as_lists(examples.inputs), as_lists(examples.targets), strict=True):
        expected: dict[bool, list[int]] = {False: [], True: []}
        for place in range(10):
            expected[bool(mask[place])].append(TEXT[0] + place)
            if place == 0 or mask[place] != mask[place - 1]:
                other = expected[not mask[place]]
                other.append(FIRST_SENTINEL - sum(token >= TEXT[1] for token in other))
        assert inputs == [*expected[False], EOS]
        assert targets == ([*expected[True], EOS] if mask.any() else [EOS])
