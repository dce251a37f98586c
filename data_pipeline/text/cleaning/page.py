"""C4's rules for length, lines, sentences and paragraphs of a page.

These are the rules of Raffel et al. 2020, section 2.2, in the order and to the letter of TFDS `c4_utils`. Where paper
and program differ, we follow the program, which made the published corpus. Copies of the paper that say "5 sentences, 3
words" have the two numbers swapped. Of the curly brackets, only `{` drops a page.
"""

import heapq
import re
from typing import Literal

import re2
from pydantic import NonNegativeInt, PositiveInt

from data_pipeline.base.config_file import Section
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.step import Rule

TOO_LONG = "too_long"


class PageConfig(Section):
    """Rules for the length, the lines and the sentences of a page."""

    max_page_characters: PositiveInt | None = None
    """Maximum number of characters of a page. Longer pages are dropped. null: no limit."""
    web_rules: bool = False
    """Apply C4's rules on content: terminal punctuation, JavaScript, policies, lorem ipsum, braces, citation marks.
    White space around lines is removed."""
    max_word_length: PositiveInt | None = None
    """Maximum length of a word, in characters between white space. Lines with a longer word are dropped. null: no
    limit."""
    min_words_per_line: NonNegativeInt = 0
    """Minimum number of words of a line. Lines with fewer are dropped. 0: off."""
    min_sentences_per_page: NonNegativeInt = 0
    """Minimum number of sentences of a page. Pages with fewer are dropped. 0: off."""


class CleanPage(PageConfig, Rule):
    """Keeps the lines of a page that are prose. The defaults are C4's."""

    step: Literal["page"] = "page"
    max_page_characters: PositiveInt | None = 190_000
    web_rules: bool = True
    max_word_length: PositiveInt | None = 1000
    min_words_per_line: NonNegativeInt = 5
    min_sentences_per_page: NonNegativeInt = 3

    version = 2

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        if self.web_rules or self.max_word_length or self.min_words_per_line or self.min_sentences_per_page:
            text = clean_page(document.text, self, tally)
            return text if isinstance(text, Dropped) else document.with_text(text)
        return Dropped(TOO_LONG, document.text) if is_too_long(document.text, self) else document


class Paragraphs(Rule):
    """Drops pages with few long lines."""

    step: Literal["paragraphs"] = "paragraphs"
    minimum: PositiveInt = 3
    """Minimum number of lines of at least 200 characters. Multilingual C4: 3."""

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        enough = has_paragraphs(document.text, self.minimum)
        return document if enough else Dropped("too_few_paragraphs", document.text)


_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_END_MARKS = {".", "?", "!", '"'}
_ELLIPSIS = "..."
_NAMED = re2.compile("(?i)lorem ipsum|javascript|cookie|policy|terms of use")  # each finds as much as with `lower`
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def clean_page(text: str, rules: PageConfig, tally: Tally) -> str | Dropped:
    """The lines of `text` that are prose, or why the page is dropped.

    A line or page exactly at a threshold is kept. Words are measured before citation marks are removed. With
    `web_rules`, lines end where Unicode says and lose the white space around them, as in C4. Without `web_rules`, lines
    end at a line feed, and the kept lines are unchanged.

    `tally` counts each line that passed, or the rule that dropped the line (`too_long_word`, `no_endmark`, `too_short`,
    `javascript`, `policy`). A page is dropped by the rule `too_long`, `lorem_ipsum`, `curly_bracket` or
    `too_few_sentences`.

        "Home | About\nUlm is a city on the Danube.[3]\nIt is old. Its minster is high."
        ->  "Ulm is a city on the Danube.\nIt is old. Its minster is high."
    """
    if is_too_long(text, rules):
        return Dropped(TOO_LONG, text)
    kept: list[str] = []
    web_rules, longest, least_words = rules.web_rules, rules.max_word_length, rules.min_words_per_line
    brackets, braces = web_rules and "[" in text, web_rules and "{" in text
    # Only pages with one of the words are converted to lower case. Without a citation mark, two halves may be a word.
    names = brackets or (web_rules and _NAMED.search(text) is not None)
    body = text.removesuffix("\n")  # the last line may have a line feed
    for written in text.splitlines() if web_rules else body.split("\n"):
        line = written.strip()
        if longest and len(line) > longest and max(map(len, line.split())) > longest:
            tally.line("too_long_word", line)
            continue
        if brackets and "[" in line:
            line = _CITATION.sub("", line)  # not stripped again: C4 drops "A line. [3]" for its last character
        if web_rules and (line[-1:] not in _END_MARKS or line.endswith(_ELLIPSIS)):
            tally.line("no_endmark", line)
            continue
        if least_words and len(line.split(None, least_words - 1)) < least_words:
            tally.line("too_short", line)
            continue
        lowered = line.lower() if names else ""
        if "lorem ipsum" in lowered:
            return Dropped("lorem_ipsum", line)
        if "javascript" in lowered:
            tally.line("javascript", line)
            continue
        if braces and "{" in line:
            return Dropped("curly_bracket", line)
        if lowered and any(policy in lowered for policy in _POLICIES):
            tally.line("policy", line)
            continue
        tally.lines_passed += 1
        kept.append(line if web_rules else written)
    with_text = [line for line in kept if line.strip()]
    if not with_text or not _has_sentences(with_text, rules.min_sentences_per_page):
        return Dropped("too_few_sentences", text)
    return "\n".join(kept).strip() if web_rules else "\n".join(kept) + text[len(body) :]


def is_too_long(text: str, rules: PageConfig) -> bool:
    """Whether the raw page exceeds `max_page_characters`.

    C4 applies this rule before it chooses the newest page of each URL, and all other rules after it. So a page that is
    too long doesn't replace an older page.
    """
    return rules.max_page_characters is not None and len(text) > rules.max_page_characters


def _has_sentences(lines: list[str], minimum: int) -> bool:
    """Whether `lines` have `minimum` sentences, counted line by line.

    Every line has text, and so at least one sentence. So most pages need no counting: they have `minimum` lines.
    """
    missing = minimum - len(lines)
    for line in lines:
        if missing <= 0:
            return True
        missing -= count_sentences(line, missing + 1) - 1
    return missing <= 0


def has_paragraphs(text: str, min_paragraphs: int = 3, min_paragraph_characters: int = 200) -> bool:
    """Multilingual C4's rule instead of `clean_page`: whether at least that many lines are at least that long.

    Xue et al. 2021 (mT5), section 3.1.

        has_paragraphs("aaaa\nbb\ncccc", 2, 4)  ->  True        has_paragraphs("aaaa\nbb\nccc", 2, 4)  ->  False
    """
    longest = heapq.nlargest(min_paragraphs, map(len, text.split("\n")))
    return len(longest) == min_paragraphs and all(length >= min_paragraph_characters for length in longest)
