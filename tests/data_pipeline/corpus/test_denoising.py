"""BART's noising, compared with a plain implementation of the reference's procedure and with formulas."""

import dataclasses
import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson

from data_pipeline.corpus.objectives.denoising import Denoising
from data_pipeline.corpus.objectives.objective import Padded
from data_pipeline.corpus.objectives.randomness import row_keys
from data_pipeline.text.vocabulary import Vocabulary
from tests.support.example_rows import as_lists, assert_rows_stand_alone
from tests.support.slow import slow
from tests.support.tables import each

PAD, BOS, EOS, MASK, STOP = 0, 1, 2, 4, 5  # STOP ends a sentence and belongs to the word before it
WORDS, PARTS, TEXT = range(10, 300), range(300, 500), range(900, 1000)  # TEXT: random replacements only
VOCABULARY = Vocabulary(
    *(1000, (TEXT.start, TEXT.stop), PAD, EOS, 3, BOS, MASK),
    word_starts=np.isin(np.arange(1000), WORDS),
    sentence_ends=np.isin(np.arange(1000), [STOP, STOP + 1]),
)
SAMPLES = 20_000
OFF = {"mask_ratio": 0.0, "permute_sentence_ratio": 0.0}  # no noise except what a test asks for


def words(count):
    return list(WORDS[:count])


def padded(rows):
    side = Padded(np.full((len(rows), max(map(len, rows))), PAD, np.uint16), np.array([len(row) for row in rows]))
    side.values[side.filled] = [*chain.from_iterable(rows)]
    return side


def noised(objective, rows, seed=0):
    """The inputs of each row as a list of tokens. Checks marks, lengths and targets, which no noise may change."""
    keys = row_keys(seed, "test", 0, np.arange(len(rows)))
    examples = objective.apply(padded(rows), keys, VOCABULARY, {})
    inputs = as_lists(examples.inputs)
    assert examples.predicted is None
    assert as_lists(examples.targets) == [[BOS, *row, EOS] for row in rows]
    assert all(row[0] == BOS and row[-1] == EOS and len(row) <= objective.length for row in inputs)
    return inputs


def samples(objective, row):
    """The results of SAMPLES keys for one row, without the marks."""
    return [inputs[1:-1] for inputs in noised(objective, [row] * SAMPLES)]


def slow_noise(row, objective, rng):
    """The whole procedure as in the reference, one row and one token at a time."""
    source = [BOS, *row, EOS]
    if objective.permute_sentence_ratio:
        source = slow_permute(source, objective.permute_sentence_ratio, rng)
    if objective.mask_ratio:
        source = slow_mask(source, objective, rng)
    if objective.insert_ratio:
        source = slow_insert(source, math.ceil(round(len(source) * objective.insert_ratio, 9)), objective, rng)
    if rng.random() < objective.rotate_probability:
        offset = rng.integers(1, len(source))
        source = source[:1] + source[offset:-1] + source[1:offset] + source[-1:]
    return source[1:-1]


def slow_permute(source, ratio, rng):
    stops = [token == STOP for token in source]
    stops[-2] = True
    ends = [i + 1 for i in range(1, len(source)) if stops[i] and not stops[i - 1]]
    sentences = [source[start:end] for start, end in zip([1, *ends], ends, strict=False)]
    chosen = rng.permutation(len(sentences))[: math.ceil(len(sentences) * ratio)]
    shuffled = list(sentences)
    for place, other in zip(chosen, rng.permutation(chosen), strict=True):
        shuffled[place] = sentences[other]
    return [BOS, *chain.from_iterable(shuffled), *source[ends[-1] :]]


def slow_mask(source, objective, rng):
    subword = objective.span_length == "subword"
    starts = [token in WORDS or (subword and token not in (BOS, EOS)) for token in source]
    places = [i for i, start in enumerate(starts) if start]
    budget = math.ceil(round(len(places) * objective.mask_ratio, 9))
    lengths = [] if objective.span_length == "span_poisson" else [1] * budget
    while sum(lengths) < budget:
        lengths.append(rng.poisson(objective.poisson_lambda))
    lengths[-1] -= sum(lengths) - budget
    begins = rng.permutation(places)
    spans = [(begins[i], size, rng.random() < objective.random_ratio) for i, size in enumerate(filter(None, lengths))]
    out, distance = list(source), 0
    while spans:  # all spans grow in step, so a span that begins earlier writes later
        for begin, _, is_random in spans:
            out[begin + distance] = rng.integers(TEXT.start, TEXT.stop) if is_random else MASK
            if objective.replace_length == 0 or (objective.replace_length == 1 and distance):
                out[begin + distance] = None
        distance += 1
        grown = [(begin, size - starts[begin + distance], is_random) for begin, size, is_random in spans]
        spans = [span for span in grown if span[1] > 0 and span[0] + distance < len(source) - 1]
    return slow_insert([token for token in out if token is not None], lengths.count(0), objective, rng)


