"""Which near-duplicates does MinHash find, and which pages does it take for them?

    python benchmarks/minhash_quality.py [--pairs 4000] [--bands 14x8 9x13] [--ngram 5]
                                         [--texts FILE.jsonl.gz] [--picture docs/results/minhash-quality.svg]

Pairs are planted: in a copy of a real page, words are replaced until the two sets of n-grams have the wanted Jaccard
similarity, which is then computed exactly. Similarities are spread evenly from 0.3 to 1. Each pair goes through the
keys of the pipeline's own step; it is found if both pages share a key. The theory is 1 − (1 − s^rows)^bands. The same
pairs are looked for with several numbers of bands and rows.

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
from data_pipeline.dedup.minhash import NearDuplicates, ngrams, shape
from data_pipeline.sources import READERS, Input, Intake
from data_pipeline.text.document import Document

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


def table(results: dict[str, Found]) -> Table:
    pairs = next(iter(results.values()))
    shown = Table(title=f"{len(pairs.found):,} planted pairs")
    for name in ("similarity", "pairs", "bands × rows", "found", "theory", "95 % interval", "precision", "recall"):
        shown.add_column(name, justify="right")
    for low, high, inside in by_similarity(pairs, np.linspace(LEAST, 1, BINS + 1)):
        for name, result in results.items():
            least, most = interval(result.theory[inside])
            shown.add_row(
                f"{low:.2f}–{high:.2f}",
                f"{inside.sum():,}",
                name,
                f"{result.found[inside].mean():.3f}",
                f"{result.theory[inside].mean():.3f}",
                f"{least:.3f}–{most:.3f}",
                f"{precision(result, low):.3f}",
                f"{recall(result, low):.3f}",
            )
    return shown


def draw(results: dict[str, Found], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "minhash"  # the same file from the same figures
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for color, (name, result) in zip(("C0", "C1", "C2", "C3"), results.items(), strict=False):
        number, rows = map(int, name.split("x"))
        curve = np.linspace(LEAST, 1, 300)
        left.plot(curve, 1 - (1 - curve**rows) ** number, color=color, alpha=0.5, label=f"1 − (1 − s^{rows})^{number}")
        places: list[float] = []
        shares: list[float] = []
        bars: list[list[float]] = [[], []]
        for _, _, inside in by_similarity(result, np.linspace(LEAST, 1, 2 * BINS + 1)):
            mean, (least, most) = float(result.theory[inside].mean()), interval(result.theory[inside])
            places.append(float(result.similarity[inside].mean()))
            shares.append(float(result.found[inside].mean()))
            bars[0].append(shares[-1] - min(shares[-1], shares[-1] - mean + least))
            bars[1].append(max(shares[-1], shares[-1] - mean + most) - shares[-1])
        measured = f"{number} bands of {rows}, measured, ± 1.96 σ"
        left.errorbar(places, shares, yerr=bars, fmt="o", color=color, markersize=3.5, linewidth=1, label=measured)
        least_similar = np.linspace(LEAST, 0.98, 120)
        for kind, of, style in (("precision", precision, "-"), ("recall", recall, "--")):
            shown = [of(result, float(least)) for least in least_similar]
            right.plot(least_similar, shown, style, color=color, label=f"{kind}, {number} bands of {rows}")
    left.set(xlabel="Jaccard similarity of a pair", ylabel="share of pairs found", ylim=(-0.03, 1.03))
    right.set(xlabel="similarity from which a pair is a near-duplicate", ylim=(-0.03, 1.03))
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--bands", nargs="+", default=["14x8", "9x13"], metavar="BANDSxROWS", help="up to four")
    parser.add_argument("--ngram", type=int, default=MinHashConfig().ngram)
    parser.add_argument("--texts", type=Path, default=SAMPLE, help="JSON Lines with a field `text`")
    parser.add_argument("--picture", type=Path, help="draw the curves there (.svg or .png)")
    given = parser.parse_args()
    texts, results = texts_of(given.texts), {}
    for name in given.bands:
        bands, rows = map(int, name.split("x"))
        results[name] = measure(texts, MinHashConfig(bands=bands, rows=rows, ngram=given.ngram), given.pairs)
    Console(width=120).print(table(results))
    for name, result in results.items():
        print(f"{name} at 0.8: precision {precision(result, 0.8):.3f}, recall {recall(result, 0.8):.3f}")
    if given.picture:
        draw(results, given.picture)


if __name__ == "__main__":
    main()
