"""Masked language modelling, compared with BERT's numbers (Devlin et al. 2018)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Padded
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.text.vocabulary import Vocabulary
from tests.support.example_rows import VOCABULARY as NO_MASK
from tests.support.example_rows import as_lists, assert_rows_stand_alone, ragged_rows
from tests.support.tables import each

UNK, CLS, SEP, MASK, TEXT = 1, 2, 3, 4, (10, 32_000)
MARKS, STARTS = {"[CLS]": CLS, "[SEP]": SEP}, np.arange(32_000) % 3 != 0
BERT = Vocabulary(32_000, TEXT, pad=0, eos=SEP, unk=UNK, mask=MASK, special=MARKS, word_starts=STARTS)
BOS, EOS = 6, 7
ROBERTA = replace(BERT, bos=BOS, eos=EOS, special={})


LENGTHS = st.lists(st.integers(2, 80), min_size=1, max_size=6)


@settings(max_examples=80)
@given(LENGTHS, st.floats(0.01, 0.9), st.booleans(), st.integers(0, 2**40))
def test_inputs_and_predicted_targets_give_back_the_row(lengths, ratio, words, seed):
    objective = MaskedLM(length=max(3, max(lengths) + 2), mask_ratio=ratio, whole_words=words)
    rows, keys = ragged_rows(lengths, seed)
    examples = objective.apply(rows, keys, BERT, {})
    assert (examples.inputs.lengths == examples.targets.lengths).all()
    assert examples.inputs.lengths.max() == objective.shape[0] == objective.shape[1]
    merged = np.where(examples.predicted, examples.targets.values, examples.inputs.values)
    assert (merged == examples.targets.values).all()
    for row, target in zip(as_lists(rows), as_lists(examples.targets), strict=True):
        assert target == [CLS, *row, SEP]
    special = (examples.targets.values < TEXT[0]) | ~examples.targets.filled
    assert not (special & examples.predicted).any()
    assert examples.predicted.any(axis=1).all()


@each("whole_words", [False, True])
def test_a_rows_mask_depends_on_its_key_alone(whole_words):
    rows, keys = ragged_rows([61, 5, 30, 61, 2, 17, 60, 33, 9, 61])
    assert_rows_stand_alone(MaskedLM(length=64, whole_words=whole_words), rows, keys, BERT, {})


@each("ratio", [0.15, 0.3])
def test_exactly_the_ratio_of_the_text_tokens_is_predicted(ratio):
    """Ids below those of text are special and don't count; unknown pieces do."""
    rows, keys = ragged_rows(list(range(1, 101)) * 3)
    generator = np.random.default_rng(1)
    rows.values[generator.random(rows.values.shape) < 0.1] = SEP
    rows.values[generator.random(rows.values.shape) < 0.1] = UNK
    examples = MaskedLM(length=102, mask_ratio=ratio).apply(rows, keys, BERT, {})
    unknown = 0
    for row, predicted, target in zip(as_lists(rows), examples.predicted, examples.targets.values, strict=True):
        candidates = sum(token != SEP for token in row)
        assert predicted.sum() == (max(1, round(ratio * candidates)) if candidates else 0)
        unknown += (target[predicted] == UNK).sum()
    assert unknown > 50


def test_every_place_is_predicted_equally_often():
    """6 of 40 tokens are predicted: each with probability 0.15, each pair with probability 6·5 / (40·39)."""
    rows = Padded.full(np.full((20_000, 40), TEXT[0]))
    keys = row_keys(0, "test", 0, np.arange(20_000))
    predicted = MaskedLM(length=42).apply(rows, keys, BERT, {}).predicted[:, 1:-1]
    assert (predicted.sum(axis=1) == 6).all()
    assert np.abs(predicted.mean(axis=0) - 0.15).max() < 4.5 * np.sqrt(0.15 * 0.85 / 20_000)
    pairs = predicted.astype(np.float64).T @ predicted / 20_000
    expected = 6 * 5 / (40 * 39)
    assert np.abs(pairs[~np.eye(40, dtype=bool)] - expected).max() < 5 * np.sqrt(expected / 20_000)


