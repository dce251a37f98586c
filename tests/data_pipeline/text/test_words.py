"""Words as arrays, compared with Python's split and regular expressions; sentences as NLTK's Punkt counted for C4."""

import bz2
import random
import re
import time
import unicodedata

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.text.sentences import _english, candidates, count_sentences
from data_pipeline.text.words import Alphabet, Words, batches, bounds, chunks, exact, normalised
from tests.conftest import SAMPLES
from tests.support.reading import c4_pages
from tests.support.tables import each

ODD = "Ulm,\u00a01890 –\tÉCOLE_normale\n\n “It’s”\u3000x² \U0001f600 a\U0001d400b \x1f0 İstanbul"
UNSPACED = "東京はTokyo 2020年。ภาษาไทยดีที่สุด ok \U00020089人々"


def texts() -> list[str]:
    found = c4_pages()[:40]
    with bz2.open(SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2", "rt", encoding="utf-8") as dump:
        found.append(dump.read(300_000))  # with names in many scripts
    return [*found, ODD, UNSPACED, "", " \n", "one"]


def spaced(text: str) -> str:
    """`text` with spaces around each letter, with its marks, of the scripts that have none between words."""
    return regex.sub(
        r"([[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
        r"\U00020000-\U0003ffff]&&\P{M}]\p{M}*)",
        r" \1 ",
        text,
        flags=regex.V1,
    )


def in_python(text: str, alphabet: Alphabet) -> list[str]:
    if alphabet is exact():
        return spaced(text).split()
    ignored = r"[\p{Default_Ignorable_Code_Point}--[\u200b\u115f\u1160\u3164]]"
    text = unicodedata.normalize("NFKC", regex.sub(ignored, "", text, flags=regex.V1))
    return regex.findall(r"[\p{L}\p{N}][\p{L}\p{N}\p{M}]*", spaced("".join(letter.lower()[0] for letter in text)))


def folded(words: list[str], alphabet: Alphabet) -> list[str]:
    """As `in_python` does it."""
    if alphabet is exact():
        return words
    return ["".join(character.lower()[0] for character in word) for word in words]


def in_arrays(words: Words, chunk: int | None = None) -> list[str]:
    """The words of one chunk, or of all."""
    part = slice(None)
    if chunk is not None:
        part = slice(int(words.first[chunk]), int(words.first[chunk] + words.count[chunk]))
    return [words.text[start:end] for start, end in zip(words.starts[part], words.ends[part], strict=True)]


def words_of_all_lengths(seed: int) -> str:
    chance = random.Random(seed)
    words = ["".join(chance.choices("abé", k=chance.choice([1, 3, 8, 250]))) for _ in range(400)]
    return "".join(word + chance.choice([" ", "\n", "  \t"]) for word in words)


@each("alphabet", [exact(), normalised()])
def test_words_are_those_of_python(alphabet):
    found = [
        (words.chunks[chunk].number, folded(in_arrays(words, chunk), alphabet))
        for words in batches(enumerate(texts()), alphabet, 1, size=10**6)
        for chunk in range(len(words.chunks))
    ]
    assert [number for number, _ in found] == list(range(len(texts())))
    assert [own for _, own in found] == [in_python(text, alphabet) for text in texts()]


@each("alphabet", [exact(), normalised()])
def test_hashes_of_runs_are_equal_if_and_only_if_their_words_are(alphabet):
    """Over all runs of three words of the texts, many of which occur several times."""
    words_of: dict[int, tuple[str, ...]] = {}
    hash_of: dict[tuple[str, ...], int] = {}
    again = 0
    for words in batches(enumerate(texts()), alphabet, 3):
        runs = np.arange(len(words.starts) - 2)
        runs = runs[words.within(runs, runs + 3)]
        hashes = [words.hashes(runs, runs + 3, seed).tolist() for seed in (0, 1)]
        own = folded(in_arrays(words), alphabet)
        for run, *pair in zip(runs.tolist(), *hashes, strict=True):
            run_words = tuple(own[run : run + 3])
            again += run_words in hash_of
            for one in pair:
                assert words_of.setdefault(one, run_words) == run_words
            assert hash_of.setdefault(run_words, pair[0]) == pair[0]
    assert again > 1000
    assert len(words_of) == 2 * len(hash_of)


def test_places_and_bounds_count_from_the_start_of_a_text():
    long = " ".join(f"word{number}" for number in range(60_000))  # several chunks
    starts, ends = bounds(long, exact())
    assert [long[starts[at] : ends[at]] for at in (0, 59_999)] == ["word0", "word59999"]
    assert len(starts) == 60_000
    positions = np.concatenate([words.positions for words in batches([(3, "a b"), (9, long)], exact(), length=5)])
    assert set(positions.tolist()) == {3 << 32, 3 << 32 | 1, *(9 << 32 | number for number in range(60_000))}


def normal_words(text: str) -> list[str]:
    (words,) = batches([(0, text)], normalised(), 1)
    return in_arrays(words, 0)


def test_marks_belong_to_their_letters_and_texts_are_compared_in_nfkc():
    """The words of UAX 29; what it leaves out of consideration (soft hyphens, joiners) is left out."""
    assert normal_words("সমস্ত মানুষ স্বাধীনভাবে।") == ["সমস্ত", "মানুষ", "স্বাধীনভাবে"]
    assert normal_words("उन्हें बुद्धि और क्\u200dष") == ["उन्हें", "बुद्धि", "और", "क्ष"]
    assert normal_words("மனிதப் பிறவியினர்") == ["மனிதப்", "பிறவியினர்"]
    assert " ".join(normal_words("cafe\u0301 na\u00efve ½ ﬁn co\u00adop Ａ１")) == "café naïve 1 2 fin coop A1"
    assert normal_words("don´t x \u0301y \U0001d54c") == ["don", "t", "x", "y", "U"]  # ´ becomes a space and a mark
    assert normal_words("don't 3.14 a_b") == ["don", "t", "3", "14", "a", "b"]


def test_letters_without_spaces_stand_for_parts_of_a_word():
    """13 words: 39 letters of Thai, 26 of kana, 20 of Han (19.5), or 10 words and 9 letters of Thai."""
    cases = ("ที่สุด" * 20, 39), ("ひらがな" * 20, 26), ("人人生而自由" * 20, 20), ("a " * 10 + "ที่สุด" * 5, 19)
    for text, letters in cases:
        (words,) = batches([(0, text)], normalised(), 13)
        assert words.stops(13)[0] == letters
        assert len(words.runs(13, 0)) == (words.stops(13) <= len(words.starts)).sum()
        (each,) = batches([(0, text)], exact(), 13)
        assert each.stops(13)[0] == 13


@each(
    "text, alphabet, length",
    [
        *((words_of_all_lengths(length), exact(), length) for length in (1, 2, 13)),
        ("ภาษาไทยดีที่สุด人人生而自由 in Ulm ひらがな" * 40, normalised(), 5),
    ],
)
def test_each_run_lies_in_one_piece(text, alphabet, length):
    """Pieces of a hundred characters, some words of which are longer: all runs, each found once, in one of them."""
    (whole,) = batches([(0, text)], alphabet, length, size=10**6)
    runs = []
    for chunk in chunks(0, text, alphabet, length, size=100):
        assert text[chunk.character :].startswith(chunk.text)
        words = Words([chunk], alphabet)
        stops = words.stops(length)
        firsts = np.flatnonzero(words.within(np.arange(len(stops)), stops))
        runs += list(zip(words.positions[firsts].tolist(), words.runs(length, 0).tolist(), strict=True))
    assert runs == list(enumerate(whole.runs(length, 0).tolist()))
    assert len(runs) > 300


SENTENCES = {
    0: ["", " \n"],
    1: [
        *("no mark", "See p. 5 of it.", "One.Two."),
        "He said “Go.” She went.",  # 2 since NLTK 3.10, to which typographic quotes are punctuation
    ],
    2: [
        # abbreviations, one of which ends a sentence, and an initial
        *("Dr. Who is here. He waits.", "Mr. Smith paid $3.5 million. It was a lot.", "U.S. exports rose. They fell."),
        *("It ended at 5 p.m. The next day came.", "I met J. Bach. He left.", "(One.) Two.", 'He said "Go." She went.'),
        "Stop!!!",  # the last mark is separated from the others
        "A good price !!!!",  # 3 since NLTK 3.6.6
    ],
    3: ["One. Two? Three!"],
}


@each("text, number", [(text, number) for number, texts in SENTENCES.items() for text in texts])
def test_sentences(text, number):
    assert count_sentences(text) == number
    for at_most in (1, 3):
        assert count_sentences(text, at_most=at_most) == min(number, at_most)


TEXT = st.text(alphabet=".?! \t\n\x1c\x85\u00a0\u2028\"')]}-,a1BIé”»", max_size=30)


WORDS = "word etc st co vs dr inc VS Dr St NATO McX u.s he. The No Inc. 12 12. 3rd J J. a.m p.m. The. i ii . ... ! It? "
WORDS += 'go! ( " “ é fig'
JOINTS = [" ", "  ", ". ", ". ", ".\n", ".\u00a0", ".\x1c", "! ", "?\n", ".) ", '." ', "-", ".. "]
PLAIN = st.lists(st.tuples(st.sampled_from(WORDS.split(" ")), st.sampled_from(JOINTS)).map("".join), max_size=12)


@settings(max_examples=200)
@example("word.\x1cThe ", 2)
@given(TEXT | PLAIN.map("".join), st.integers(1, 5))
def test_short_cuts_give_what_the_whole_model_gives(text, at_most):
    number = len(_english().tokenize(text))
    assert count_sentences(text) == number
    assert count_sentences(text, at_most) == min(number, at_most)


@given(TEXT)
def test_candidates_are_those_of_the_expression_of_nltk_3_5(text):
    """NLTK's expression takes time quadratic in the length of a word, and was therefore replaced in NLTK 3.6.6."""
    expression = r"""\S*[.?!](?=(?P<after_tok>(?:[?!)\";}\]\*:@\'\({\[])|\s+(?P<next_tok>\S+)))"""
    expected = [(match.end(), match[0] + match["after_tok"]) for match in re.finditer(expression, text)]
    assert [(match.end(), context) for match, context in candidates(text)] == expected


@pytest.mark.timing
def test_a_page_of_marks_is_counted_in_linear_time():
    started = time.process_time()
    assert count_sentences("!" * 190_000) == 2
    assert count_sentences("a." * 95_000) == 1
    assert time.process_time() - started < 5
