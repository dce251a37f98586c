"""Sentences as NLTK's Punkt counted them when C4 was made."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_pipeline.text.sentences import _english, candidates, count_sentences
from tests.tables import each


@each(
    "text, number",
    [
        ("", 0),
        (" \n", 0),
        ("no mark", 1),
        ("One. Two? Three!", 3),
        ("Dr. Who is here. He waits.", 2),  # an abbreviation
        ("Mr. Smith paid $3.5 million. It was a lot.", 2),
        ("I met J. Bach. He left.", 2),  # an initial
        ("See p. 5 of it.", 1),
        ("U.S. exports rose. They fell.", 2),
        ("It ended at 5 p.m. The next day came.", 2),  # an abbreviation that ends a sentence
        ("(One.) Two.", 2),
        ('He said "Go." She went.', 2),
        ("One.Two.", 1),
        ("Stop!!!", 2),  # the last mark is separated from the others
        ("A good price !!!!", 2),  # 3 since NLTK 3.6.6
        ("He said “Go.” She went.", 1),  # 2 since NLTK 3.10, to which typographic quotes are punctuation
    ],
)
def test_sentences(text, number):
    assert count_sentences(text) == number
    for at_most in (1, 3):
        assert count_sentences(text, at_most=at_most) == min(number, at_most)


TEXT = st.text(alphabet=".?! \t\n\x1c\x85\u00a0\u2028\"')]}-,a1BIé”»", max_size=30)


WORDS = 'word etc st co vs dr inc u.s he. The No Inc. 12 12. 3rd J J. a.m p.m. The. i ii . ... ! It? go! ( " “ é fig'
JOINTS = [" ", "  ", ". ", ". ", ".\n", ".\u00a0", ".\x1c", "! ", ".) ", '." ', "-", ".. "]
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
