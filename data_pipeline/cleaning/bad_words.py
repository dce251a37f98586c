"""C4's bad words: the LDNOOBW lists, matched as TFDS `c4_utils` does."""

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from data_pipeline.dedup.urls import normalize_url

_LISTS = Path(__file__).with_name("bad_words_lists")
_WORD = re.compile(r"\w+")
_WITHOUT_SPACES = ("ja", "th", "zh")
# Parts of ordinary words in languages without spaces: each would drop more than a tenth of its language's pages.
_ALLOWED = {"ja": {"sm", "グロ", "女の子"}, "zh": {"性"}}


def contains_bad_word(text: str, language: str) -> bool:
    """Whether `text` has a word or phrase of its language's list, in any case; False for a language without a list.

    Of `language` ("en", "en-Latn") only the first part counts. What surrounds a hit must not be a letter, digit or
    underscore, but in Japanese, Thai and Chinese may be anything.

        "An ass."  ->  True        "A class."  ->  False        "An _ass_."  ->  False
    """
    matcher = _matcher(_primary(language))
    return matcher is not None and matcher(text.lower())


def drops_page(text: str, language: str, url: str, filter_fraction: float = 1.0) -> bool:
    """Whether a page is dropped for its words: of those that have any, `filter_fraction`, chosen by their URL.

    The choice is TFDS's: md5 of the normalised URL modulo the denominator of the float's exact fraction, compared with
    its numerator. Multilingual C4 drops 0.999 of such pages.
    """
    numerator, denominator = filter_fraction.as_integer_ratio()
    if not contains_bad_word(text, language):
        return False
    digest = hashlib.md5(normalize_url(url).encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % denominator < numerator


@functools.cache
def languages() -> frozenset[str]:
    """The languages that have a list."""
    return frozenset(_primary(path.name) for path in _LISTS.iterdir() if path.name not in ("README.md", "LICENSE"))


def _primary(language: str) -> str:
    return language.partition("-")[0]


@functools.cache
def _matcher(language: str) -> Callable[[str], bool] | None:
    """Whether a lowered text has one of the words of a language, of all its regions: Québec's list is part of "fr".

    They are lowered like the text. TFDS leaves them as they are, so that its capitalised entries, most of the Spanish
    ones, never match; English, which C4 is made with, has none.
    """
    if language not in languages():
        return None
    files = [path for path in _LISTS.iterdir() if _primary(path.name) == language]
    phrases = {line.strip() for path in files for line in path.read_text("utf-8").splitlines()}
    lowered = {phrase.lower() for phrase in phrases - _ALLOWED.get(language, set())}
    return _anywhere(lowered) if language in _WITHOUT_SPACES else _between_boundaries(lowered)


def _anywhere(phrases: set[str]) -> Callable[[str], bool]:
    pattern = re.compile("|".join(map(re.escape, phrases)))
    return lambda text: pattern.search(text) is not None


def _between_boundaries(phrases: set[str]) -> Callable[[str], bool]:
    r"""As `(?<!\w)(…|…)(?!\w)`, at several times its speed.

    On word boundaries a phrase begins with a whole word of the text. An entry of one word, as most are, is found when
    that word is; one of several is searched for only where its first word occurs.
    """
    words = {phrase for phrase in phrases if _WORD.fullmatch(phrase)}
    beginning_with: dict[str, list[tuple[str, re.Pattern]]] = {"": []}  # "": begins with no word, any text may have it
    for phrase in phrases - words:
        first_word = _WORD.match(phrase)
        pattern = re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)")
        beginning_with.setdefault(first_word[0] if first_word else "", []).append((phrase, pattern))

    def occur_in(text: str) -> bool:
        found = {"", *_WORD.findall(text)}
        return not words.isdisjoint(found) or any(
            phrase in text and pattern.search(text)
            for first_word in beginning_with.keys() & found
            for phrase, pattern in beginning_with[first_word]
        )

    return occur_in
