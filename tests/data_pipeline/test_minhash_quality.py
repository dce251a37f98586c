"""MinHash finds near-duplicates as often as the formula says; measured as `benchmarks/minhash_quality.py` does."""

import numpy as np
import pytest

from benchmarks.minhash_quality import SAMPLE, by_similarity, interval, measure, planted, precision, recall, texts_of
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import ngrams


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return texts_of(SAMPLE)


def test_planted_pairs_have_the_similarity_that_is_stated(texts):
    random = np.random.default_rng(1)
    long = [text for text in texts if len(text.split()) > 300]
    for wanted in (0.3, 0.5, 0.8, 0.97, 1.0):
        first, second, similarity = planted(long, wanted, 5, random)
        a, b = ngrams(first, 5), ngrams(second, 5)
        assert similarity == len(a & b) / len(a | b)
        assert similarity == pytest.approx(wanted, abs=0.03)


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
