"""Bins are Chronos'; forecasts and their errors follow from formulas."""

import numpy as np
import pytest

from examples.recipes.time_series import (
    BINS,
    HORIZON,
    LENGTH,
    SCALED,
    HeldOut,
    Process,
    autoregressive,
    naive,
    of_others,
    scale_of,
)


def test_a_bin_and_back_is_off_by_half_a_bin_at_most():
    series = np.linspace(-4.99, 4.99, 1000) * 7
    back = BINS.middles(BINS.of(series, 7), 7)
    assert np.abs(back - series).max() <= 7 * BINS.limit / BINS.number * (1 + 1e-9)
    assert BINS.of(np.array([-1e9, 1e9, -BINS.limit, 0.0]), 1) == [0, BINS.number - 1, 0, BINS.number // 2]


def test_the_scale_is_the_mean_absolute_value_of_the_first_half():
    series = np.concatenate([np.tile([2.0, -4.0], SCALED // 2), np.full(LENGTH - SCALED, 1e6)])
    assert scale_of(series) == 3
    assert scale_of(np.zeros(LENGTH)) == 1


def test_naive_repeats_the_last_period():
    assert naive(np.arange(10.0), 1).tolist() == [9.0] * HORIZON
    assert naive(np.arange(10.0), 4).tolist() == [6.0, 7, 8, 9] * 6


def test_mase_is_one_for_an_error_as_large_as_seasonal_naives():
    period = 4
    rising = np.arange(float(LENGTH))  # each value is 4 above the value a period before
    series = HeldOut(period, rising.tolist(), [0.0] * HORIZON)
    future = rising[-HORIZON:]
    assert series.mase(future) == 0
    assert series.mase(future + 4) == pytest.approx(1)
    assert series.mase(future - 2) == pytest.approx(0.5)


def test_another_series_forecast_comes_in_a_series_own_scale():
    """So a model that writes the same bins whatever it reads forecasts as well with another series."""
    scales = [0.5, 1000.0, 3.0, 1.0]
    same = [BINS.middles([700] * HORIZON, scale) for scale in scales]
    for own, other in zip(same, of_others(same, scales), strict=True):
        assert other == pytest.approx(own)
    found = [np.full(HORIZON, scale * (index + 1)) for index, scale in enumerate(scales)]
    assert [forecast[0] for forecast in of_others(found, scales)] == pytest.approx([0.5 * 3, 1000 * 4, 3 * 1, 1 * 2])


def test_the_best_forecast_is_the_conditional_mean():
    """Of a random walk with noise, by the Kalman filter's steady state; of a process without memory, 0."""
    times = np.arange(1.0, LENGTH + 1)
    walk = Process(np.minimum(times[:, None], times) + np.eye(LENGTH), 1)
    series = walk.draw(np.random.default_rng(0), 1)[0]
    level, variance = 0.0, 0.0
    for value in series[:-HORIZON]:
        variance += 1
        gain = variance / (variance + 1)
        level, variance = level + gain * (value - level), variance * (1 - gain)
    assert walk.expected(series[:-HORIZON]) == pytest.approx(np.full(HORIZON, level), abs=1e-6)
    assert Process(np.eye(LENGTH), 1).expected(series[:-HORIZON]) == pytest.approx(np.zeros(HORIZON))


def test_drawn_processes_have_valid_covariances_and_repeat():
    for seed in range(30):
        process = Process.drawn(np.random.default_rng(seed))
        assert np.linalg.eigvalsh(process.covariance).min() > 0
        assert (process.covariance == Process.drawn(np.random.default_rng(seed)).covariance).all()


def test_an_autoregressive_model_continues_a_sine():
    times = np.arange(LENGTH)
    series = 5 + np.sin(2 * np.pi * times / 12)
    assert autoregressive(series[:-HORIZON]) == pytest.approx(series[-HORIZON:], abs=0.05)
