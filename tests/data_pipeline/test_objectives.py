"""What holds for all objectives: rows stand alone, lengths follow from formulas, settings without sense are refused."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.objectives.causal import CausalLM
from data_pipeline.objectives.causal_infilling import CausalInfilling
from data_pipeline.objectives.denoising import Denoising
from data_pipeline.objectives.iid_denoising import IidDenoising
from data_pipeline.objectives.in_one_row import InOneRow
from data_pipeline.objectives.masked_lm import MaskedLM
from data_pipeline.objectives.objective import Examples, Padded
from data_pipeline.objectives.prefix_lm import FullLM, PrefixLM
from data_pipeline.objectives.randomness import permutation, random_bits, row_keys, uniform
from data_pipeline.objectives.span_corruption import SpanCorruption
from data_pipeline.objectives.ul2 import UL2
from tests.data_pipeline.example_rows import (
    EOS,
    FIRST_SENTINEL,
    TEXT,
    VOCABULARY,
    as_lists,
    assert_rows_stand_alone,
    make_rows,
    ragged_rows,
    restored,
)
from tests.tables import each

SHORT, LONG = [20, 3, 2, 20, 9, 4], [64, 12, 40, 64, 12, 4, 34, 64, 62, 6]


@each(
    "objective, length, lengths",
    [
        (CausalLM(length=19), 20, SHORT),
        (CausalInfilling(length=19), 20, SHORT),
        (InOneRow(of=PrefixLM(length=20)), 20, SHORT),
        (PrefixLM(length=64), 64, LONG),
        (PrefixLM(length=64, noise_density=0.2), 64, LONG),
        (PrefixLM(length=34, packed=True), 64, LONG),
        (FullLM(length=65), 64, LONG),
        (IidDenoising(inputs_length=64), 63, [63, 1, 40, 63, 2, 7, 63, 30, 5, 63]),
        (SpanCorruption(inputs_length=64), 70, [70, 12, 41, 70, 12, 2, 33, 70, 69, 5]),
        (SpanCorruption(inputs_length=64, random_roll=True), 69, [69, 12, 41, 69, 12, 2, 33, 69, 68, 5]),
    ],
)
def test_an_example_depends_on_its_row_and_key_alone(objective, length, lengths):
    assert objective.raw_length == length
    for rows, keys in (make_rows(16, length), ragged_rows(lengths)):
        assert_rows_stand_alone(objective, rows, keys)


def sides_of(examples: Examples) -> Iterator[tuple[list[int], list[int]]]:
    return zip(as_lists(examples.inputs), as_lists(examples.targets), strict=True)


def shifted(examples: Examples) -> list[list[int]]:
    rows = [[inputs[0], *targets] for inputs, targets in sides_of(examples)]
    assert [row[:-1] for row in rows] == as_lists(examples.inputs)
    return rows


def text_of(read: list[int]) -> tuple[list[int], tuple[int, int, int]]:
    """The text of a row in which the middle comes last; its parts' lengths."""
    first, second, third = (read.index(FIRST_SENTINEL - number) for number in range(3))
    assert first == 0
    before, after, middle = read[1:second], read[second + 1 : third], read[third + 1 :]
    return before + middle + after, (len(before), len(middle), len(after))


def middle_last(examples: Examples) -> list[list[int]]:
    """Of rows of more than four tokens, three give way to marks."""
    return [text_of(row)[0] if row[0] == FIRST_SENTINEL else row for row in shifted(examples)]


def split(examples: Examples) -> list[list[int]]:
    sides = list(sides_of(examples))
    assert all(inputs[-1] == targets[-1] == EOS for inputs, targets in sides)
    assert all(len(targets) > 1 for _, targets in sides)
    return [[*inputs[:-1], *targets[:-1]] for inputs, targets in sides]


LENGTHS, DENSITIES = st.integers(8, 120), st.floats(0.05, 0.45)
SPANS = {"inputs_length": st.integers(16, 200), "mean_span_length": st.floats(2.0, 8.0), "random_roll": st.booleans()}


