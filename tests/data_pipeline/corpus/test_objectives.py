"""What holds for all objectives; UL2's mixture beside its paper's table 1 (Tay et al. 2022); prefix language modelling;
span corruption beside T5's (Raffel et al. 2020); and i.i.d. denoising beside the binomial distribution."""

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.example_rows import balanced
from data_pipeline.corpus.objectives import iid_denoising, on_tokens
from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.iid_denoising import IidDenoising
from data_pipeline.corpus.objectives.infilling import Infilling
from data_pipeline.corpus.objectives.language_modelling import CausalInfilling, CausalLM, FullLM, PrefixLM
from data_pipeline.corpus.objectives.masked_lm import MaskedLM
from data_pipeline.corpus.objectives.objective import Examples, Padded, together
from data_pipeline.corpus.objectives.randomness import permutation, random_bits, row_keys, uniform
from data_pipeline.corpus.objectives.span_corruption import SpanCorruption, with_sentinels
from data_pipeline.corpus.objectives.text_to_text import InOneRow
from data_pipeline.corpus.objectives.ul2 import UL2, Denoiser
from data_pipeline.loading.batch_layout import IGNORE_INDEX
from data_pipeline.loading.batches import as_batch
from tests.support.example_rows import (
    EOS,
    FIRST_SENTINEL,
    PAD,
    TEXT,
    VOCABULARY,
    as_lists,
    assert_alike,
    assert_rows_stand_alone,
    make_rows,
    ragged_rows,
    restored,
)
from tests.support.tables import each

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
        (Infilling(length=65, whole_rate=0.3), 64, LONG),
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


def filled(examples: Examples) -> list[list[int]]:
    """The span in its place; it has a token or more."""
    rows = []
    for inputs, targets in sides_of(examples):
        place = inputs.index(FIRST_SENTINEL)
        assert (targets[0], inputs[-1], targets[-1]) == (FIRST_SENTINEL, EOS, EOS)
        assert len(targets) > 2
        rows.append([*inputs[:place], *targets[1:-1], *inputs[place + 1 : -1]])
    return rows


LENGTHS, DENSITIES = st.integers(8, 120), st.floats(0.05, 0.45)
SPANS = {"inputs_length": st.integers(16, 200), "mean_span_length": st.floats(2.0, 8.0), "random_roll": st.booleans()}


@each(
    "objectives, give_back",
    [
        (st.builds(CausalLM, length=LENGTHS), shifted),
        (st.builds(CausalInfilling, length=LENGTHS, fim_rate=st.just(1.0)), middle_last),
        (st.builds(PrefixLM, length=LENGTHS, noise_density=DENSITIES), split),
        (st.builds(FullLM, length=LENGTHS), split),
        (st.builds(Infilling, length=LENGTHS, whole_rate=st.floats(0, 1)), filled),
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
        # the longest: 1,165,084 − 174,763 + 58,254 + 1 inputs, and 174,763 + 58,254 + 1 targets
        (SpanCorruption(inputs_length=1 << 20), 1_165_084, (1 << 20, 233_018), 58_254),
        (Denoising(length=1 << 20, insert_ratio=0.5), 699_048, (1 << 20, 699_050), 0),  # 699,050 + 349,525 marked
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
        (Infilling(), 511, (512, 513), 1),
        (MaskedLM(), 510, (512, 512), 0),
        (MaskedLM(length=128), 126, (128, 128), 0),
        (Denoising(length=512), 510, (512, 512), 0),
        (InOneRow(of=SpanCorruption(inputs_length=128)), 141, (156, 156), 7),  # 21 masked: 7 spans
    ],
)
def test_lengths_follow_from_the_settings(objective, raw, shape, sentinels):
    assert (objective.raw_length, objective.shape) == (raw, shape)
    assert sentinels in (None, objective.sentinels)


