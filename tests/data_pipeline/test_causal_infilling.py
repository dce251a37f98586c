"""Causal language modelling of texts whose middle comes last."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.causal_infilling import CausalInfilling
from tests.data_pipeline.example_rows import VOCABULARY, as_lists, assert_rows_stand_alone, make_rows, ragged_rows

MARKS = [VOCABULARY.first_sentinel - number for number in range(3)]


def text_of(read):
    """The text of a row in which the middle comes last; its parts' lengths."""
    first, second, third = (read.index(mark) for mark in MARKS)
    assert first == 0
    before, after, middle = read[1:second], read[second + 1 : third], read[third + 1 :]
    return before + middle + after, (len(before), len(middle), len(after))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 50), min_size=1, max_size=8), st.integers(0, 2**40))
def test_rows_keep_their_text_but_for_three_tokens(lengths, seed):
    objective = CausalInfilling(length=50, fim_rate=1.0)
    rows, keys = ragged_rows(lengths, seed)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    for row, inputs, targets in zip(as_lists(rows), as_lists(examples.inputs), as_lists(examples.targets), strict=True):
        read = [inputs[0], *targets]
        assert [*inputs, targets[-1]] == read
        assert (text_of(read)[0] if len(row) > 4 else read) == (row[:-3] if len(row) > 4 else row)


def test_cuts_are_anywhere_and_rows_are_chosen_at_the_rate():
    rows, keys = make_rows(4000, 20)
    read = [
        [inputs[0], *targets]
        for examples in [CausalInfilling(length=19, fim_rate=0.25).apply(rows, keys, VOCABULARY, {})]
        for inputs, targets in zip(as_lists(examples.inputs), as_lists(examples.targets), strict=True)
    ]
    cut = [text_of(one)[1] for one in read if one[0] == MARKS[0]]
    assert 0.22 < len(cut) / 4000 < 0.28
    means = np.mean(cut, axis=0)
    assert np.abs(means - 17 / 3).max() < 0.6  # of two uniform cuts, each part has a third on average
    assert {lengths[0] for lengths in cut} == set(range(18))
    plain = CausalLM(length=19).apply(rows, keys, VOCABULARY, {})
    same = [one for one, own in zip(read, as_lists(plain.inputs), strict=True) if one[:-1] == own]
    assert len(same) == 4000 - len(cut)


def test_rows_stand_alone():
    for rows, keys in (make_rows(8, 20), ragged_rows([20, 3, 2, 20, 9, 4])):
        assert_rows_stand_alone(CausalInfilling(length=19), rows, keys)


def test_settings():
    objective = CausalInfilling(length=200)
    assert (objective.raw_length, objective.shape, objective.sentinels) == (201, (200, 200), 3)
    assert [length for length in range(8) if CausalInfilling(length=5).accepts(length)] == [2, 3, 4, 5, 6]
    for wrong in ({"length": 3}, {"fim_rate": 0.0}, {"fim_rate": 1.5}):
        with pytest.raises(ValidationError):
            CausalInfilling(**wrong)