@each("mask, random", [(0.8, 0.1), (0.5, 0.3), (1.0, 0.0), (0.0, 1.0)])
def test_shares_of_masked_random_and_unchanged_tokens(mask, random):
    objective = MaskedLM(length=102, mask_share=mask, random_share=random)
    rows = Padded.full(np.full((4000, 100), TEXT[0]))
    examples = objective.apply(rows, row_keys(0, "test", 0, np.arange(4000)), BERT, {})
    seen = examples.inputs.values[examples.predicted]
    assert len(seen) == 4000 * 15
    drawn = seen[(seen != MASK) & (seen != TEXT[0])]
    for count, share in (
        ((seen == MASK).sum(), mask),
        ((seen == TEXT[0]).sum(), 1 - mask - random),
        (len(drawn), random),  # a random token is the old one in 1 of 31,990 cases
    ):
        assert abs(count / len(seen) - share) < 4 * np.sqrt(share * (1 - share) / len(seen)) + 2e-4
    if random:
        width = TEXT[1] - TEXT[0]
        quarters = np.bincount((drawn - TEXT[0]) * 4 // width, minlength=4) / len(drawn)
        assert np.abs(quarters - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / len(drawn))


def test_words_are_predicted_whole_and_within_the_share():
    rows, keys = ragged_rows([100] * 2000 + list(range(1, 100)) * 5)
    examples = MaskedLM(length=102, whole_words=True).apply(rows, keys, BERT, {})
    shortfall = []
    for row, predicted in zip(as_lists(rows), examples.predicted[:, 1:], strict=True):
        words = np.cumsum([place == 0 or token % 3 != 0 for place, token in enumerate(row)])
        chosen = np.unique(words[predicted[: len(row)]])
        sizes = np.bincount(words)
        assert predicted.sum() == sizes[chosen].sum()
        wanted = max(1, round(0.15 * len(row)))
        assert predicted.sum() <= wanted or len(chosen) == 1
        assert predicted.sum() > wanted - sizes.max()  # otherwise any word would still have fitted
        shortfall.append((wanted - predicted.sum()) / wanted)
    assert 0 <= np.mean(shortfall[:2000]) < 0.1


def test_short_and_long_words_are_equally_likely():
    """A row has 20 words of one token and 10 of two, so the first word drawn has two tokens in a third of the rows."""
    one, two = TEXT[0] + 0, TEXT[0] + 2  # 10 begins a word, 12 doesn't
    assert BERT.word_starts[one]
    assert not BERT.word_starts[two]
    row = [one] * 20 + [one, two] * 10
    keys = row_keys(0, "test", 0, np.arange(20_000))
    rows = Padded.full(np.tile(np.array(row), (20_000, 1)))
    examples = MaskedLM(length=42, mask_ratio=0.04, whole_words=True).apply(rows, keys, BERT, {})
    predicted = examples.predicted[:, 1:-1]  # round(0.04 × 40) = 2 tokens
    long = predicted[:, 20:].any(axis=1) & ~predicted[:, :20].any(axis=1)
    both = predicted.sum(axis=1) == 2
    assert (predicted[long & both, 21::2] == predicted[long & both, 20::2]).all()
    expected = 1 / 3
    assert abs(long.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000)
    # only one short word: it was drawn first, a long one second
    assert abs((~both).mean() - 2 / 3 * 10 / 29) < 4 * np.sqrt(0.23 * 0.77 / 20_000)


def test_marks_are_those_that_the_vocabulary_has():
    rows, keys = ragged_rows([5])
    [row] = as_lists(rows)
    marks = (BERT, [CLS], [SEP]), (ROBERTA, [BOS], [EOS]), (replace(ROBERTA, bos=None), [], [EOS])
    for vocabulary, before, after in marks:
        examples = MaskedLM(length=7).apply(rows, keys, vocabulary, {})
        assert as_lists(examples.targets) == [[*before, *row, *after]]


def test_a_vocabulary_without_the_tokens_is_refused():
    assert MaskedLM(whole_words=True).problems(BERT) == MaskedLM(whole_words=True).problems(ROBERTA) == []
    assert "mask token" in MaskedLM().problems(NO_MASK)[0]
    assert "word" in MaskedLM(whole_words=True).problems(replace(BERT, word_starts=np.zeros(0, dtype=bool)))[0]


def test_the_key_next_sentence_is_refused_with_the_way_out_unless_it_is_off():
    assert check({"name": "masked_lm", "next_sentence": False}, MaskedLM, "a.yaml") == MaskedLM()
    with pytest.raises(UserError, match=r"^a.yaml: next_sentence: gone; leave it out: an encoder learns from masked"):
        check({"name": "masked_lm", "next_sentence": True}, MaskedLM, "a.yaml")
