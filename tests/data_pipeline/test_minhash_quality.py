"""MinHash finds near-duplicates as often as the formula says: 1 − (1 − s^rows)^bands, for a Jaccard similarity s.

Pairs of that similarity are made: of 300 words each, `lost` are replaced, so that s = (300 − lost) / (300 + lost). Each
goes through the keys of the pipeline's own step; it is found if both texts share a key.
"""

import itertools
import math

import numpy as np

from data_pipeline.dedup.minhash import MinHashConfig, NearDuplicates, shape
from data_pipeline.text.document import Document
from tests.tables import each

WORDS, PAIRS = 300, 400


@each("config", [MinHashConfig(ngram=1), MinHashConfig(threshold=0.6, permutations=64, ngram=1)])
def test_the_measured_curve_lies_within_the_binomial_interval_of_the_theory(config):
    """Four standard deviations: one bin in 15,000 would lie outside by chance, and a wrong number of bands far off."""
    step, (bands, rows) = NearDuplicates(config), shape(config)
    wanted = np.linspace(0.3, 1, PAIRS)
    lost = np.round(WORDS * (1 - wanted) / (1 + wanted)).astype(int)
    similarity = (WORDS - lost) / (WORDS + lost)
    found = np.empty(PAIRS, bool)
    for pair, number in enumerate(lost.tolist()):
        words = [f"p{pair}w{word}" for word in range(WORDS + number)]
        texts = (" ".join(words[:WORDS]), " ".join(words[number:]))
        first, second = ({key for _, key in step.keys(Document(text=text))} for text in texts)
        found[pair] = bool(first & second)
    chances = 1 - (1 - similarity**rows) ** bands
    checked = 0
    for low, high in itertools.pairwise(np.linspace(0.3, 1, 8)):
        inside = (similarity >= low) & ((similarity < high) | (high == 1))
        theory = chances[inside]
        mean, deviation = theory.mean(), math.sqrt((theory * (1 - theory)).sum()) / len(theory)
        assert abs(found[inside].mean() - mean) <= 4 * deviation
        checked += 0.1 < mean < 0.9
    assert checked >= 2
    assert found[similarity >= 0.95].mean() > 0.97
    assert (similarity[found] >= (config.threshold or 0.72) - 0.3).mean() > 0.97