@each(
    "objectives, give_back",
    [
        (st.builds(CausalLM, length=LENGTHS), shifted),
        (st.builds(CausalInfilling, length=LENGTHS, fim_rate=st.just(1.0)), middle_last),
        (st.builds(PrefixLM, length=LENGTHS, noise_density=DENSITIES), split),
        (st.builds(FullLM, length=LENGTHS), split),
        (st.builds(IidDenoising, inputs_length=LENGTHS, noise_density=st.floats(0.01, 0.95)), restored),
        (st.builds(SpanCorruption, noise_density=DENSITIES, **SPANS), restored),
    ],
)
def test_inputs_and_targets_give_back_the_row(objectives, give_back):
    @settings(max_examples=40)
    @given(objectives, st.lists(st.integers(1, 200), min_size=1, max_size=8), st.integers(0, 2**40))
    def check(objective, lengths, seed):
        tails = [length for length in lengths if length < objective.raw_length and objective.accepts(length)]
        rows, keys = ragged_rows([objective.raw_length, *tails], seed)
        examples = objective.apply(rows, keys, VOCABULARY, {})
        cut = 3 if give_back is middle_last else 0
        assert give_back(examples) == [row[: len(row) - cut * (len(row) > 4)] for row in as_lists(rows)]
        for side, longest in zip((examples.inputs, examples.targets), objective.shape, strict=True):
            assert side.lengths.max() <= longest
            assert give_back is not restored or (side.values >= TEXT[1]).sum(axis=1).max() <= objective.sentinels

    check()


@each(
    "objective, raw, shape, sentinels",
    [
        # as T5's random_spans_helper has them
        *(
            (SpanCorruption(inputs_length=inputs, noise_density=density, mean_span_length=span), raw, shape, None)
            for inputs, density, span, raw, targets in [
                *((512, 0.15, 3, 568, 114), (1024, 0.15, 3, 1137, 229), (256, 0.15, 3, 284, 58)),
                *((128, 0.15, 3, 141, 29), (512, 0.15, 8, 588, 100), (512, 0.15, 32, 598, 94)),
                *((512, 0.5, 3, 766, 512), (512, 0.5, 32, 990, 512), (512, 0.5, 64, 1006, 512)),
                *((64, 0.2, 2, 70, 22), (64, 0.2, 1, 63, 27)),
            ]
            for shape in [(inputs, targets)]
        ),
        # rolled, a span may be in two parts: at most 567 − 85 + 29 + 1 = 512 inputs; 568 tokens would give 513
        (SpanCorruption(random_roll=True), 567, (512, 115), 29),
        # (3, .15), (8, .15), S, (3, .5), (8, .5), (64, .15), (64, .5), of which the last has 1006 tokens and the third
        # none masked; round(383 / 3) spans; the inputs of 512 begin with the mode's token
        (UL2(), 1006, (513, 512), 128),
        (CausalLM(length=200), 201, (200, 200), 0),
        (CausalInfilling(length=200), 201, (200, 200), 3),
        (PrefixLM(), 512, (512, 512), 0),
        (PrefixLM(noise_density=0.25), 512, (512, 256), 0),
        (PrefixLM(packed=True), 1020, (512, 512), 0),
        (FullLM(), 511, (1, 512), 0),
        (MaskedLM(), 510, (512, 512), 0),
        (MaskedLM(length=128, next_sentence=True), 125, (128, 128), 0),
        (Denoising(length=512), 510, (512, 512), 0),
        (InOneRow(of=SpanCorruption(inputs_length=128)), 141, (156, 156), 7),  # 21 masked: 7 spans
    ],
)
def test_lengths_follow_from_the_settings(objective, raw, shape, sentinels):
    assert (objective.raw_length, objective.shape) == (raw, shape)
    assert sentinels in (None, objective.sentinels)


@each(
    "objective, most, accepted",
    [
        (CausalLM(length=5), 8, range(2, 7)),
        (CausalInfilling(length=5), 8, range(2, 7)),
        (PrefixLM(length=10), 12, range(2, 11)),
        (PrefixLM(length=7, packed=True), 12, range(4, 12, 2)),
        (FullLM(length=10), 12, range(1, 10)),
        (UL2(), 1100, range(2, 1100)),  # a tail may be longer than another denoiser's rows
        (MaskedLM(length=7), 8, range(1, 6)),
        (MaskedLM(length=7, next_sentence=True), 8, range(2, 5)),
        (Denoising(length=512), 520, range(1, 511)),
    ],
)
def test_a_tail_is_accepted_if_it_can_be_an_example(objective, most, accepted):
    assert [length for length in range(most) if objective.accepts(length)] == list(accepted)


TOO_MANY = "spans can't be kept apart"
NO_ROOM = "leaves no room for a masked span"


def mixture(mode: str, denoiser: dict[str, object], **more: object) -> dict[str, object]:
    return {"denoisers": [{"mode": mode, "denoiser": denoiser, **more}]}


