"""UL2's mixture, compared with the paper's table 1 (Tay et al. 2022)."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from data_pipeline.objectives.objective import Examples, Padded
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.objectives.span_corruption import SpanCorruption
from data_pipeline.objectives.ul2 import UL2
from tests.data_pipeline.example_rows import (
    EOS,
    FIRST_SENTINEL,
    TEXT,
    VOCABULARY,
    as_lists,
    assert_rows_stand_alone,
    ragged_rows,
    restored,
)
from tests.tables import each

R, S, X = (VOCABULARY.special[token] for token in ("[R]", "[S]", "[X]"))
MODES = [R, R, S, X, X, X, X]


def rows_of(objective, numbers, seed=0):
    """A full row for each of these denoisers, its key, and the column with its denoiser."""
    rows, keys = ragged_rows(objective.raw_lengths[numbers].tolist(), seed)
    return rows, keys, {"denoiser": np.array(numbers, dtype=np.uint8)}


def test_lengths_are_those_of_t5s_helper_for_each_denoiser():
    """(3, .15), (8, .15), S, (3, .5), (8, .5), (64, .15), (64, .5): 908 − 454 + 57 + 1 = 600 − 90 + 1 + 1 = 512."""
    objective = UL2()
    assert objective.raw_lengths.tolist() == [568, 588, 512, 766, 908, 600, 1006]
    assert objective.columns == ("denoiser",)


def test_each_denoiser_announces_itself_and_masks_as_the_table_says():
    objective = UL2()
    numbers = list(range(7)) * 30
    rows, keys, columns = rows_of(objective, numbers)
    examples = objective.apply(rows, keys, VOCABULARY, columns)
    assert examples.inputs.values[:, 0].tolist() == MODES * 30
    spans = [28, 11, 0, 128, 57, 1, 8]
    masked = [85, 88, None, 383, 454, 90, 503]
    sides = as_lists(examples.inputs), as_lists(examples.targets)
    suffixes = []
    for number, inputs, targets in zip(numbers, *sides, strict=True):
        sentinels = [token for token in inputs if token >= TEXT[1]]
        assert len(sentinels) == spans[number]
        if masked[number] is None:
            suffixes.append(len(targets) - 1)
        else:
            assert len(inputs) == 513
            assert len(targets) == masked[number] + spans[number] + 1
            assert [token for token in targets if token >= TEXT[1]] == sentinels
    assert all(1 <= suffix <= 255 for suffix in suffixes)
    assert abs(np.mean(suffixes) - 128) < 4 * np.sqrt((255**2 - 1) / 12 / 30)  # a quarter of 512


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 2**40))
def test_inputs_and_targets_give_back_the_row(numbers, seed):
    rows, keys, columns = rows_of(UL2(), numbers, seed)
    examples = UL2().apply(rows, keys, VOCABULARY, columns)
    for number, row, inputs, targets in zip(
        numbers, as_lists(rows), as_lists(examples.inputs), as_lists(examples.targets), strict=True
    ):
        assert inputs[0] == MODES[number]
        if inputs[0] == S:
            assert [*inputs[1:-1], *targets[:-1]] == row
            assert inputs[-1] == targets[-1] == EOS
        else:
            one = Examples(Padded.full(np.array([inputs[1:]])), Padded.full(np.array([targets])))
            assert restored(one) == [row]


def test_a_row_depends_on_its_key_and_its_denoiser_alone():
    rows, keys, columns = rows_of(UL2(), [0, 6, 2, 4, 2, 0, 5, 3, 1, 6, 2])
    assert_rows_stand_alone(UL2(), rows, keys, VOCABULARY, columns)
    short = Padded(rows.values, np.array([568, 1006, 2, 40, 512, 9, 600, 766, 588, 2, 100]))
    assert_rows_stand_alone(UL2(), short, keys, VOCABULARY, columns)


def test_a_row_is_what_its_denoiser_makes_of_it():
    rows, keys, columns = rows_of(UL2(), [0, 0, 0])
    alone = SpanCorruption().apply(rows, keys, VOCABULARY, {})
    examples = UL2().apply(rows, keys, VOCABULARY, columns)
    assert (examples.inputs.values[:, 1:] == alone.inputs.values).all()
    assert (examples.targets.values == alone.targets.values).all()


@each("rates", [[1] * 7, [2.0, 1.0, 1.0, 0.5, 0.25, 0.125, 0.125]])
def test_denoisers_are_drawn_at_their_rates(rates):
    """The paper's rates are equal; the others make three fifths of the rows R, one S and one X."""
    plain = UL2().model_dump()
    for denoiser, rate in zip(plain["denoisers"], rates, strict=True):
        denoiser["rate"] = rate
    objective = UL2.model_validate(plain)
    keys = row_keys(0, "test", 0, np.arange(20_000))
    drawn = objective.draw(keys)
    assert drawn.dtype == np.uint8
    shares = np.bincount(drawn, minlength=7) / 20_000
    expected = np.array(rates) / sum(rates)
    assert (np.abs(shares - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000)).all()
    assert (objective.draw(keys[100:200]) == drawn[100:200]).all()


