"""Which of 840 planted pairs does MinHash find? Writes docs/results/corpus/near-duplicates.csv, in half a minute.

    python -m checks.near_duplicates

Counts, the same on every machine. In a copy of a real page, words are replaced until the two sets of n-grams have the
wanted Jaccard similarity, which is then computed exactly. Each pair goes through the keys of the pipeline's own step;
it is found if both pages share a key.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.dedup.minhash import MinHashConfig, NearDuplicates, ngrams
from data_pipeline.text.document import Document
from tests.support.reading import c4_pages

FILE = Path(__file__).parents[1] / "docs/results/corpus/near-duplicates.csv"
PAIRS = 840
_LEAST_WORDS, _MOST_WORDS = 150, 400


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
        if len(original - ngrams(" ".join(changed), ngram)) > lose:
            break
        copy = changed
    other = ngrams(" ".join(copy), ngram)
    return " ".join(words), " ".join(copy), len(original & other) / len(original | other)


def main() -> int:
    texts = [text for text in c4_pages() if len(text.split()) >= _LEAST_WORDS]
    with FILE.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["bands", "rows", "similarity", "found"])
        for config in (MinHashConfig(), MinHashConfig(bands=9, rows=13)):
            random, step = np.random.default_rng(0), NearDuplicates(**dict(config))
            for wanted in np.linspace(0.3, 1, PAIRS):
                *both, similarity = planted(texts, float(wanted), config.ngram, random)
                first, second = ({key for _, key in step.keys(Document(text=text))} for text in both)
                writer.writerow([config.bands, config.rows, f"{similarity:.6f}", int(bool(first & second))])
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