@each(
    "kind, settings, reason",
    [
        (SpanCorruption, {"noise_density": 0.0}, "greater than 0"),
        (SpanCorruption, {"noise_density": 0.8, "mean_span_length": 1.0}, TOO_MANY),
        (SpanCorruption, {"inputs_length": 2}, NO_ROOM),
        (SpanCorruption, {"inputs_length": 3, "random_roll": True}, NO_ROOM),
        (IidDenoising, {"noise_density": 1.0}, "noise_density"),
        (CausalLM, {"length": 0}, "length"),
        (CausalInfilling, {"length": 3}, "length"),
        (CausalInfilling, {"fim_rate": 0.0}, "fim_rate"),
        (PrefixLM, {"length": 1}, "greater than or equal to 2"),
        (PrefixLM, {"noise_density": 0.6}, "less than or equal to 0.5"),
        (PrefixLM, {"packed": True, "noise_density": 0.25}, "half of their tokens"),
        (PrefixLM, {"packed": True, "length": 3}, "can't hold parts of two examples"),
        (FullLM, {"length": 1}, "length"),
        (InOneRow, {"of": PrefixLM(length=40, packed=True)}, "hold two examples"),
        (MaskedLM, {"mask_ratio": 0.0}, "greater than 0"),
        (MaskedLM, {"mask_share": 0.8, "random_share": 0.3}, "random_share: with mask_share 0.8 it can be 0.2 at most"),
        (MaskedLM, {"length": 2}, "greater than or equal to 3"),
        (MaskedLM, {"length": 4, "next_sentence": True}, "can't hold two texts"),
        (UL2, {"denoisers": []}, "at least 1 item"),
        (UL2, mixture("R", {"name": "span_corruption"}, rate=0.0), "greater than 0"),
        (UL2, mixture("Q", {"name": "span_corruption"}), "'R', 'S' or 'X'"),
        (UL2, mixture("S", {"name": "prefix_lm", "packed": True}), "two examples"),
        (UL2, mixture("S", {"name": "full_lm"}), "span_corruption.*prefix_lm"),
        (UL2, {"mode_tokens": {"R": "[R]", "X": "[X]"}}, "mode_tokens: no token for mode S"),
        *(
            (Denoising, wrong, next(iter(wrong)))
            for wrong in [
                *({"mask_ratio": 1.0}, {"insert_ratio": 1.0}, {"random_ratio": 1.1}, {"rotate_probability": -0.1}),
                *({"permute_sentence_ratio": -1}, {"replace_length": 2}, {"span_length": "span-poisson"}),
                *({"length": 2}, {"mask_ratio": 0, "permute_sentence_ratio": 0}, {"length": 4, "insert_ratio": 0.9}),
                {"poisson_lambda": 17.0},  # e^−17 < 1e-7: only spans of no words would be left
            ]
        ),
    ],
)
def test_settings_without_sense_are_refused(kind, settings, reason):
    with pytest.raises(ValidationError, match=reason):
        kind.model_validate(settings)


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


def test_rows_whose_middle_comes_last_are_chosen_at_the_rate_and_cut_anywhere():
    rows, keys = make_rows(4000, 20)
    read = shifted(CausalInfilling(length=19, fim_rate=0.25).apply(rows, keys, VOCABULARY, {}))
    cut = [text_of(one)[1] for one in read if one[0] == FIRST_SENTINEL]
    assert 0.22 < len(cut) / 4000 < 0.28
    assert np.abs(np.mean(cut, axis=0) - 17 / 3).max() < 0.6  # of two uniform cuts, each part has a third on average
    assert {lengths[0] for lengths in cut} == set(range(18))
    assert sum(one == row for one, row in zip(read, as_lists(rows), strict=True)) == 4000 - len(cut)


# ---- randomness


def test_epochs_and_purposes_draw_different_noise():
    rows = np.arange(1000)
    keys = [row_keys(0, "a", 0, rows), row_keys(0, "a", 1, rows), row_keys(0, "b", 0, rows), row_keys(1, "a", 0, rows)]
    assert len(np.unique(np.concatenate(keys))) == 4000
    assert (row_keys(0, "a", np.repeat([0, 1], 500), rows)[:500] == keys[0][:500]).all()


def test_random_bits_are_uniform_and_uncorrelated():
    bits = random_bits(row_keys(0, "test", 0, np.arange(4000)), 0, 64)
    shares = [(bits >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    assert np.abs(np.array(shares) - 0.5).max() < 5 * 0.5 / np.sqrt(bits.size)
    correlation = np.corrcoef((bits.astype(np.float64) / 2.0**64).T) - np.eye(64)
    assert np.abs(correlation).max() < 5 / np.sqrt(4000)


def test_numbers_below_a_count_are_equally_likely_and_a_permutation_holds_each_once():
    numbers = uniform(random_bits(row_keys(0, "test", 0, np.arange(20_000)), 0, 1)[:, 0], 7)
    counts = np.bincount(numbers, minlength=7)
    assert len(counts) == 7
    assert np.abs(counts / 20_000 - 1 / 7).max() < 4 * np.sqrt(1 / 7 * 6 / 7 / 20_000)
    assert sorted(permutation(7, 1000).tolist()) == list(range(1000))
    assert permutation(7, 1000).tolist() != permutation(8, 1000).tolist()
