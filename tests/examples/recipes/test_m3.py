"""The synthetic rows, and the classical forecasts, which follow from formulas."""

import numpy as np
import pytest

from examples.recipes.m3 import BINS, HORIZON, Series, scale_of, seasonal_factors, synthetic, theta
from examples.recipes.time_series import naive

FACTORS = np.array([0.5, 1.5, 0.8, 1.2])


def seasonal(length: int) -> np.ndarray:
    return 7 * np.resize(FACTORS, length)


def test_rows_are_a_function_of_the_seed_and_a_longer_file_begins_with_a_shorter_one():
    rows = synthetic(30, 0, 0)
    assert synthetic(50, 0, 0)[:30] == rows
    assert not {*rows} & {*synthetic(30, 0, 1), *synthetic(30, 1, 0)}
    for line in rows:
        history, future = ([*map(int, part.split())] for part in line.split("\t"))
        assert 12 <= len(history) <= 126
        assert len(future) == HORIZON
        assert all(0 <= one < BINS.number for one in history + future)
        if not {0, BINS.number - 1} & {*history}:  # nothing is cut, so the scale is the history's own
            assert np.abs(BINS.middles(history, 1)).mean() == pytest.approx(1, abs=0.02)
    assert scale_of(np.zeros(12)) == 1


def test_the_factors_of_a_season_are_found_and_noise_has_none():
    assert seasonal_factors(seasonal(24), 4) == pytest.approx(FACTORS)
    noise = np.random.default_rng(0).normal(10, 1, 40)
    assert seasonal_factors(noise, 4).tolist() == [1, 1, 1, 1]
    assert seasonal_factors(seasonal(11), 4).tolist() == [1, 1, 1, 1]  # less than three periods


def test_naive2_continues_a_season():
    series = Series("quarterly", 4, seasonal(26).tolist(), [])
    forecast = series.by(lambda history: naive(history, 1, HORIZON))
    assert forecast == pytest.approx(seasonal(26 + HORIZON)[26:])


def test_theta_continues_a_line_with_half_of_its_slope():
    """Without noise the level is the last value, and the drift half of the trend: Hyndman and Billah's formula."""
    forecast = theta(np.arange(30.0) * 4)
    assert forecast == pytest.approx(29 * 4 + 2 * np.arange(1.0, HORIZON + 1))
    assert theta(np.full(20, 3.0)) == pytest.approx(np.full(HORIZON, 3.0))
