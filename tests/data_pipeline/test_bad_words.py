"""Bad words: what counts as one, in which languages, and which pages are dropped for them."""

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.cleaning import bad_words
from data_pipeline.cleaning.bad_words import contains_bad_word, drops_page, languages
from tests.data_pipeline.reading import c4_pages
from tests.tables import each

LISTS = Path(bad_words.__file__).parent / "bad_words_lists"


@each(
    "text, language, found",
    [
        ("The glasses were assembled in class.", "en", False),  # inside longer words
        ("He fell on his ass there.", "en", True),
        ("He fell on his ass", "en", True),  # the edge of the text is a boundary
        ("ass", "en", True),
        ("What an ASS.", "en-latin", True),  # in any case; only the first part of the language counts
        ('He said "ass" again.', "en", True),
        ("the assö word", "en", False),  # letters of any script
        ("an _ass_ in underscores", "en", False),
        ("an ass2 with a digit", "en", False),
        ("tied with a strap on it", "en", True),  # a phrase
        ("tied with a strap\non it", "en", False),  # needs its own space
        ("tied with a strap  on it", "en", False),
        ("a bootstrap on it", "en", False),
        ("a strap only", "en", False),
        ("this finger 🖕 here", "en", True),  # an entry without a letter
        ("this finger🖕here", "en", False),
        ("La palabra ass en español.", "es", False),  # another language's word
        ("Se cayó de culo en la calle.", "es", True),  # a capitalised entry of the list
        ("Oculto y calculo.", "es", False),
        ("ce criss de bateau", "fr", True),  # Québec's list is part of French
        ("He fell on his ass there.", "sw", False),  # no list
        ("He fell on his ass there.", "", False),
        ("これは女の子です", "ja", False),  # allowed
        ("グロい絵", "ja", False),
        ("彼は変態だ", "ja", True),  # no boundary needed
        ("性別", "zh", False),  # allowed
        ("他肏了", "zh", True),
    ],
)
def test_a_word_is_found(text, language, found):
    assert contains_bad_word(text, language) is found


@each("language", sorted(languages()))
def test_every_entry_of_every_list_is_found_and_none_in_an_empty_text(language):
    files = [path for path in LISTS.iterdir() if path.name.partition("-")[0] == language]
    entries = {line.strip() for path in files for line in path.read_text("utf-8").splitlines()}
    allowed = {"ja": {"sm", "グロ", "女の子"}, "zh": {"性"}}.get(language, set())
    assert all(contains_bad_word(f"x {entry} y", language) for entry in entries - allowed)
    assert not contains_bad_word("", language)


def test_the_lists_are_those_of_c4():
    assert len(languages()) == 27
    assert len((LISTS / "en").read_text("utf-8").splitlines()) == 377  # the list of C4, not a later one


@settings(max_examples=300)
@given(st.sampled_from(["en", "hi", "ru"]), st.data())
def test_the_search_finds_what_one_regular_expression_finds(language, data):
    """The regular expression is that of TFDS `c4_utils`."""
    entries = [line.strip().lower() for line in (LISTS / language).read_text("utf-8").splitlines()]
    expression = re.compile(r"(?:\W|^)({})(?:\W|$)".format("|".join(re.escape(entry) for entry in entries)))
    pieces = st.sampled_from([*entries, " ", " ", "_", "-", ".", "\n", "a", "1", "é", "्"])
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    cut = text[data.draw(st.integers(0, 3)) :]
    assert contains_bad_word(cut, language) == (expression.search(cut.lower()) is not None)


def test_no_page_of_the_published_corpus_has_one():
    assert not any(contains_bad_word(page, "en") for page in c4_pages())


# md5("a.org/1") = e8d1b535…33 is odd, md5("a.org/2") = 96a5f043…63 is odd, md5("a.org/4") = 20e22acd…22 is even.
@each(
    "text, url, fraction, dropped",
    [
        ("An ass.", "https://www.a.org/4/", 0.5, True),  # 0 < 1
        ("An ass.", "https://www.a.org/4/?utm_source=x", 0.5, True),  # the URL is normalised
        ("An ass.", "https://a.org/1", 0.5, False),  # 1 is not
        ("A class.", "https://a.org/4", 0.5, False),
        ("An ass.", "https://a.org/1", 1.0, True),
        ("An ass.", "https://a.org/4", 0.0, False),
        ("An ass.", "https://a.org/4", 0.75, True),  # 0x22 mod 4 = 2 < 3
        ("An ass.", "https://a.org/1", 0.75, False),  # 0x33 mod 4 = 3
        # 0.999 is 8998192055486251 / 2**53; the last 53 bits of the two md5s are 0.9749 and 0.9996 of 2**53.
        ("An ass.", "https://a.org/1", 0.999, True),
        ("An ass.", "https://a.org/808", 0.999, False),
    ],
)
def test_a_fraction_of_the_pages_is_dropped_by_their_url(text, url, fraction, dropped):
    assert drops_page(text, "en", url, fraction) is dropped