def test_the_drawn_denoiser_tells_nothing_of_the_noise():
    """The same key draws both; the mean length of first spans must not depend on the denoiser."""
    keys = row_keys(0, "test", 0, np.arange(20_000))
    drawn = UL2().draw(keys)
    rows = Padded.full(np.full((20_000, 40), TEXT[0], dtype=np.uint16))
    targets = SpanCorruption(inputs_length=64).apply(rows, keys, VOCABULARY, {}).targets.values
    first = np.argmax(targets == FIRST_SENTINEL - 1, axis=1) - 1  # of 6 tokens in 2 spans: uniform over 1 … 5
    for number in range(7):
        assert abs(first[drawn == number].mean() - 3) < 4.5 * np.sqrt(2 / (drawn == number).sum())


def test_mixtures_of_ones_own_as_a_config_file_has_them():
    objective = UL2.model_validate(
        {
            "denoisers": [
                {"mode": "R", "denoiser": {"name": "span_corruption", "inputs_length": 128}, "rate": 0.5},
                {"mode": "S", "denoiser": {"name": "prefix_lm", "length": 128}, "rate": 0.5},
            ],
            "mode_tokens": {"R": "[NLU]", "S": "[S2S]"},
        }
    )
    assert objective.raw_lengths.tolist() == [141, 128]
    assert objective.shape == (129, 128)
    vocabulary = replace(VOCABULARY, special={"[NLU]": 7, "[S2S]": 8})
    rows, keys, columns = rows_of(objective, [1, 0, 0])
    examples = objective.apply(rows, keys, vocabulary, columns)
    assert examples.inputs.values[:, 0].tolist() == [8, 7, 7]
    assert objective.problems(vocabulary) == []
    assert UL2.model_validate(objective.model_dump(mode="json")) == objective


def test_a_vocabulary_without_mode_tokens_or_sentinels_is_refused():
    problems = UL2().problems(replace(VOCABULARY, special={"[R]": 3}, sentinels=100))
    assert len(problems) == 3
    assert "128 spans" in problems[0]
    assert "[S]" in problems[1]
    assert "[X]" in problems[2]
    assert UL2().problems(VOCABULARY) == []


def test_the_shipped_mixture_is_that_of_t5gemma_2():
    """(mean span, rate): (3, .15), (12, .5), (32, .15), (32, .5) and one span of three quarters, drawn 1:1:1:1:4."""
    objective = load("configs/corpora/c4-ul2-t5gemma2.yaml", [], CorpusConfig).rows.objective
    assert isinstance(objective, UL2)
    assert objective.shape == (513, 512)
    numbers = list(range(5)) * 20
    rows, keys, columns = rows_of(objective, numbers)
    examples = objective.apply(rows, keys, VOCABULARY, columns)
    found = {}
    for number, inputs, targets in zip(numbers, *map(as_lists, (examples.inputs, examples.targets)), strict=True):
        spans = sum(token >= TEXT[1] for token in inputs)
        masked = len(targets) - 1 - spans
        found[number] = round(masked / spans, 1), round(masked / objective.raw_lengths[number], 2)
    assert found == {0: (3.0, 0.15), 1: (12.1, 0.5), 2: (30.0, 0.15), 3: (33.0, 0.5), 4: (506.0, 0.75)}
    shares = np.bincount(objective.draw(np.arange(80_000, dtype=np.uint64))) / 10_000
    assert np.allclose(shares, [1, 1, 1, 1, 4], atol=0.06)