def slow_insert(source, count, objective, rng):
    random = math.ceil(round(count * objective.random_ratio, 9))
    noise = [*rng.integers(TEXT.start, TEXT.stop, random), *[MASK] * (count - random)]
    places = dict(zip(rng.permutation(len(source) + count - 2)[:count] + 1, noise, strict=True))
    rest = iter(source)
    return [places[i] if i in places else next(rest) for i in range(len(source) + count)]


def same_distribution(ours, theirs):
    """Whether two samples of equal size may come from one distribution: chi-square over all but rare outcomes."""
    ours, theirs = Counter(ours), Counter(theirs)
    pairs = np.array([(ours[outcome], theirs[outcome]) for outcome in ours | theirs])
    common = pairs.sum(axis=1) >= 12
    pairs = np.concatenate([pairs[common], pairs[~common].sum(axis=0, keepdims=True)])
    statistic = (np.diff(pairs)[:, 0] ** 2 / np.maximum(pairs.sum(axis=1), 1)).sum()
    freedom = len(pairs) - 1
    return statistic < freedom + 4.5 * math.sqrt(2 * freedom)


ROW = [301, 10, 302, STOP, 11, 12, 303, STOP, STOP, 13, 14]  # 5 words, 3 sentences


@each(
    "changed",
    [
        {},
        {"mask_ratio": 0.7, "permute_sentence_ratio": 0.0, "replace_length": -1, "random_ratio": 0.4},
        {"rotate_probability": 0.7, "insert_ratio": 0.05, "mask_ratio": 0.2, "permute_sentence_ratio": 0.0},
        *slow(
            {"span_length": "word", "permute_sentence_ratio": 0.4, "replace_length": -1},
            {"insert_ratio": 0.2, "random_ratio": 0.3, **OFF},
            {"mask_ratio": 0.7, "permute_sentence_ratio": 0.0, "poisson_lambda": 1.5},
            {"mask_ratio": 0.7, "permute_sentence_ratio": 0.0, "poisson_lambda": 1.5, "replace_length": 0},
            {"span_length": "word", "permute_sentence_ratio": 0.7, "replace_length": 0},
            {"span_length": "subword", "permute_sentence_ratio": 0.0, "random_ratio": 0.3},
        ),
    ],
)
def test_every_outcome_is_as_likely_as_in_the_plain_procedure(changed):
    objective = Denoising(length=64, **changed)
    rng = np.random.default_rng(0)

    def outcome(tokens):
        return tuple(TEXT.start if token in TEXT else token for token in tokens)

    ours, theirs = samples(objective, ROW), [slow_noise(ROW, objective, rng) for _ in range(SAMPLES)]
    assert same_distribution(map(outcome, ours), map(outcome, theirs))


def test_kept_share_is_that_of_the_reference():
    """A run of the reference kept 72.85 % of the tokens of random sequences, at mask 0.3 and λ 3.5."""
    rng = np.random.default_rng(0)
    rows = [rng.choice(WORDS, rng.integers(10, 200)).tolist() for _ in range(SAMPLES)]
    kept = sum(token in WORDS for inputs in noised(Denoising(random_ratio=0), rows) for token in inputs)
    assert kept / sum(map(len, rows)) == pytest.approx(0.7285, abs=0.003)


def test_random_tokens_are_independent():
    objective = Denoising(insert_ratio=0.1, random_ratio=1.0, permute_sentence_ratio=0, span_length="subword")
    tokens = np.array(samples(objective, words(38)))
    random = tokens[np.isin(tokens, TEXT)].reshape(SAMPLES, 12 + 4)
    pairs = math.comb(16, 2)
    same = np.mean(random[:, :, None] == random[:, None, :])
    share = 1 / len(TEXT)
    error = 4.5 * math.sqrt(share * (1 - share) / (SAMPLES * pairs))
    assert (same * 256 - 16) / (2 * pairs) == pytest.approx(share, abs=error)


