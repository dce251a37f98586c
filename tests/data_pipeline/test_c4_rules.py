"""C4's line and page rules: each rule, their order and thresholds, and pages that have passed them before."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.cleaning.c4_rules import clean_page, has_paragraphs, is_too_long
from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.tally import Tally

PUBLISHED = Path(__file__).parents[2] / "data_pipeline" / "samples" / "c4-train.00000-of-01024-first1000.json.gz"
GOOD = ["The ferry leaves at nine tomorrow.", "Its captain has a wooden leg.", "Nobody knows where he lost it."]


def clean(*lines: str, **rules: int) -> tuple[str | None, dict[str, int]]:
    counters = Tally()
    return clean_page("\n".join(lines), CleaningConfig(**rules), counters), dict(counters)


def clean_line(line: str) -> tuple[bool, dict[str, int]]:
    """Whether a line is kept on a page that would pass without it, and what it is counted as."""
    text, counters = clean(GOOD[0], line, *GOOD[1:])
    return text != "\n".join(GOOD), dict(Counter(counters) - Counter(line_passed=3, passed=1))


# --- whole pages, a case for each rule ------------------------------------------------------------


def test_a_page_keeps_its_prose_and_every_other_line_is_counted_under_its_rule():
    text, counters = clean(
        "We rang for Dr. Aldous! He was out sailing that day.",
        "Home | Harbour | Tickets | Contact us today",
        '"It is late. We are cold. Row back."',
        "And then the storm came over the bay...",
        "Too few words here.",
        "Please turn on JavaScript to see the timetable.",
        "This harbour map is drawn by some javascript code.",
        "Boarding means that you accept our Terms of Use.",
        "Our Privacy Policy tells what the lookout writes down.",
        "This ship uses cookies, and the cook bakes them.",
    )
    assert text == 'We rang for Dr. Aldous! He was out sailing that day.\n"It is late. We are cold. Row back."'
    assert counters == {
        **{"line_passed": 2, "line_no_endmark": 2, "line_too_short": 1, "line_javascript": 2, "line_policy": 3},
        "passed": 1,
    }


def test_a_page_of_two_sentences_is_dropped():
    text, counters = clean("The harbour was empty that day.", "Only the old ferry ... lay there still.")
    assert text is None
    assert counters == {"line_passed": 2, "too_few_sentences": 1}


def test_a_curly_bracket_drops_the_page_and_what_follows_is_not_looked_at():
    text, counters = clean(*GOOD, "int main() { return 0 ; }.", "This line comes too late to count.")
    assert text is None
    assert counters == {"line_passed": 3, "curly_bracket": 1}


def test_a_closing_bracket_alone_drops_nothing():
    assert clean_line("A lone } bracket is no code at all.") == (True, {"line_passed": 1})


def test_lorem_ipsum_drops_the_page():
    assert clean("Lorem Ipsum dolor sit amet consectetur.", *GOOD) == (None, {"lorem_ipsum": 1})


def test_citation_marks_are_taken_out_of_the_lines_that_are_kept():
    text, counters = clean(
        "History of the harbour",
        "The harbour was dug by hand in winter.[3]",
        "It is[edit] said to be haunted[citation needed] by a cook[].",
        "Two ships[12] have sunk in it since.",
    )
    assert text == (
        "The harbour was dug by hand in winter.\nIt is said to be haunted by a cook.\nTwo ships have sunk in it since."
    )
    assert counters == {"line_no_endmark": 1, "line_passed": 3, "passed": 1}


def test_policies_are_found_whatever_their_case():
    text, counters = clean(
        GOOD[0],
        "Read the Cookie Policy of this old harbour.",
        GOOD[1],
        "The Use Of Cookies is allowed on deck.",
        "We Use Cookies to pay the crew here.",
        GOOD[2],
    )
    assert text == "\n".join(GOOD)
    assert counters == {"line_passed": 3, "line_policy": 3, "passed": 1}


# --- single lines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("  white space around it is taken off. \t", "white space around it is taken off."),
        ('He said that "it is time to go."', 'He said that "it is time to go."'),
        ("Is this a line of words?", "Is this a line of words?"),
        ("It ends with two dots here..", "It ends with two dots here.."),
        ("One two three four [1].", "One two three four ."),  # five words: "." is one when words are counted
        (
            "Marks [1, 2] and [Citation needed] and [ edit ] stay.",
            "Marks [1, 2] and [Citation needed] and [ edit ] stay.",
        ),
        ("[1] A line that begins with one.", " A line that begins with one."),  # never stripped again
        ("Our Terms-of-Use are written with hyphens here.", "Our Terms-of-Use are written with hyphens here."),
        ("a " * 4 + "b" * 1000 + " ends here.", "a " * 4 + "b" * 1000 + " ends here."),
    ],
)
def test_a_line_is_kept(line, kept):
    text, counters = clean(GOOD[0], line, GOOD[1], GOOD[2])
    assert text == "\n".join([GOOD[0], kept, GOOD[1], GOOD[2]])
    assert counters == {"line_passed": 4, "passed": 1}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("a " * 4 + "b" * 1001 + " ends here.", "line_too_long_word"),
        ("These are five words[" + "1" * 1000 + "].", "line_too_long_word"),  # measured with its citation marks
        ("", "line_no_endmark"),
        ("A citation after a space. [3]", "line_no_endmark"),  # "space. " ends with a space
        ("It ends with three dots here...", "line_no_endmark"),
        ("It ends with four dots here....", "line_no_endmark"),
        ("It ends with a typographic ellipsis…", "line_no_endmark"),
        ("He said “it ends with a quote.”", "line_no_endmark"),
        ("It ends with an apostrophe, he said.'", "line_no_endmark"),
        ("(It ends with a round bracket.)", "line_no_endmark"),
        ("这 是 一 个 句子。", "line_no_endmark"),
        ("Only four words here.", "line_too_short"),
        ("Only four[1] [2] words here.", "line_too_short"),
        ("Three words [1] here.", "line_too_short"),  # counted without the mark
        ("You reuse cookies that are too old.", "line_policy"),
        ("Turn on JAVASCRIPT and the Privacy Policy shows.", "line_javascript"),
        ("if (javascript) { then run it now }.", "line_javascript"),  # this rule comes before the one for brackets
        ("lorem ipsum without terminal punctuation", "line_no_endmark"),
        ("Only lorem ipsum here.", "line_too_short"),
        ("a bracket { without terminal punctuation", "line_no_endmark"),
        ("Only a { here.", "line_too_short"),
        ("lorem ipsum " + "b" * 1001 + " { is gone already.", "line_too_long_word"),
    ],
)
def test_a_line_is_dropped_by_the_first_rule_that_applies_and_the_page_lives_on(line, rule):
    assert clean_line(line) == (False, {rule: 1})


def test_lorem_ipsum_beats_javascript_and_brackets():
    assert clean("Lorem ipsum in javascript { and more }.", *GOOD) == (None, {"lorem_ipsum": 1})


def test_a_bracket_beats_policies():
    assert clean("The cookie policy { of this harbour }.", *GOOD) == (None, {"curly_bracket": 1})


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", *"\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"])
def test_lines_end_where_unicode_says(end):
    counters = Tally()
    assert clean_page(end.join(GOOD), CleaningConfig(), counters) == "\n".join(GOOD)
    assert counters == {"line_passed": 3, "passed": 1}


# --- pages ----------------------------------------------------------------------------------------


def test_a_page_of_190000_characters_passes_and_one_more_is_too_long():
    page = "\n".join(GOOD).ljust(190_000, "\n")
    assert clean(page)[0] == "\n".join(GOOD)
    assert clean(page + "\n") == (None, {"too_long": 1})
    assert is_too_long("é" * 190_000, CleaningConfig(), Tally()) is False  # characters, not bytes


def test_sentences_are_counted_in_each_line_by_itself():
    assert clean("It rained. We rowed home. We slept.")[1] == {"line_passed": 1, "passed": 1}
    assert clean("It rained on us. We rowed home.")[1] == {"line_passed": 1, "too_few_sentences": 1}


def test_an_empty_page_is_dropped():
    assert clean("") == (None, {"too_few_sentences": 1})
    assert clean("", min_sentences_per_page=0) == (None, {"too_few_sentences": 1})


def test_thresholds_are_parameters():
    assert clean("Go now.", min_words_per_line=2, min_sentences_per_page=1)[0] == "Go now."
    assert clean("Go.", min_words_per_line=0, min_sentences_per_page=0)[0] == "Go."
    assert clean(*GOOD, min_words_per_line=7)[1] == {"line_too_short": 3, "too_few_sentences": 1}
    assert clean(*GOOD, min_sentences_per_page=4)[1] == {"line_passed": 3, "too_few_sentences": 1}
    assert clean(*GOOD, max_word_length=8)[1] == {"line_passed": 2, "line_too_long_word": 1, "too_few_sentences": 1}
    assert clean(*GOOD, max_page_characters=10)[1] == {"too_long": 1}


def test_other_sentence_counters_can_be_put_in():
    counters = Tally()
    assert clean_page(GOOD[0], CleaningConfig(), counters, sentences=lambda line, at_most: 3) == GOOD[0]


@given(
    st.lists(st.sampled_from([*GOOD, "It is. It was. It will be.", "Two of them. Are in this line.", "no mark"])),
    st.integers(0, 8),
)
def test_stopping_early_decides_as_counting_every_sentence_does(lines, minimum):
    text, _ = clean(*lines, min_sentences_per_page=minimum)
    kept = [line for line in lines if line != "no mark"]
    assert (text is not None) == (bool(kept) and sum(map(count_sentences, kept)) >= minimum)


def test_pages_of_the_published_corpus_pass_again():
    """999 of 1,000 pages stay unchanged. In the other one, six lines begin with the space after a removed citation
    mark, and stripping removes it."""
    with gzip.open(PUBLISHED, "rt", encoding="utf-8") as file:
        pages = [json.loads(line)["text"] for line in file]
    counters = Tally()
    cleaned = [clean_page(page, CleaningConfig(), counters) for page in pages]
    assert counters == {"line_passed": sum(page.count("\n") + 1 for page in pages), "passed": 1000}
    [changed] = [index for index in range(1000) if cleaned[index] != pages[index]]
    before = pages[changed].split("\n")
    assert cleaned[changed] == "\n".join(line.strip() for line in before)
    assert [line[0] for line in before if line != line.strip()] == [" "] * 6


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ([200, 200, 200], True),
        ([10, 500, 3, 200, 1, 201], True),
        ([200, 200, 199], False),
        ([5000, 5000], False),
        ([199] * 50, False),
    ],
)
def test_multilingual_pages_need_three_lines_of_200_characters(lengths, kept):
    assert has_paragraphs("\n".join("é" * length for length in lengths)) is kept


def test_number_and_length_of_paragraphs_are_parameters():
    text = "Twenty-one characters\nshort\nTwenty-two characters!"
    assert has_paragraphs(text, min_paragraphs=2, min_paragraph_characters=21)
    assert not has_paragraphs(text, min_paragraphs=2, min_paragraph_characters=22)
    assert not has_paragraphs(text, min_paragraphs=3, min_paragraph_characters=20)
