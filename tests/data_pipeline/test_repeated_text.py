"""Equal substrings of 50 words, dropped by the real stages and compared with a reference in memory; and MinHash, which
finds near-duplicates as often as the formula says: 1 − (1 − s^rows)^bands, for a Jaccard similarity s.

Pairs of that similarity are made: of 300 words each, `lost` are replaced, so that s = (300 − lost) / (300 + lost). Each
goes through the keys of the pipeline's own step; it is found if both texts share a key.
"""

import hashlib
import itertools
import math
import random

import numpy as np
import pytest

from data_pipeline import report
from data_pipeline.dedup.minhash import MinHashConfig, NearDuplicates, shape
from data_pipeline.dedup.substrings import EqualSubstrings, SubstringsConfig
from data_pipeline.text.document import Document, Tally
from data_pipeline.tools.provenance import trace
from data_pipeline.tools.provenance.finished_build import open_build
from tests.data_pipeline.pages import OFF, cleaned, dealt, page, published, texts_of
from tests.tables import each

LENGTH = 50


@pytest.fixture(scope="module")
def pages() -> list[dict[str, str]]:
    """100 pages of published C4. In 40 of them stand passages of 49 to 120 words of others, in other line breaks."""
    made = published(100)
    originals = [one["text"].split() for one in made]
    chance = random.Random(5)
    for number in range(40):
        donor = chance.choice([words for words in originals if len(words) > 150])
        length = chance.choice([49, 50, 51, 70, 120])
        first = chance.randrange(len(donor) - length)
        own = made[number]["text"].split(" ")
        at = chance.randrange(len(own) + 1)
        passage = chance.choice([" ", "\n"]).join(donor[first : first + length])
        made[number]["text"] = " ".join([*own[:at], passage, *own[at:]])
    made[50]["text"] += "\n" + made[50]["text"]  # twice on one page
    made[51]["text"] += " ha" * 500  # it overlaps itself
    return made


def in_memory(pages: list[dict[str, str]]) -> dict[str, str]:
    """The words that are left on each page: of equal runs of 50 words, the page of the smallest md5 keeps the first."""
    best: dict[tuple[str, ...], tuple[str, int]] = {}
    runs = {}
    for one in pages:
        words = one["text"].split()
        runs[one["url"]] = [tuple(words[at : at + LENGTH]) for at in range(len(words) - LENGTH + 1)]
        rank = hashlib.md5(one["url"].encode()).hexdigest()
        for at, run in enumerate(runs[one["url"]]):
            best[run] = min(best.get(run, ("g", 0)), (rank, at))
    left = {}
    for one in pages:
        rank = hashlib.md5(one["url"].encode()).hexdigest()
        gone: set[int] = set()
        for at, run in enumerate(runs[one["url"]]):
            if best[run] != (rank, at):
                gone.update(range(at, at + LENGTH))
        words = [word for at, word in enumerate(one["text"].split()) if at not in gone]
        if words:
            left[one["url"]] = " ".join(words)
    return left


@each("files, keys_per_bucket", [(1, 2**24), (7, 300)])
def test_every_repeat_of_50_words_is_dropped_and_nothing_else(tmp_path, pages, files, keys_per_bucket):
    dedup = {**OFF, "substrings": True, "keys_per_bucket": keys_per_bucket}
    corpus = cleaned(tmp_path, dealt(pages, files, seed=files), dedup=dedup)
    found, expected = texts_of(corpus), in_memory(pages)
    assert {url: " ".join(text.split()) for url, text in found.items()} == expected
    changed = [one for one in pages if expected.get(one["url"]) != " ".join(one["text"].split())]
    assert len(changed) > 25
    spans = report.read(corpus).spans
    assert spans.dropped["duplicate_substring"] >= len(changed)
    dropped = sum(len(one["text"].split()) - len(expected.get(one["url"], "").split()) for one in pages)
    assert spans.substring_words == dropped
    assert f"{spans.dropped['duplicate_substring']:,}" in (corpus / "report.md").read_text()


@each(
    "text, lost, left",
    [
        ("One two three four.", [1], "One four."),
        ("One\ntwo three four.", [1], "One\nfour."),
        ("One two three\n\nfour.", [1], "One\n\nfour."),
        ("one two three four", [0, 2], ""),
        ("one two three four five", [0, 1], "four five"),
        ("a b c d e f g", [1, 5], "a d e"),
    ],
)
def test_what_stands_around_a_lost_run_keeps_its_line_break(text, lost, left):
    document = Document("i", text, "u")
    step = EqualSubstrings(SubstringsConfig(words=2))
    assert (step.without(document, lost, Tally(), 0) or "") == left


def test_the_copy_that_stays_is_named(tmp_path):
    passage = " ".join(f"word{number}" for number in range(60))
    made = [page(f"Here is {passage} on page {name}.", f"http://{name}.org/") for name in "ab"]
    corpus = cleaned(tmp_path, [made[:1], made[1:]], dedup={**OFF, "substrings": True})
    kept, dropped = sorted((0, 1), key=lambda number: hashlib.md5(made[number]["url"].encode()).hexdigest())
    (found,) = trace.trace(open_build(corpus), made[dropped]["url"])
    (step,) = [step for step in found.steps if step.step == "substrings"]
    (drop,) = step.drops
    assert (drop.rule, drop.what) == ("span_duplicate_substring", f"Here is {passage} on page")
    assert drop.stays_on == f"c4/{kept:03d}.json.gz/000000000"
    assert step.text == texts_of(corpus)[made[dropped]["url"]] == f"{'ab'[dropped]}."


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