def test_the_limits_of_iid_denoising_are_those_of_the_counts_distribution():
    """Of n tokens, m are masked in k runs in C(m − 1, k − 1) · C(n − m + 1, k) ways. In long rows numbers of runs are
    distributed normally, with the mean n p q + p² and the variance n p q (1 − 3 p q), of which one in a million is 4.75
    standard deviations above the mean."""
    for length, density in itertools.product((1, 2, 7, 40), (0.02, 0.15, 0.5, 0.9)):
        runs, added = Counter({0: (1 - density) ** length}), Counter({0: (1 - density) ** length})
        for masked, k in itertools.product(range(1, length + 1), repeat=2):
            ways = math.comb(masked - 1, k - 1) * math.comb(length - masked + 1, k)
            probability = ways * density**masked * (1 - density) ** (length - masked)
            runs[k] += probability
            added[masked + k] += probability
        objective = IidDenoising(inputs_length=length + 1, noise_density=density)
        limits = objective.sentinels - 1, objective.shape[1] - 2
        for limit, counts in zip(limits, (runs, added), strict=True):
            assert sum(p for count, p in counts.items() if count > limit) <= 1e-6
            assert sum(p for count, p in counts.items() if count >= limit) > 1e-6
    n, pq = 100_000, 0.15 * 0.85
    expected = n * pq + 0.15**2 + 4.753 * math.sqrt(n * pq * (1 - 3 * pq))
    assert IidDenoising(inputs_length=n + 1).sentinels - 1 == pytest.approx(expected, abs=5)


