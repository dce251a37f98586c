"""I.i.d. denoising, compared with the binomial distribution and with all masks of a short row."""

import numpy as np
import pytest

from data_pipeline.objectives import iid_denoising
from data_pipeline.objectives.iid_denoising import IidDenoising
from data_pipeline.objectives.objective import Padded
from data_pipeline.objectives.randomness import row_keys
from tests.data_pipeline.example_rows import (
    TEXT,
    VOCABULARY,
    as_lists,
    make_rows,
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
