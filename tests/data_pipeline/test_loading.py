"""The loader: its order is computed, and the same for every number of ranks and workers."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.corpus import Blocks, open_corpus
from data_pipeline.foundation.errors import UserError
from data_pipeline.loading.batch_layout import IGNORE_INDEX, BatchLayout
from data_pipeline.loading.batches import TrainingBatches, validation_batches
from data_pipeline.loading.reader import Reader
from data_pipeline.loading.stream import EpochOrder, Mixture, Stream, rates_of_rows
from tests.data_pipeline.example_rows import as_lists
from tests.tables import each


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


def test_shares_of_tokens_become_rates_of_rows():
    """Rows of 500 and of 100 tokens: 30 % of the tokens from the second is 0.3/100 of 0.7/500 + 0.3/100 rows."""
    weights = rates_of_rows([0.7, 0.3], [10, 40], [5000, 4000])
    counts = Mixture(weights).consumed(10**6)
    assert counts[1] == pytest.approx(10**6 * (0.3 / 100) / (0.7 / 500 + 0.3 / 100), abs=1)
    tokens = np.array(counts) * [500, 100]
    assert tokens / tokens.sum() == pytest.approx([0.7, 0.3], abs=1e-5)


def test_rows_that_were_not_consumed_are_noticed():
    """Of weights 3 and 1, the first 8 rows take 6 and 2."""
    mixture = Mixture([3, 1])
    assert mixture.miscount([6, 2], 8) is None
    assert "[5, 3] rows consumed" in str(mixture.miscount([5, 3], 8))
    assert "expected [6, 2] at position 8" in str(mixture.miscount([5, 3], 8))


@each("ranks", [1, 2])
def test_steps_of_growing_batches_follow_one_another_in_the_stream(small_corpus, ranks):
    """Steps of 4, 8 and 16 rows take the same rows as seven steps of 4."""
    stream = Stream([open_corpus(small_corpus)], [1.0], seed=0, lanes=8)
    small = list(TrainingBatches(stream, BatchLayout(0, 1, 4, 1)).loader(7, 0))
    share = 4 // ranks
    layouts = [BatchLayout(rank, ranks, share, 1) for rank in range(ranks)]
    of_ranks = [list(TrainingBatches(stream, layout).loader([1, 2, 4], 0)) for layout in layouts]
    growing = [micro["labels"] for step in zip(*of_ranks, strict=True) for rank in step for micro in rank]
    assert torch.equal(torch.cat([step[0]["labels"] for step in small]), torch.cat(growing))


def test_an_epoch_ends_in_the_middle_of_a_batch_without_loss(small_corpus):
    corpus = open_corpus(small_corpus)
    rows = corpus.rows("train")
    batches = TrainingBatches(Stream([corpus], [1.0], seed=0, lanes=8), BatchLayout(0, 1, 16, 1))
    _, epochs, ids = batches.row_ids(np.arange(2 * rows))
    assert sorted(ids[epochs == 0].tolist()) == list(range(rows))
    assert sorted(ids[epochs == 1].tolist()) == list(range(rows))


@each("ranks", [1, 2, 3])
def test_validation_sees_each_row_once_on_any_number_of_ranks(small_corpus, ranks):
    corpus = open_corpus(small_corpus)
    rows = corpus.rows("validation")
    reference = as_lists(Reader(corpus, "validation").examples(np.arange(rows), 0).targets)
    counted, lengths = [], set()
    for rank in range(ranks):
        found = list(validation_batches(corpus, BatchLayout(rank, ranks, 7, 1)))
        lengths.add(len(found))
        labels = [row for batch in found for row in batch["labels"].tolist() if row[0] != IGNORE_INDEX]
        counted += [[label for label in row if label != IGNORE_INDEX] for row in labels]
    assert len(lengths) == 1  # as many batches on every rank
    assert sorted(counted) == sorted(reference)


def test_a_row_that_is_not_in_the_split_is_refused_with_its_size(small_corpus):
    corpus = open_corpus(small_corpus)
    rows = corpus.rows("validation")
    for row in (rows, -1):
        told = f"the split validation has {rows} rows, whose ids count from 0, got row {row}"
        with pytest.raises(UserError, match=told):
            Reader(corpus, "validation").examples([0, row], 0)


def test_a_held_out_tail_is_a_shorter_row_padded_and_masked(small_corpus, corpus_built_with_noise):
    """Every held-out token is in a row, and the padding of the last row doesn't count."""
    corpus = open_corpus(small_corpus)
    rows, length = corpus.rows("validation"), corpus.objective.raw_length
    left = corpus.manifest.splits["validation"].tokens - (rows - 1) * length
    assert 2 <= left < length  # the sample's tail
    batch = next(validation_batches(corpus, BatchLayout(0, 1, rows, 1)))
    masked = (batch["labels"][-1] != IGNORE_INDEX).sum() + batch["encoder_attention_mask"][-1].sum()
    spans = (batch["labels"][-1] >= corpus.tokenizer.vocab_size).sum()
    assert masked == left + 2 * spans + 2  # each span's sentinel on both sides, and both EOS tokens
    assert batch["encoder_attention_mask"][:-1].all()
    built = next(validation_batches(open_corpus(corpus_built_with_noise), BatchLayout(0, 1, rows, 1)))
    assert all(torch.equal(built[name], batch[name]) for name in batch)


def test_rows_that_share_their_width_hold_the_same_targets_on_any_number_of_ranks(small_corpus):
    def targets(pack: int, ranks: int) -> list[list[int]]:
        stream = Stream([open_corpus(small_corpus)], [1.0], seed=0, lanes=8, pack=pack)
        found: list[list[int]] = []
        for rank in range(ranks):
            batches = TrainingBatches(stream, BatchLayout(rank, ranks, 24 // ranks, 1))
            for step, (batch,) in enumerate(batches.loader(2, 0)):
                found += [[]] * (step == len(found))
                labels = batch["labels"]
                assert len(labels) == -(-24 // ranks // pack)
                found[step] = sorted([*found[step], *labels[labels != IGNORE_INDEX].tolist()])
        return found

    assert targets(1, 1) == targets(5, 1) == targets(5, 2) == targets(24, 1)
