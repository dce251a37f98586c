"""Words as arrays, compared with Python's own split and with regular expressions."""

import bz2
import gzip
import json
import random
import re

import numpy as np
import pytest

from data_pipeline.text.words import Alphabet, Words, batches, bounds, exact, normalised, pieces
from tests.conftest import C4_SAMPLE, SAMPLES

ODD = "Ulm,\u00a01890 –\tÉCOLE_normale\n\n “It’s”\u3000x² \U0001f600 a\U0001d400b \x1f0 İstanbul"
UNSPACED = "東京はTokyo 2020年。ภาษาไทย ok"


def texts() -> list[str]:
    with gzip.open(C4_SAMPLE, "rt", encoding="utf-8") as lines:
        found = [json.loads(next(lines))["text"] for _ in range(40)]
    with bz2.open(SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2", "rt", encoding="utf-8") as dump:
        found.append(dump.read(300_000))  # with names in many scripts
    return [*found, ODD, UNSPACED, "", " \n", "one"]


def spaced(text: str) -> str:
    """`text` with spaces around each character of the scripts that have none between words."""
    return re.sub(
        r"([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])",
        r" \1 ",
        text,
    )


def in_python(text: str, alphabet: Alphabet) -> list[str]:
    if alphabet is exact():
        return spaced(text).split()
    lowered = "".join(character.lower()[0] for character in text)
    return re.findall(r"[^\W_]+", re.sub(r"[^\u0000-\uffff]", " ", spaced(lowered)))


def in_arrays(words: Words, piece: int) -> list[str]:
    first, count = int(words.first[piece]), int(words.count[piece])
    return [words.text[start:end] for start, end in zip(words.starts, words.ends, strict=True)][first : first + count]


@pytest.mark.parametrize("alphabet", [exact(), normalised()], ids=["exact", "normalised"])
def test_words_are_those_of_python(alphabet):
    found = [
        (words.pieces[piece].number, in_arrays(words, piece))
        for words in batches(enumerate(texts()), alphabet, 0, size=10**6)
        for piece in range(len(words.pieces))
    ]
    assert [number for number, _ in found] == list(range(len(texts())))
    for (_, own), text in zip(found, texts(), strict=True):
        if alphabet is normalised():
            own = ["".join(character.lower()[0] for character in word) for word in own]
        assert own == in_python(text, alphabet)


@pytest.mark.parametrize("alphabet", [exact(), normalised()], ids=["exact", "normalised"])
def test_hashes_of_runs_are_equal_if_and_only_if_their_words_are(alphabet):
    """Over all runs of three words of the texts, many of which occur several times."""
    words_of: dict[int, tuple[str, ...]] = {}
    hash_of: dict[tuple[str, ...], int] = {}
    again = 0
    for words in batches(enumerate(texts()), alphabet, 2):
        runs = words.within(np.arange(len(words.starts) - 2), 3)
        hashes = [words.runs(3, seed)[runs].tolist() for seed in (0, 1)]
        shown = [words.text[start:end] for start, end in zip(words.starts, words.ends, strict=True)]
        for run, *pair in zip(runs.tolist(), *hashes, strict=True):
            run_words = tuple(shown[run : run + 3])
            if alphabet is normalised():
                run_words = tuple("".join(character.lower()[0] for character in word) for word in run_words)
            again += run_words in hash_of
            for one in pair:
                assert words_of.setdefault(one, run_words) == run_words
            assert hash_of.setdefault(run_words, pair[0]) == pair[0]
    assert again > 1000
    assert len(words_of) == 2 * len(hash_of)


@pytest.mark.parametrize("shared", [0, 1, 12])
def test_each_run_of_words_lies_in_one_piece(shared):
    """Pieces of a hundred characters, some words of which are longer."""
    chance = random.Random(shared)
    words = ["".join(chance.choices("abé", k=chance.choice([1, 3, 8, 250]))) for _ in range(400)]
    text = "".join(word + chance.choice([" ", "\n", "  \t"]) for word in words)
    runs: list[tuple[int, tuple[str, ...]]] = []
    for piece in pieces(7, text, exact(), shared, size=100):
        own = piece.text.split()
        assert piece.number == 7
        assert text[piece.character :].startswith(piece.text)
        runs += [(piece.word + at, tuple(own[at : at + shared + 1])) for at in range(len(own) - shared)]
    assert runs == [(at, tuple(words[at : at + shared + 1])) for at in range(len(words) - shared)]


def test_places_and_bounds_count_from_the_start_of_a_text():
    long = " ".join(f"word{number}" for number in range(60_000))  # several pieces
    starts, ends = bounds(long, exact())
    assert [long[starts[at] : ends[at]] for at in (0, 59_999)] == ["word0", "word59999"]
    assert len(starts) == 60_000
    places = np.concatenate([words.places for words in batches([(3, "a b"), (9, long)], exact(), shared=4)])
    assert set(places.tolist()) == {3 << 32, 3 << 32 | 1, *(9 << 32 | number for number in range(60_000))}