@each(
    "objective, most, accepted",
    [
        (CausalLM(length=5), 8, range(2, 7)),
        (CausalInfilling(length=5), 8, range(2, 7)),
        (PrefixLM(length=10), 12, range(2, 11)),
        (PrefixLM(length=7, packed=True), 12, range(4, 12, 2)),
        (FullLM(length=10), 12, range(1, 10)),
        (Infilling(length=10), 12, range(1, 10)),
        (UL2(), 1100, range(2, 1100)),  # a tail may be longer than another denoiser's rows
        (MaskedLM(length=7), 8, range(1, 6)),
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
        (Infilling, {"length": 1}, "length"),
        (Infilling, {"whole_rate": 1.5}, "whole_rate"),
        (InOneRow, {"of": PrefixLM(length=40, packed=True)}, "hold two examples"),
        (MaskedLM, {"mask_ratio": 0.0}, "greater than 0"),
        (MaskedLM, {"mask_share": 0.8, "random_share": 0.3}, "random_share: with mask_share 0.8 it can be 0.2 at most"),
        (MaskedLM, {"length": 2}, "greater than or equal to 3"),
        (UL2, {"denoisers": []}, "at least 1 item"),
        (UL2, mixture("R", {"name": "span_corruption"}, rate=0.0), "greater than 0"),
        (UL2, mixture("Q", {"name": "span_corruption"}), "'R', 'S' or 'X'"),
        (UL2, mixture("S", {"name": "prefix_lm", "packed": True}), "two examples"),
        (UL2, mixture("S", {"name": "full_lm"}), "span_corruption.*prefix_lm.*infilling"),
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


def test_all_spans_are_equally_likely_and_whole_rows_come_at_their_rate():
    """A row of 4 tokens has 10 spans; one is the whole row."""
    rows, keys = make_rows(40_000, 4)
    spans = Counter(zip(*spans_of(Infilling(length=5), rows, keys), strict=True))
    assert set(spans) == {(start, end) for end in range(1, 5) for start in range(end)}
    assert max(abs(count / 40_000 - 0.1) for count in spans.values()) < 4 * math.sqrt(0.09 / 40_000)
    starts, ends = spans_of(Infilling(length=5, whole_rate=0.5), rows, keys)
    whole = np.mean((starts == 0) & (ends == 4))
    assert abs(whole - 0.55) < 4 * math.sqrt(0.25 / 40_000)


def spans_of(objective: Infilling, rows: Padded, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends (n,) of the masked spans."""
    examples = objective.apply(rows, keys, VOCABULARY, {})
    starts = np.argmax(examples.inputs.values == FIRST_SENTINEL, axis=1)
    return starts, starts + examples.targets.lengths - 2


# ---- randomness


def test_epochs_and_purposes_draw_different_noise():
    rows = np.arange(1000)
    keys = [row_keys(0, "a", 0, rows), row_keys(0, "a", 1, rows), row_keys(0, "b", 0, rows), row_keys(1, "a", 0, rows)]
    assert len(np.unique(np.concatenate(keys))) == 4000
    assert (row_keys(0, "a", np.repeat([0, 1], 500), rows)[:500] == keys[0][:500]).all()


def split_mix(seed: int, count: int) -> list[int]:
    """The first numbers of Vigna's splitmix64.c."""
    found = []
    for number in range(1, count + 1):
        x = (seed + number * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        found.append(x ^ x >> 31)
    return found


def test_a_keys_numbers_are_those_of_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # for the seed 1234567
    assert split_mix(1234567, 3) == published
    purpose = int.from_bytes(hashlib.blake2b(b"5/test", digest_size=8).digest(), "little")
    (epoch,) = split_mix(purpose + 2 * 0x9E3779B97F4A7C15, 1)  # of epoch 3, since the generator adds one step
    assert row_keys(5, "test", 3, np.arange(4)).tolist() == split_mix(epoch, 4)
    for key in (0, 1, 2**64 - 1):
        (start,) = split_mix(key + 8 * 0xD1342543DE82EF95 - 0x9E3779B97F4A7C15, 1)
        assert random_bits(np.array([key], dtype=np.uint64), 7, 5)[0].tolist() == split_mix(start, 5)


def test_an_objective_on_tokens_needs_a_tokenizer():
    with pytest.raises(UserError, match=r"^tokenizer: expected the tokenizer of a corpus or a model, got 'gpt2'"):
        on_tokens.objective("causal_lm", "gpt2")


@each("tokens", [66, 570])
def test_an_objective_for_rows_of_some_tokens_has_such_rows(tokens):
    for one in (CausalLM(length=19), PrefixLM(length=64), Infilling(length=8), MaskedLM(length=70)):
        found = one.for_rows_of(tokens)
        assert (found.name, found.raw_length) == (one.name, tokens)


@each("tokens", [66, 570])
def test_a_mixture_for_rows_of_some_tokens_has_such_rows_of_each_denoiser(tokens):
    """Span corruption has rows of 8 and of 10 tokens, not of 9."""
    infilling = Denoiser(denoiser=Infilling(length=8, whole_rate=1.0), rate=4)
    mixture = UL2(denoisers=(infilling, Denoiser(denoiser=SpanCorruption(), mode="R")))
    found = mixture.for_rows_of(tokens)
    assert found.raw_lengths.tolist() == [tokens, tokens]
    assert [(one.denoiser.name, one.rate, one.mode) for one in found.denoisers] == [
        ("infilling", 4, None),
        ("span_corruption", 1, "R"),
    ]
    assert found.denoisers[0].denoiser.whole_rate == 1
    assert mixture.for_rows_of(9) is None


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


# ---- UL2


R, S, X = (VOCABULARY.special[token] for token in ("[R]", "[S]", "[X]"))
MODES = [R, R, S, X, X, X, X]
TABLE = [  # the paper's
    *(SpanCorruption(mean_span_length=span, noise_density=0.15) for span in (3, 8)),
    PrefixLM(noise_density=0.25),
    *(SpanCorruption(mean_span_length=span, noise_density=0.5) for span in (3, 8)),
    *(SpanCorruption(mean_span_length=64, noise_density=density) for density in (0.15, 0.5)),
]


def rows_of(objective, numbers):
    """A full row for each of these denoisers, its key, and the column with its denoiser."""
    rows, keys = ragged_rows(objective.raw_lengths[numbers].tolist())
    return rows, keys, {"denoiser": np.array(numbers, dtype=np.uint8)}


def test_a_row_is_what_its_denoiser_makes_of_it_behind_the_token_of_its_mode():
    objective = UL2()
    assert objective.raw_lengths.tolist() == [568, 588, 512, 766, 908, 600, 1006]
    rows, keys, columns = rows_of(objective, list(range(7)) * 5)
    examples = objective.apply(rows, keys, VOCABULARY, columns)
    for number, (inputs, targets) in enumerate(zip(as_lists(examples.inputs), as_lists(examples.targets), strict=True)):
        one = Padded(rows.values[number : number + 1, : rows.lengths[number]], rows.lengths[number : number + 1])
        alone = TABLE[number % 7].apply(one, keys[number : number + 1], VOCABULARY, {})
        assert [inputs, targets] == [[MODES[number % 7], *as_lists(alone.inputs)[0]], as_lists(alone.targets)[0]]


def test_a_row_depends_on_its_key_and_its_denoiser_alone():
    rows, keys, columns = rows_of(UL2(), [0, 6, 2, 4, 2, 0, 5, 3, 1, 6, 2])
    assert_rows_stand_alone(UL2(), rows, keys, VOCABULARY, columns)
    short = Padded(rows.values, np.array([568, 1006, 2, 40, 512, 9, 600, 766, 588, 2, 100]))
    assert_rows_stand_alone(UL2(), short, keys, VOCABULARY, columns)


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
    first = np.argmax(targets == VOCABULARY.first_sentinel - 1, axis=1) - 1
    # of 6 tokens in 2 spans: uniform over 1 … 5
    for number in range(7):
        assert abs(first[drawn == number].mean() - 3) < 4.5 * np.sqrt(2 / (drawn == number).sum())


def test_mixtures_of_ones_own_as_a_config_file_has_them():
    denoisers = [
        {"mode": "R", "denoiser": {"name": "span_corruption", "inputs_length": 128}, "rate": 0.5},
        {"mode": "S", "denoiser": {"name": "prefix_lm", "length": 128}, "rate": 0.5},
    ]
    objective = UL2.model_validate({"denoisers": denoisers, "mode_tokens": {"R": "[NLU]", "S": "[S2S]"}})
    vocabulary = replace(VOCABULARY, special={"[NLU]": 7, "[S2S]": 8})
    rows, keys, columns = rows_of(objective, [1, 0, 0])
    assert rows.lengths.tolist() == [128, 141, 141]
    assert objective.apply(rows, keys, vocabulary, columns).inputs.values[:, 0].tolist() == [8, 7, 7]
    assert (objective.shape, objective.problems(vocabulary)) == ((129, 128), [])


def test_a_mixture_without_modes_needs_no_tokens_of_them():
    denoisers = [
        {"denoiser": {"name": "infilling", "length": 64, "whole_rate": 1.0}},
        {"denoiser": {"name": "prefix_lm", "length": 63}, "mode": "S"},
    ]
    objective = UL2.model_validate({"denoisers": denoisers, "mode_tokens": {"S": "[S]"}})
    rows, keys, columns = rows_of(objective, [0, 1, 0])
    examples = objective.apply(rows, keys, replace(VOCABULARY, special={"[S]": S}), columns)
    assert [row[0] for row in as_lists(examples.inputs)] == [FIRST_SENTINEL, S, FIRST_SENTINEL]
    assert as_lists(examples.targets)[2] == [FIRST_SENTINEL, *as_lists(rows)[2], EOS]
    assert (objective.shape, objective.problems(VOCABULARY)) == ((64, 65), [])


def test_a_vocabulary_without_mode_tokens_or_enough_sentinels_is_refused():
    few = replace(VOCABULARY, sentinels=28)
    assert SpanCorruption().problems(few) == []
    [problem] = SpanCorruption(random_roll=True).problems(few)
    assert {"29", "28"} <= {*re.findall(r"\d+", problem)}
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


# ---- prefix language modelling


def segments_of(side: Padded, segments: np.ndarray) -> list[list[list[int]]]:
    """For each row, the tokens of segment 1 and those of segment 2."""
    assert (segments[~side.filled] == 0).all()
    assert (segments[side.filled] > 0).all()
    return [
        [row[numbers == number].tolist() for number in (1, 2)]
        for row, numbers in zip(side.values, segments, strict=True)
    ]


@settings(max_examples=60)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(0, 2**40))
def test_packed_segments_give_back_both_examples(halves, seed):
    rows, keys = ragged_rows([2 * half for half in halves], seed)
    objective = PrefixLM(length=max(halves) + 2, packed=True)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert examples.inputs.lengths.tolist() == examples.targets.lengths.tolist() == [half + 2 for half in halves]
    inputs = segments_of(examples.inputs, examples.input_segments)
    targets = segments_of(examples.targets, examples.target_segments)
    for row, half, prefixes, rests in zip(as_lists(rows), halves, inputs, targets, strict=True):
        for example, prefix, rest in zip((row[:half], row[half:]), prefixes, rests, strict=True):
            assert [*prefix[:-1], *rest[:-1]] == example
            assert prefix[-1] == rest[-1] == EOS
            assert min(len(prefix), len(rest)) > 1
        assert len(prefixes[0]) + len(prefixes[1]) == half + 2  # splits p and half − p
        assert len(prefixes[0]) == len(rests[1])


@each(
    "objective, most",
    [
        *((PrefixLM(length=40, noise_density=density), most) for density, most in ((0.5, 39), (0.25, 19), (0.1, 7))),
        (PrefixLM(length=22, packed=True), 19),  # of 20 tokens each
    ],
)
def test_the_decoders_part_is_uniform_with_the_density_as_mean_share(objective, most):
    """The decoder gets 1 … 2·density·40 − 1 of 40 tokens; at 0.5 that is T5's prefix, uniform over 1 … 39."""
    rows, keys = make_rows(20_000, 40)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    left = (examples.target_segments == 1).sum(axis=1) if objective.packed else examples.targets.lengths
    counts = np.bincount(left - 1, minlength=most + 1)
    assert counts[0] == 0
    assert len(counts) == most + 1
    share = 1 / most
    assert np.abs(counts[1:] / 20_000 - share).max() < 4.5 * np.sqrt(share * (1 - share) / 20_000)


def test_packed_examples_of_several_sources_are_put_together_with_their_segments():
    objective = PrefixLM(length=22, packed=True)
    rows, keys = ragged_rows([40, 40, 12, 12, 40])
    whole = objective.apply(rows, keys, VOCABULARY, {})
    parts = []
    for places in (np.array([2, 3]), np.array([4, 0, 1])):
        part = Padded(rows.values[places][:, : rows.lengths[places].max()], rows.lengths[places])
        parts.append((places, objective.apply(part, keys[places], VOCABULARY, {})))
    assert_alike(together(parts, PAD), whole)
    plain = Examples(parts[0][1].inputs, parts[0][1].targets)
    joined = together([(parts[0][0], plain), parts[1]], PAD)  # each row of a corpus that isn't packed is one segment
    assert (joined.input_segments[parts[1][0]] == whole.input_segments[parts[1][0]]).all()
    for place in parts[0][0]:
        assert joined.input_segments[place].sum() == joined.inputs.lengths[place]
        assert joined.target_segments[place].max() == 1


@settings(max_examples=40)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=8), st.integers(0, 2**40))
def test_one_row_is_the_inputs_and_then_the_targets_which_alone_have_a_loss(lengths, seed):
    rows, keys = ragged_rows(lengths, seed)
    inner = PrefixLM(length=40)
    apart = inner.apply(rows, keys, VOCABULARY, {})
    joined = InOneRow(of=inner).apply(rows, keys, VOCABULARY, {})
    batch = as_batch(joined, VOCABULARY.pad)
    sides = zip(as_lists(apart.inputs), as_lists(apart.targets), strict=True)
    for number, (first, second) in enumerate(sides):
        length = len(first) + len(second) - 1
        assert batch["encoder_input_ids"][number, :length].tolist() == [*first, *second][:-1]
        assert batch["labels"][number, len(first) - 1 : length].tolist() == second
        scored = (batch["labels"][number] != IGNORE_INDEX).nonzero().flatten().tolist()
        assert scored == [*range(len(first) - 1, length)]
        assert batch["prefix_mask"][number].nonzero().flatten().tolist() == [*range(len(first))]
        if "encoder_attention_mask" in batch:
            assert batch["encoder_attention_mask"][number].sum() == length


def test_examples_with_a_prefix_stand_beside_those_without():
    rows, keys = make_rows(4, 20)
    joined = InOneRow(of=PrefixLM(length=20)).apply(rows, keys, VOCABULARY, {})
    plain = CausalLM(length=19).apply(rows, keys, VOCABULARY, {})
    both = together([(np.array([0, 2, 4, 6]), joined), (np.array([1, 3, 5, 7]), plain)], VOCABULARY.pad)
    assert not both.prefix_mask[1::2].any()
    width = joined.prefix_mask.shape[1]
    assert (both.prefix_mask[::2, :width] == joined.prefix_mask).all()
    assert (both.predicted[1::2].sum(axis=1) == 19).all()
    assert (both.predicted[::2].sum(axis=1) == joined.predicted.sum(axis=1)).all()


def test_packed_rows_keep_each_examples_prefix():
    rows, keys = ragged_rows([20, 6, 9, 14, 20, 3])
    examples = InOneRow(of=PrefixLM(length=20)).apply(rows, keys, VOCABULARY, {})
    packed = balanced(examples, 3)
    assert packed.prefix_mask.sum() == examples.prefix_mask.sum()
    assert packed.predicted.sum() == examples.predicted.sum()
    for row, segments in zip(packed.prefix_mask, packed.input_segments, strict=True):
        for segment in set(segments.tolist()) - {0}:
            own = row[segments == segment]
            assert own[0] == 1
            assert (np.diff(own.astype(int)) <= 0).all()  # a prefix of the example


# ---- span corruption and i.i.d. denoising


def corrupted(count, length):
    """The inputs and the targets."""
    examples = SpanCorruption().apply(*make_rows(count, length), VOCABULARY, {})
    return examples.inputs.values, examples.targets.values


@each("length", [190, 350, 390, 670])
def test_masked_tokens_are_counted_in_float32_as_the_reference_does(length):
    inputs, targets = corrupted(1, length)
    noise = int(np.round(np.float32(length) * np.float32(0.15)))
    assert noise == round(length * 0.15) + 1  # doubles round the other way at these lengths
    assert (targets[0] < TEXT[1]).sum() - 1 == noise
    assert (inputs[0] < TEXT[1]).sum() - 1 == length - noise


def test_kept_and_masked_segments_and_the_roll_are_drawn_independently():
    """6 masked and 34 kept tokens in 2 spans each can be cut in 5 × 33 ways, and there are 40 offsets."""
    values = np.tile(np.arange(40) + TEXT[0], (20_000, 1))
    keys = row_keys(0, "test", 0, np.arange(20_000))
    masks = []
    for roll in (False, True):
        objective = SpanCorruption(inputs_length=64, random_roll=roll)
        inputs = objective.apply(Padded.full(values), keys, VOCABULARY, {}).inputs.values
        masks.append(~(inputs[:, :, None] == np.arange(40) + TEXT[0]).any(axis=1))
    mask, rolled = masks
    kept = np.argmax(mask, axis=1)  # the first kept segment's length, 1 … 33
    masked = np.argmax(~mask & (np.arange(40) > kept[:, None]), axis=1) - kept  # the first span's, 1 … 5
    joint = np.bincount(kept * 6 + masked, minlength=34 * 6).reshape(34, 6)[1:, 1:] / 20_000
    expected = 1 / (33 * 5)
    assert np.abs(joint - expected).max() < 5 * np.sqrt(expected / 20_000)
    same = np.stack([(np.roll(mask, offset, axis=1) == rolled).all(axis=1) for offset in range(40)], axis=1)
    assert same.any(axis=1).all()
    offsets = np.argmax(same, axis=1)
    shares = np.bincount(offsets[same.sum(axis=1) == 1], minlength=40) / (same.sum(axis=1) == 1).sum()
    assert np.abs(shares - 1 / 40).max() < 4.5 * np.sqrt(1 / 40 * 39 / 40 / 19_000)
    for cut in (1, 2):
        for length in (kept, masked):
            chosen = (length == cut) & (same.sum(axis=1) == 1)
            assert abs(offsets[chosen].mean() - 19.5) < 4.5 * np.sqrt((40**2 - 1) / 12 / chosen.sum())


def test_span_lengths_follow_their_distribution():
    """A span of a uniform composition of N into k parts has length s with probability C(N−s−1, k−2) / C(N−1, k−1)."""
    starts = np.flatnonzero(corrupted(5_000, 568)[1].reshape(-1) >= TEXT[1])
    inside = starts[:-1] // 114 == starts[1:] // 114
    spans = np.diff(starts)[inside] - 1  # a span's sentinel stands before it
    for size in range(1, 8):
        expected = comb(85 - size - 1, 26) / comb(84, 27)
        share = float((spans == size).mean())
        assert abs(share - expected) < 5 * np.sqrt(expected / len(spans))


@each(
    "masked, inputs, targets",
    [
        ({2, 3, 9}, "Thank you <0> me to your party last <1> </s>", "<0> for inviting <1> week </s>"),
        # shifted by 7, and by 1: each side numbers its own runs
        ({9, 0, 6}, "<0> you for inviting me to <1> party last <2> </s>", "Thank <0> your <1> week </s>"),
        ({3, 4, 0}, "<0> you for <1> to your party last week </s>", "Thank <0> inviting me <1> </s>"),
    ],
)
def test_a_row_begins_with_whatever_the_mask_begins_with(masked, inputs, targets):
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week"]
    ids = {word: TEXT[0] + number for number, word in enumerate(words)}
    ids |= {"</s>": EOS} | {f"<{number}>": FIRST_SENTINEL - number for number in range(3)}
    mask = np.array([[position in masked for position in range(10)]])
    row = Padded.full(np.array([[ids[word] for word in words]]))
    examples = with_sentinels(row, mask, VOCABULARY)
    assert as_lists(examples.inputs) == [[ids[word] for word in inputs.split()]]
    assert as_lists(examples.targets) == [[ids[word] for word in targets.split()]]


def masks_of(objective, keys, length):
    """(n, length) bool: which tokens of rows of `length` different tokens are in the targets."""
    tokens = np.arange(length) + TEXT[0]
    rows = Padded.full(np.tile(tokens, (len(keys), 1)))
    targets = objective.apply(rows, keys, VOCABULARY, {}).targets.values
    masks = np.zeros(rows.values.shape, dtype=bool)
    numbers, places = np.nonzero((targets >= TEXT[0]) & (targets < TEXT[1]))
    masks[numbers, targets[numbers, places] - TEXT[0]] = True
    return masks


def test_tokens_are_masked_independently():
    masks = masks_of(IidDenoising(inputs_length=41), row_keys(0, "test", 0, np.arange(20_000)), 40)
    share = masks.mean(axis=0)
    assert np.abs(share - 0.15).max() < 4.5 * np.sqrt(0.15 * 0.85 / 20_000)
    masked = masks.sum(axis=1)
    assert abs(masked.mean() - 40 * 0.15) < 4 * np.sqrt(40 * 0.15 * 0.85 / 20_000)
    assert masked.var() == pytest.approx(40 * 0.15 * 0.85, rel=0.05)  # 5 standard errors
    both = (masks[:, 1:] & masks[:, :-1]).mean(axis=0)
    assert np.abs(both - 0.15**2).max() < 4.5 * np.sqrt(0.15**2 / 20_000)
    runs = (masks[:, :1].sum(axis=1) + (masks[:, 1:] & ~masks[:, :-1]).sum(axis=1)).mean()
    assert abs(runs - (0.15 + 39 * 0.15 * 0.85)) < 4 * np.sqrt(40 * 0.15 * 0.85 / 20_000)


@each("density, length", [(0.02, 16), (0.15, 12), (0.6, 14)])
def test_sentinels_and_targets_suffice_but_for_one_row_in_a_million(density, length):
    """Computed from the probability of each of the 2^length masks."""
    masks = (np.arange(2**length)[:, None] >> np.arange(length) & 1).astype(bool)
    masked = masks.sum(axis=1)
    probability = density**masked * (1 - density) ** (length - masked)
    runs = masks[:, 0] + (masks[:, 1:] & ~masks[:, :-1]).sum(axis=1)

    def most(counts):
        return next(k for k in range(2 * length) if probability[counts > k].sum() <= 1e-6)

    objective = IidDenoising(inputs_length=length + 1, noise_density=density)
    assert objective.sentinels == most(runs) + 1
    assert objective.shape == (length + 1, most(runs + masked) + 2)


def test_masking_stops_where_the_sentinels_or_the_targets_are_used_up(monkeypatch):
    rows, keys = make_rows(3000, 63)
    free = masks_of(IidDenoising(inputs_length=64), keys, 63)
    monkeypatch.setattr(iid_denoising, "_OVERFLOW", 0.2)
    objective = IidDenoising(inputs_length=64)
    limited = masks_of(objective, keys, 63)
    examples = objective.apply(rows, keys, VOCABULARY, {})
    assert restored(examples) == as_lists(rows)
    assert examples.targets.lengths.max() <= objective.shape[1]
    assert (limited <= free).all()
    changed = (limited != free).any(axis=1)
    assert 0.1 < changed.mean() < 0.4  # at most a fifth of the rows exceed either limit, and at least a tenth do
    for before, after in zip(free[changed], limited[changed], strict=True):
        first = np.argmax(before != after)
        assert not after[first:].any()
        tried = after.copy()
        tried[first] = True
        runs = tried[0] + (tried[1:] & ~tried[:-1]).sum()
        assert runs > objective.sentinels - 1 or runs + tried.sum() > objective.shape[1] - 2
