"""C4's bad words: the LDNOOBW lists, matched as TFDS `c4_utils` does."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import re2
from pydantic import AfterValidator, Field

from data_pipeline.text.document import Document, Dropped, Tally, is_chosen, normalize_url
from data_pipeline.text.languages import shortest_tag
from data_pipeline.text.step import Rule

_LISTS = Path(__file__).with_name("bad_words_lists")
_WITHOUT_SPACES = ("ja", "th", "zh")
# Bokmål and Nynorsk, Tagalog, and single languages that ISO 639-3 groups as Arabic, Persian and Chinese
_OF_LIST = {"nb": "no", "nn": "no", "tl": "fil", "arb": "ar", "pes": "fa", "prs": "fa", "cmn": "zh"}
# Parts of ordinary words in languages without spaces; each would drop more than a tenth of the pages.
_ALLOWED = {"ja": {"sm", "グロ", "女の子"}, "zh": {"性"}}

ListNames = Annotated[
    list[Annotated[str, AfterValidator(lambda given: list_of(given))]], AfterValidator(lambda given: existing(given))
]
"""Languages, by the names of their lists."""


class BadWords(Rule):
    """Drops pages with a bad word of their language's list; in a page of unknown language, of any of the lists."""

    step: Literal["bad_words"] = "bad_words"
    languages: ListNames = ["en"]
    """Languages whose lists are used."""
    fraction: float = Field(1.0, ge=0, le=1)
    """The share of pages with a bad word that are dropped, chosen by URL or, without a URL, by id. Multilingual C4:
    0.999."""

    version = 2

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        spoken = list_of(document.language)
        chosen_by = document.url or document.id
        lists = [listed for listed in self.languages if spoken in ("", listed)]
        if any(drops_page(document.text, listed, chosen_by, self.fraction) for listed in lists):
            return Dropped("bad_words", document.url)  # the URL, not the text: the report shows examples
        return document


def existing(lists: list[str]) -> list[str]:
    """`lists`. Raises ValueError if a language among them has no list."""
    if unknown := sorted(set(lists) - languages()):
        raise ValueError(f"no list for {', '.join(unknown)}; there are {', '.join(sorted(languages()))}")
    return lists


def contains_bad_word(text: str, language: str) -> bool:
    """Whether `text` has a word or phrase of its language's list, in any case; False for a language without a list.

    Of a tag, only the language counts: "en", "eng" and "en-Latn" are the same. No letter, digit or underscore may touch
    a hit, except in Japanese, Thai and Chinese.

        "An ass."  ->  True        "A class."  ->  False        "An _ass_."  ->  False
    """
    matcher = _matcher(list_of(language))
    return matcher is not None and matcher(text)


def drops_page(text: str, language: str, url: str, filter_fraction: float) -> bool:
    """Whether a page is dropped for bad words. Of the pages with bad words, the share `filter_fraction` is dropped.

    The URL decides as in TFDS: md5 of the normalised URL modulo the denominator of the float's exact fraction, compared
    with its numerator. Multilingual C4 uses 0.999. `url`: the document's id if the page has no URL.
    """
    return contains_bad_word(text, language) and is_chosen(normalize_url(url), *filter_fraction.as_integer_ratio())


@functools.cache
def languages() -> frozenset[str]:
    """The languages that have a list."""
    return frozenset(_primary(path.name) for path in _LISTS.iterdir() if path.name not in ("README.md", "LICENSE"))


def list_of(language: str) -> str:
    """The name of the list for this language tag, also if there is no such list: "eng-Latn" -> "en"."""
    code = _primary(shortest_tag(language))
    return _OF_LIST.get(code, code)


def _primary(language: str) -> str:
    return language.partition("-")[0]


@functools.cache
def _matcher(language: str) -> Callable[[str], bool] | None:
    """A function that finds a language's bad words in a text, in any case. "fr" includes Québec's list.

    Entries are converted to lower case too. TFDS doesn't do that, so its capitalised entries, most of the Spanish list,
    never match. The English list, used for C4, has no such entries.
    """
    if language not in languages():
        return None
    files = [path for path in _LISTS.iterdir() if _primary(path.name) == language]
    phrases = {line.strip() for path in files for line in path.read_text("utf-8").splitlines()}
    lowered = {phrase.lower() for phrase in phrases - _ALLOWED.get(language, set())}
    if language not in _WITHOUT_SPACES:
        return _between_boundaries(lowered)
    pattern = re2.compile(_either(lowered))
    return lambda text: pattern.search(text.lower()) is not None


def _between_boundaries(phrases: set[str]) -> Callable[[str], bool]:
    r"""Matches like `(?<!\w)(…|…)(?!\w)` in the lowercase text, twenty times as fast.

    RE2 has no lookaround, and its word characters are ASCII. So RE2 only finds candidates, phrases between ASCII
    boundaries, in one page of fifty, and Python's expressions decide. RE2 ignores case, except for İ, whose lower case
    has two characters.
    """
    likely = re2.compile(rf"(?i)(?:^|[^a-z0-9_])(?:{_either(phrases)})(?:[^a-z0-9_]|$)")

    def occur_in(text: str) -> bool:
        if likely.search(text) is None and "İ" not in text:
            return False
        text = text.lower()
        return any(phrase in text and re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) for phrase in phrases)

    return occur_in


def _either(phrases: set[str]) -> str:
    return "|".join(re2.escape(phrase) for phrase in sorted(phrases))
