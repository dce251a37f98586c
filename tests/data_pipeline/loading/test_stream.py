"""The order of an epoch's rows, and the shares of corpora in a mixture."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.corpus import Blocks
from data_pipeline.loading.stream import EpochOrder, Mixture, rates
from tests.support.tables import each


def blocks_of(sizes):
    rows = np.array(sizes)
    nothing = np.zeros(len(rows), dtype=np.int64)
    return Blocks([], nothing, nothing, nothing, np.cumsum(rows) - rows, rows, nothing)


@settings(max_examples=80)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 50), st.integers(0, 5))
def test_an_epoch_holds_every_row_once(sizes, lanes, epoch):
    order = EpochOrder(blocks_of(sizes), lanes, seed=3, epoch=epoch)
    total = sum(sizes)
    ids = order.row_ids(np.arange(total))
    assert sorted(ids.tolist()) == list(range(total))
    some = np.random.default_rng(0).integers(0, total, 5)
    assert (EpochOrder(blocks_of(sizes), lanes, 3, epoch).row_ids(some) == ids[some]).all()  # random access


def test_neighbours_come_from_different_blocks_and_epochs_differ():
    blocks = blocks_of([64] * 32)
    first = EpochOrder(blocks, 16, 0, 0).row_ids(np.arange(2048))
    assert len(set((first[:16] // 64).tolist())) >= 12
    second = EpochOrder(blocks, 16, 0, 1).row_ids(np.arange(2048))
    assert (first == second).mean() < 0.01


def test_mixing_rates_are_those_of_t5():
    """min(size, limit), to the power of 1 / temperature, times the weight."""
    assert rates([900, 100], [1.0, 1.0], None, 1.0) == [900, 100]
    assert rates([900, 100], [1.0, 1.0], 400, 1.0) == [400, 100]
    assert rates([900, 100], [1.0, 3.0], 400, 2.0) == [20, 30]


@each("rows", [5_000, 20_001, 1_000_000, 3_333_333_333, 10**12])
def test_a_corpus_of_small_weight_gets_exactly_its_rows(rows):
    """One row in `rows`: the k-th of them lies at (k + 1/2) · rows, to what rounding a share to 2^-64 may move it."""
    mixture = Mixture([rows - 1, 1])
    for turn in (0, 1, 2, 999, 123_456):
        due = (2 * turn + 1) * rows // 2
        near = 3 + (due * rows >> 64)
        assert [mixture.consumed(position)[1] for position in (due - near, due + near)] == [turn, turn + 1]
        if near == 3:
            owners, places = mixture.deal(np.arange(due - 3, due + 3))
            assert places[owners == 1].tolist() == [turn]


WEIGHTS = [[7, 2, 1], [1] * 9, [1, 1e-6], [1e-6, 1], [0.5, 0.3, 0.2, 1e-6, 3e-9], [1e-12, 1, 1e12], [3, 5, 7, 11, 13]]


@each("weights", WEIGHTS)
def test_shares_are_exact_and_even_however_small_and_however_long_the_run(weights):
    """At any position up to 10^15, each corpus's rows are position · share to within two rows; in any stretch, the
    stretch's length · share, to within three."""
    mixture, whole = Mixture(weights), sum(map(Fraction, weights))
    for position in (1, 10, 9_999, 10**6, 123_456_789, 10**12 + 7, 10**15):
        counts = mixture.consumed(position)
        assert sum(counts) == position
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - position * Fraction(weight) / whole) < 2
        owners, places = mixture.deal(np.arange(position, position + 50))
        for owner, place in zip(owners.tolist(), places.tolist(), strict=True):
            assert place == counts[owner]
            counts[owner] += 1
        assert counts == mixture.consumed(position + 50)
    owners, _ = mixture.deal(np.arange(20_000))
    for corpus, weight in enumerate(weights):
        rows = np.append(0, np.cumsum(owners == corpus))
        for length in (10, 100, 1000):
            stretches = rows[length:] - rows[:-length]
            assert np.abs(stretches - length * weight / sum(weights)).max() < 3


def test_rows_that_were_not_consumed_are_noticed():
    """Of weights 3 and 1, the first 8 rows take 6 and 2."""
    mixture = Mixture([3, 1])
    assert mixture.miscount([6, 2], 8) is None
    assert "[5, 3] rows consumed" in str(mixture.miscount([5, 3], 8))
    assert "expected [6, 2] at position 8" in str(mixture.miscount([5, 3], 8))
