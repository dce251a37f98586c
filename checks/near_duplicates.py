"""Which of 840 planted pairs does MinHash find? Writes docs/results/corpus/near-duplicates.csv, in half a minute.

    python -m checks.near_duplicates

Counts, the same on every machine: tests/data_pipeline/test_minhash_quality.py says what the pairs are.
"""

import csv
import sys
from pathlib import Path

from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import shape
from tests.data_pipeline.reading import c4_pages
from tests.data_pipeline.test_minhash_quality import measure

FILE = Path(__file__).parents[1] / "docs/results/corpus/near-duplicates.csv"
PAIRS = 840


def main() -> int:
    texts = c4_pages()
    with FILE.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["bands", "rows", "similarity", "found"])
        for config in (MinHashConfig(), MinHashConfig(threshold=0.8)):
            result = measure(texts, config, PAIRS)
            for similarity, found in zip(result.similarity, result.found, strict=True):
                writer.writerow([*shape(config), f"{similarity:.6f}", int(found)])
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
