"""Causal language modelling: the targets are the inputs shifted by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.objectives import Padded
from data_pipeline.objectives.causal import CausalLM
from tests.data_pipeline.example_rows import EOS, VOCABULARY, as_lists, assert_rows_stand_alone, make_rows, ragged_rows


@settings(max_examples=40, deadline=None)
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
    assert (objective.raw_length, objective.shape, objective.sentinels) == (201, (200, 200), 0)
    rows, keys = make_rows(3, 201)
    original = rows.values.copy()
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert (examples.inputs.values == original[:, :200]).all()
    assert (examples.targets.values == original[:, 1:]).all()
    examples.inputs.values[:] = 0
    assert (rows.values == original).all()


def test_rows_stand_alone():
    for rows, keys in (make_rows(8, 20), ragged_rows([20, 3, 2, 20, 9, 4])):
        assert_rows_stand_alone(CausalLM(length=19), rows, keys)


def test_a_row_of_one_token_is_not_accepted():
    assert [length for length in range(8) if CausalLM(length=5).accepts(length)] == [2, 3, 4, 5, 6]
    with pytest.raises(ValidationError):
        CausalLM(length=0)


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
