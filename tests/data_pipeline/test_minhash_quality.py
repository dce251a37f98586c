"""MinHash finds near-duplicates as often as the formula says.

Pairs are planted: in a copy of a real page, words are replaced until the two sets of n-grams have the wanted Jaccard
similarity, which is then computed exactly. Each pair goes through the keys of the pipeline's own step; it is found if
both pages share a key. The theory is 1 − (1 − s^rows)^bands.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import data_pipeline
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import NearDuplicates, ngrams, shape
from data_pipeline.sources import READERS, Input, Intake
from data_pipeline.text.document import Document

SAMPLE = Path(data_pipeline.__file__).parent / "samples" / "c4-train.00000-of-01024-first1000.json.gz"
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


def interval(theory: np.ndarray, deviations: float = 1.96) -> tuple[float, float]:
    """Where the share that is found should lie, if each pair is found with its own probability."""
    mean = float(theory.mean())
    deviation = math.sqrt(float((theory * (1 - theory)).sum())) / len(theory)
    return max(0.0, mean - deviations * deviation), min(1.0, mean + deviations * deviation)


def by_similarity(result: Found, edges: np.ndarray) -> Iterator[tuple[float, float, np.ndarray]]:
    """(from, to, which pairs (n,)) of each bin that has any."""
    for low, high in itertools.pairwise(edges.tolist()):
        inside = (result.similarity >= low) & (result.similarity < high if high < 1 else result.similarity <= 1)
        if inside.any():
            yield low, high, inside


def precision(result: Found, least: float) -> float:
    """Of the found pairs, the share that are as similar as `least` or more."""
    return float((result.similarity[result.found] >= least).mean()) if result.found.any() else math.nan


def recall(result: Found, least: float) -> float:
    """Of the pairs that are as similar as `least` or more, the share that is found."""
    return float(result.found[result.similarity >= least].mean())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [record.text for record in READERS["jsonl"](Input(str(SAMPLE)), Intake())]


def test_planted_pairs_have_the_similarity_that_is_stated(texts):
    random = np.random.default_rng(1)
    long = [text for text in texts if len(text.split()) > 300]
    for wanted in (0.3, 0.5, 0.8, 0.97, 1.0):
        first, second, similarity = planted(long, wanted, 5, random)
        a, b = ngrams(first, 5), ngrams(second, 5)
        assert similarity == len(a & b) / len(a | b)
        assert similarity == pytest.approx(wanted, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("config", [MinHashConfig(), MinHashConfig(threshold=0.6, permutations=64, ngram=3)])
def test_the_measured_curve_lies_within_the_binomial_interval_of_the_theory(texts, config):
    """Four standard deviations: one bin in 15,000 would lie outside by chance, and a wrong number of bands far off."""
    result = measure(texts, config, 400)
    checked = 0
    for _, _, inside in by_similarity(result, np.linspace(0.3, 1, 8)):
        least, most = interval(result.theory[inside], 4)
        assert least <= result.found[inside].mean() <= most
        checked += 0.1 < result.theory[inside].mean() < 0.9
    assert checked >= 2
    assert recall(result, 0.95) > 0.97
    assert precision(result, (config.threshold or 0.72) - 0.3) > 0.97
