"""Which near-duplicates does MinHash find, and which pages does it take for them?

    python benchmarks/minhash_quality.py [--pairs 4000] [--threshold 0.8] [--permutations 128] [--ngram 5]
                                         [--texts FILE.jsonl.gz] [--picture docs/minhash-quality.svg]

Pairs are planted: in a copy of a real page, words are replaced until the two sets of n-grams have the wanted Jaccard
similarity, which is then computed exactly. Similarities are spread evenly from 0.3 to 1. Each pair goes through the
keys of the pipeline's own step; it is found if both pages share a key. The theory is 1 − (1 − s^rows)^bands.

The pages are the first 1,000 of published C4, which ship with the package, or the field `text` of any JSON Lines.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import data_pipeline
from data_pipeline.dedup.config import MinHashConfig
from data_pipeline.dedup.minhash import NearDuplicates, bands, ngrams
from data_pipeline.sources import READERS, Input, Intake

SAMPLE = Path(data_pipeline.__file__).parent / "samples" / "c4-train.00000-of-01024-first1000.json.gz"
LEAST, BINS = 0.3, 14
_LEAST_WORDS, _MOST_WORDS = 150, 400


@dataclass(frozen=True)
class Found:
    """Planted pairs: the exact similarity of each, whether it was found, and the probability of that by theory (n,)."""

    similarity: np.ndarray
    found: np.ndarray
    theory: np.ndarray


def texts_of(path: Path) -> list[str]:
    return [record.text for record in READERS["jsonl"](Input(str(path)), Intake())]


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
    number, rows = bands(config.threshold, config.permutations)
    similarity, found = np.empty(pairs), np.empty(pairs, dtype=bool)
    for pair, wanted in enumerate(np.linspace(LEAST, 1, pairs)):
        *both, similarity[pair] = planted(long, float(wanted), config.ngram, random)
        first, second = ({*step.keys({"text": text, "target": ""})} for text in both)
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


def table(result: Found, config: MinHashConfig) -> Table:
    number, rows = bands(config.threshold, config.permutations)
    shown = Table(title=f"{len(result.found):,} planted pairs, {number} bands of {rows} rows")
    for name in ("similarity", "pairs", "found", "1 − (1 − s^r)^b", "95 % interval", "precision above", "recall above"):
        shown.add_column(name, justify="right")
    for low, high, inside in by_similarity(result, np.linspace(LEAST, 1, BINS + 1)):
        least, most = interval(result.theory[inside])
        shown.add_row(
            f"{low:.2f}–{high:.2f}",
            f"{inside.sum():,}",
            f"{result.found[inside].mean():.3f}",
            f"{result.theory[inside].mean():.3f}",
            f"{least:.3f}–{most:.3f}",
            f"{precision(result, low):.3f}",
            f"{recall(result, low):.3f}",
        )
    return shown


def draw(result: Found, config: MinHashConfig, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "minhash"  # the same file from the same figures
    number, rows = bands(config.threshold, config.permutations)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    curve = np.linspace(LEAST, 1, 300)
    left.plot(curve, 1 - (1 - curve**rows) ** number, color="0.6", label=f"1 − (1 − s^{rows})^{number}")
    places: list[float] = []
    shares: list[float] = []
    bars: list[list[float]] = [[], []]
    for _, _, inside in by_similarity(result, np.linspace(LEAST, 1, 2 * BINS + 1)):
        mean, (least, most) = float(result.theory[inside].mean()), interval(result.theory[inside])
        places.append(float(result.similarity[inside].mean()))
        shares.append(float(result.found[inside].mean()))
        bars[0].append(shares[-1] - min(shares[-1], shares[-1] - mean + least))
        bars[1].append(max(shares[-1], shares[-1] - mean + most) - shares[-1])
    left.errorbar(places, shares, yerr=bars, fmt="o", markersize=3.5, linewidth=1, label="measured, ± 1.96 σ")
    left.set(xlabel="Jaccard similarity of a pair", ylabel="share of pairs found", ylim=(-0.03, 1.03))
    least_similar = np.linspace(LEAST, 0.98, 120)
    for name, of in (("precision", precision), ("recall", recall)):
        right.plot(least_similar, [of(result, float(least)) for least in least_similar], label=name)
    right.axvline(config.threshold, color="0.8", linewidth=1, zorder=0)
    right.annotate(" threshold", (config.threshold, 0.02), color="0.5", fontsize=9)
    right.set(xlabel="similarity from which a pair is a near-duplicate", ylim=(-0.03, 1.03))
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--threshold", type=float, default=MinHashConfig().threshold)
    parser.add_argument("--permutations", type=int, default=MinHashConfig().permutations)
    parser.add_argument("--ngram", type=int, default=MinHashConfig().ngram)
    parser.add_argument("--texts", type=Path, default=SAMPLE, help="JSON Lines with a field `text`")
    parser.add_argument("--picture", type=Path, help="draw the curves there (.svg or .png)")
    given = parser.parse_args()
    config = MinHashConfig(threshold=given.threshold, permutations=given.permutations, ngram=given.ngram)
    result = measure(texts_of(given.texts), config, given.pairs)
    Console(width=120).print(table(result, config))
    print(
        f"at {config.threshold}: precision {precision(result, config.threshold):.3f}, "
        f"recall {recall(result, config.threshold):.3f}"
    )
    if given.picture:
        draw(result, config, given.picture)


if __name__ == "__main__":
    main()
