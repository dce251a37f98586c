"""Cleans one page: C4's rules for length, lines, sentences and paragraphs, then Gopher's rules for the whole page, then
rules of installed packages. The rules for language, bad words and the classifier come last, as in C4.

C4's rules are those of Raffel et al. 2020, section 2.2, in the order and to the letter of TFDS `c4_utils`. Where paper
and program differ, we follow the program, which made the published corpus. Copies of the paper that say "5 sentences, 3
words" have the two numbers swapped. Of the curly brackets, only `{` drops a page.
"""

import heapq
import re

import re2

from data_pipeline.text.cleaning.bad_words import drops_page, list_of
from data_pipeline.text.cleaning.classifier import scorer
from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.cleaning.gopher import keep_page
from data_pipeline.text.cleaning.language import detector, keep_language
from data_pipeline.text.document import Tally
from data_pipeline.text.sentences import count_sentences


class Cleaner:
    """The rules of a CleaningConfig as a function of one page."""

    def __init__(self, config: CleaningConfig):
        self._config = config
        self._filters = PageFilters(config)

    def __call__(self, text: str, url: str, language: str, tally: Tally) -> tuple[str, str] | None:
        """(cleaned text, language) of the page; None if it is dropped. Counts what each rule drops.

        `language`: the source's, or "".
        """
        config = self._config
        if config.web_rules or config.max_word_length or config.min_words_per_line or config.min_sentences_per_page:
            cleaned = clean_page(text, config, tally)
            if cleaned is None:
                return None
            text = cleaned
        elif is_too_long(text, config, tally):
            return None
        if config.paragraphs and not has_paragraphs(text, config.paragraphs):
            tally.document("too_few_paragraphs", text)
            return None
        if config.gopher and not keep_page(text, config.gopher, tally):
            return None
        for rule in config.rules:
            left = rule.clean(text, url, tally)
            if left is None:
                return None
            if not left.strip():
                tally.document("empty", url or text)
                return None
            text = left
        kept = self._filters(text, url, language, tally)
        return None if kept is None else (text, kept)

    def target(self, target: str, tally: Tally) -> str:
        """The target of a text-to-text pair, which only rules of installed packages change."""
        for rule in self._config.rules:
            target = rule.clean_target(target, tally)
        return target


class PageFilters:
    """The rules for language, bad words and the classifier, which see a page after its lines were deduplicated."""

    def __init__(self, config: CleaningConfig):
        self._config = config
        self._detect = detector(config.language.detector) if config.language.detector != "none" else None
        self._score = scorer(config.classifier) if config.classifier else None

    def __call__(self, text: str, url: str, language: str, tally: Tally) -> str | None:
        """The language of the page: the detected one or, without a detector, the source's `language`. None if the page
        is dropped, which is counted.

        In a page of unknown language, the words of all enabled lists are searched for.
        """
        config = self._config
        if self._detect is not None:
            found = keep_language(text, self._detect, config.language.keep, config.language.threshold, tally)
            if found is None:
                return None
            language = found
        lists = [listed for listed in config.bad_words if list_of(language) in ("", listed)]
        if any(drops_page(text, listed, url, config.bad_words_fraction) for listed in lists):
            tally.document("bad_words", url)  # the URL, not the text: the report shows examples
            return None
        if config.classifier and self._score and self._score(text) < config.classifier.threshold:
            tally.document("classifier", text)
            return None
        return language


_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_END_MARKS = {".", "?", "!", '"'}
_ELLIPSIS = "..."
_NAMED = re2.compile("(?i)lorem ipsum|javascript|cookie|policy|terms of use")  # each finds as much as with `lower`
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def clean_page(text: str, rules: CleaningConfig, tally: Tally) -> str | None:
    """The lines of `text` that are prose, or None if the page is dropped.

    A line or page exactly at a threshold is kept. Words are measured before citation marks are removed.

    `tally` counts each line that passed, or the rule that dropped the line (`too_long_word`, `no_endmark`, `too_short`,
    `javascript`, `policy`), and the rule that dropped the page (`too_long`, `lorem_ipsum`, `curly_bracket`,
    `too_few_sentences`).

        "Home | About\nUlm is a city on the Danube.[3]\nIt is old. Its minster is high."
        ->  "Ulm is a city on the Danube.\nIt is old. Its minster is high."
    """
    if is_too_long(text, rules, tally):
        return None
    kept: list[str] = []
    web_rules, longest, least_words = rules.web_rules, rules.max_word_length, rules.min_words_per_line
    brackets, braces = web_rules and "[" in text, web_rules and "{" in text
    # Only pages with one of the words are converted to lower case. Without a citation mark, two halves may be a word.
    names = brackets or (web_rules and _NAMED.search(text) is not None)
    for line in text.splitlines():
        line = line.strip()
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
            tally.document("lorem_ipsum", line)
            return None
        if "javascript" in lowered:
            tally.line("javascript", line)
            continue
        if braces and "{" in line:
            tally.document("curly_bracket", line)
            return None
        if lowered and any(policy in lowered for policy in _POLICIES):
            tally.line("policy", line)
            continue
        tally.lines_passed += 1
        kept.append(line)
    if not any(kept) or not _has_sentences(kept, rules.min_sentences_per_page):
        tally.document("too_few_sentences", text)
        return None
    return "\n".join(kept).strip()


def is_too_long(text: str, rules: CleaningConfig, tally: Tally) -> bool:
    """Whether the raw page exceeds `max_page_characters`; counts `too_long` if so.

    C4 applies this rule before it chooses the newest page of each URL, and all other rules after it. So a page that is
    too long doesn't replace an older page.
    """
    if rules.max_page_characters is None or len(text) <= rules.max_page_characters:
        return False
    tally.document("too_long", text)
    return True


def _has_sentences(lines: list[str], minimum: int) -> bool:
    """Whether `lines` have `minimum` sentences, counted line by line.

    Every line has at least one sentence. So most pages need no counting: they have `minimum` lines.
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
