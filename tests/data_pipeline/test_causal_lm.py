"""Causal language modelling: the targets are the inputs shifted by one, also of texts whose middle comes last."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.causal_infilling import CausalInfilling
from data_pipeline.objectives.objective import Padded
from tests.data_pipeline.example_rows import EOS, VOCABULARY, as_lists, make_rows, ragged_rows


@settings(max_examples=40)
@given(st.lists(st.integers(2, 50), min_size=1, max_size=8), st.integers(0, 2**40))
def test_inputs_and_targets_give_back_the_row(lengths, seed):
    objective = CausalLM(length=max(lengths) - 1)
    rows, keys = ragged_rows(lengths, seed)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    sides = as_lists(examples.inputs), as_lists(examples.targets)
    for row, inputs, targets in zip(as_lists(rows), *sides, strict=True):
        assert [inputs[0], *targets] == [*inputs, targets[-1]] == row


def test_a_row_of_t_plus_1_tokens_gives_t_of_each():
    objective = CausalLM(length=200)
    rows, keys = make_rows(3, 201)
    original = rows.values.copy()
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert (examples.inputs.values == original[:, :200]).all()
    assert (examples.targets.values == original[:, 1:]).all()
    examples.inputs.values[:] = 0
    assert (rows.values == original).all()


def test_ids_above_65535_stay_what_they_are():
    rows = Padded.full(np.array([[70_000, 70_001, 70_002]], dtype=np.uint32))
    examples = CausalLM(length=2).apply(rows, np.zeros(1, dtype=np.uint64), VOCABULARY, {})
    assert examples.targets.values.tolist() == [[70_001, 70_002]]
    assert examples.targets.values.dtype == np.uint32


def test_tokens_after_marks_may_be_left_without_a_loss():
    values = np.array([[7, EOS, 9, 8, EOS], [5, 6, EOS, 8, 9]], dtype=np.uint16)
    rows, keys = Padded(values, np.array([5, 4])), np.zeros(2, dtype=np.uint64)
    assert CausalLM(length=4).apply(rows, keys, VOCABULARY, {}).predicted is None
    examples = CausalLM(length=4, after_marks=False).apply(rows, keys, VOCABULARY, {})
    assert examples.predicted.tolist() == [[True, False, True, True], [True, True, False, False]]


# ---- the middle last

MARKS = [VOCABULARY.first_sentinel - number for number in range(3)]


def text_of(read):
    """The text of a row in which the middle comes last; its parts' lengths."""
    first, second, third = (read.index(mark) for mark in MARKS)
    assert first == 0
    before, after, middle = read[1:second], read[second + 1 : third], read[third + 1 :]
    return before + middle + after, (len(before), len(middle), len(after))


@settings(max_examples=40)
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
