"""UL2's mixture, compared with the paper's table 1 (Tay et al. 2022)."""

from dataclasses import replace

import numpy as np

from data_pipeline.config import CorpusConfig
from data_pipeline.foundation.config_file import load
from data_pipeline.objectives.objective import Padded
from data_pipeline.objectives.prefix_lm import PrefixLM
from data_pipeline.objectives.randomness import row_keys
from data_pipeline.objectives.span_corruption import SpanCorruption
from data_pipeline.objectives.ul2 import UL2
from tests.data_pipeline.example_rows import TEXT, VOCABULARY, as_lists, assert_rows_stand_alone, ragged_rows
from tests.tables import each

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
