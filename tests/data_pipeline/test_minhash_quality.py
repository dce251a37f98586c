"""MinHash finds near-duplicates as often as the formula says.

Pairs are planted: in a copy of a real page, words are replaced until the two sets of n-grams have the wanted Jaccard
similarity, which is then computed exactly. Each pair goes through the keys of the pipeline's own step; it is found if
both pages share a key. The theory is 1 − (1 − s^rows)^bands.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import NearDuplicates, ngrams, shape
from data_pipeline.text.document import Document
from tests.data_pipeline.reading import c4_pages
from tests.tables import each

LEAST = 0.3
_LEAST_WORDS, _MOST_WORDS = 150, 400


@dataclass(frozen=True)
class Found:
    """Planted pairs: the exact similarity of each, whether it was found, and the probability of that by theory (n,)."""

    similarity: np.ndarray
    found: np.ndarray
    theory: np.ndarray


def planted(texts: Sequence[str], wanted: float, ngram: int, random: np.random.Generator) -> tuple[str, str, float]:
    """(a page, a copy with some words replaced, their exact Jaccard similarity, about `wanted`)."""
    words = texts[int(random.integers(len(texts)))].lower().split()[:_MOST_WORDS]
    original = ngrams(" ".join(words), ngram)
    # If the copy has l other n-grams in place of l of n, the similarity is (n - l) / (n + l).
    lose = len(original) * (1 - wanted) / (1 + wanted)
    copy = words
    for number, place in enumerate(random.permutation(len(words))):
        changed = [*copy]
        changed[place] = f"planted{number}x{random.integers(10**9)}"
        lost = len(original - ngrams(" ".join(changed), ngram))
        if lost > lose:
            break
        copy = changed
    other = ngrams(" ".join(copy), ngram)
    similarity = len(original & other) / len(original | other)
    return " ".join(words), " ".join(copy), similarity


def measure(texts: Sequence[str], config: MinHashConfig, pairs: int, seed: int = 0) -> Found:
    """`pairs` pairs, of similarities spread evenly from `LEAST` to 1, through the keys of near-duplicates."""
    random = np.random.default_rng(seed)
    long = [text for text in texts if len(text.split()) >= _LEAST_WORDS]
    step = NearDuplicates(config)
    number, rows = shape(config)
    similarity, found = np.empty(pairs), np.empty(pairs, dtype=bool)
    for pair, wanted in enumerate(np.linspace(LEAST, 1, pairs)):
        *both, similarity[pair] = planted(long, float(wanted), config.ngram, random)
        first, second = ({*step.keys(Document(text=text))} for text in both)
        found[pair] = bool({words for _, words in first} & {words for _, words in second})
    return Found(similarity, found, 1 - (1 - similarity**rows) ** number)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return c4_pages()


def test_planted_pairs_have_the_similarity_that_is_stated(texts):
    random = np.random.default_rng(1)
    long = [text for text in texts if len(text.split()) > 300]
    for wanted in (0.3, 0.5, 0.8, 0.97, 1.0):
        first, second, similarity = planted(long, wanted, 5, random)
        a, b = ngrams(first, 5), ngrams(second, 5)
        assert similarity == len(a & b) / len(a | b)
        assert similarity == pytest.approx(wanted, abs=0.03)


@pytest.mark.slow
@each("config", [MinHashConfig(), MinHashConfig(threshold=0.6, permutations=64, ngram=3)])
def test_the_measured_curve_lies_within_the_binomial_interval_of_the_theory(texts, config):
    """Four standard deviations: one bin in 15,000 would lie outside by chance, and a wrong number of bands far off."""
    result = measure(texts, config, 400)
    checked = 0
    for low, high in itertools.pairwise(np.linspace(0.3, 1, 8)):
        inside = (result.similarity >= low) & ((result.similarity < high) | (high == 1))
        theory = result.theory[inside]
        mean, deviation = theory.mean(), math.sqrt((theory * (1 - theory)).sum()) / len(theory)
        assert abs(result.found[inside].mean() - mean) <= 4 * deviation
        checked += 0.1 < mean < 0.9
    assert checked >= 2
    assert result.found[result.similarity >= 0.95].mean() > 0.97
    assert (result.similarity[result.found] >= (config.threshold or 0.72) - 0.3).mean() > 0.97