def test_sentences_end_at_a_stop_that_follows_no_stop():
    def outcomes(row):
        return sorted({tuple(tokens) for tokens in samples(Denoising(mask_ratio=0), row)})

    # a stop that follows a stop ends no sentence, nor does the last token there; a stop that follows nothing does
    tail = (STOP, STOP + 1, 12)
    assert outcomes([10, STOP, 11, *tail]) == [(10, STOP, 11, *tail), (11, STOP, 10, *tail)]
    assert outcomes([STOP, 10, 11]) == [(STOP, 10, 11), (10, 11, STOP)]
    for row in ([STOP, STOP, STOP], [10], [STOP], [10, 11, 12]):
        assert noised(Denoising(mask_ratio=0), [row]) == [[BOS, *row, EOS]]


def test_shares_are_rounded_up_from_exact_numbers():
    assert math.ceil(0.07 * 100) == 8  # 0.07 · 100 is a hair more than 7 in floats
    inputs = noised(Denoising(mask_ratio=0.07, span_length="word", random_ratio=0), [words(100), words(101)])
    assert [row.count(MASK) for row in inputs] == [7, 8]


OBJECTIVES = st.builds(
    Denoising,
    length=st.integers(50, 60),
    mask_ratio=st.sampled_from([0.01, 0.3, 0.9]),
    span_length=st.sampled_from(["span_poisson", "word", "subword"]),
    poisson_lambda=st.sampled_from([1.0, 3.5, 16.0]),
    replace_length=st.sampled_from([1, 0, -1]),
    random_ratio=st.sampled_from([0.0, 0.1, 1.0]),
    insert_ratio=st.sampled_from([0.0, 0.1, 0.6]),
    permute_sentence_ratio=st.sampled_from([0.0, 0.3, 1.0]),
    rotate_probability=st.sampled_from([0.0, 0.5, 1.0]),
)
TOKENS = st.lists(st.sampled_from([*WORDS[:20], *PARTS[:5], STOP]), min_size=1, max_size=28)


@settings(max_examples=150)
@given(OBJECTIVES, st.lists(TOKENS, min_size=2, max_size=8), st.integers(0, 2**40))
def test_a_row_is_noised_by_its_key_alone(objective, rows, seed):
    keys = row_keys(seed, "test", 0, np.arange(len(rows)))
    assert_rows_stand_alone(objective, padded(rows), keys, VOCABULARY)
    for row, inputs in zip(rows, noised(objective, rows, seed), strict=True):
        assert not Counter(token for token in inputs[1:-1] if token not in TEXT and token != MASK) - Counter(row)
        assert objective.random_ratio or not set(inputs) & set(TEXT)


@settings(max_examples=80)
@given(OBJECTIVES, st.integers(0, 2**40))
def test_full_rows_fit(objective, seed):
    """If nothing is deleted, no mask for an empty span fits, and every token of `insert_ratio` does."""
    marked = objective.raw_length + 2
    assert objective.shape == (objective.length, marked)
    longest, too_long = (count + math.ceil(round(count * objective.insert_ratio, 9)) for count in (marked, marked + 1))
    assert longest <= objective.length < too_long
    lengths = {len(inputs) for inputs in noised(objective, [words(objective.raw_length)] * 20, seed)}
    assert lengths == {longest} if objective.replace_length == -1 else max(lengths) <= longest


def test_vocabularies_without_the_needed_ids_are_refused():
    bare = Vocabulary(1000, (900, 1000), pad=PAD, eos=EOS, unk=3)
    masking = {"span_length": "subword", "permute_sentence_ratio": 0}
    assert Denoising().problems(VOCABULARY) == []
    assert len(Denoising().problems(bare)) == 4
    assert len(Denoising(**masking).problems(bare)) == 2  # no BOS, no mask
    assert len(Denoising(replace_length=0, **masking).problems(bare)) == 1


def test_deletion_needs_no_mask():
    objective = Denoising(length=64, replace_length=0, span_length="word", permute_sentence_ratio=0)
    without = dataclasses.replace(VOCABULARY, mask=None)
    assert objective.problems(without) == []
    rows, keys = padded([words(20)]), row_keys(0, "test", 0, np.arange(1))
    found, expected = (objective.apply(rows, keys, one, {}) for one in (without, VOCABULARY))
    assert found.inputs.values.tolist() == expected.inputs.values.tolist()


@each("mean", [1.0, 3.0, 16.0])
def test_spans_have_poissons_lengths_up_to_the_first_unlikely_one(mean):
    """As fairseq draws them: the distribution ends with the first length less likely than 1e-7."""
    likely = np.cumprod(poisson.pmf(np.arange(200), mean) >= 1e-7).sum()
    up_to = poisson.cdf(np.arange(likely + 1), mean)
    thresholds = Denoising(poisson_lambda=mean)._span_thresholds / 2.0**64
    np.testing.assert_allclose(thresholds, up_to[:-1] / up_to[-1], rtol=1e-10)
