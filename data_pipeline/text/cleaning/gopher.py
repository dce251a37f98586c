"""Gopher's rules for quality and repetition: Rae et al. 2021, appendix A.1 and table A1.

White space separates words, and blank lines separate paragraphs. Blank lines and paragraphs don't count. A line,
paragraph or n-gram is repeated if it occurred before in the page; the first copy isn't. Fractions of characters leave
out the white space between lines, paragraphs or words.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from data_pipeline.base.config_file import Section
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.step import Rule

STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "●", "-", "*")
_ELLIPSES = ("...", "…")
_BLANK_LINES = re.compile(r"\n\s*\n")
Fraction = Annotated[float, Field(ge=0, le=1)]


def _number(key: object) -> object:  # in JSON, keys are text
    return int(key) if isinstance(key, str) and key.isdecimal() else key


# The n of n-grams, at most ten times the published ones: the n-grams of a page take words × n pointers.
Length = Annotated[int, Field(gt=0, le=100), BeforeValidator(_number)]


class GopherConfig(Section):
    """Gopher's rules for whole pages: a page beyond a threshold is dropped. A page exactly at a threshold is kept."""

    min_words: NonNegativeInt = 50
    """Minimum number of words of a page. 0: off."""
    max_words: PositiveInt | None = 100_000
    """Maximum number of words of a page. null: no limit."""
    min_mean_word_length: float = Field(3.0, ge=0)
    """Minimum mean length of a page's words, in characters. 0: off."""
    max_mean_word_length: float | None = Field(10.0, gt=0)
    """Maximum mean length of a page's words, in characters. null: no limit."""
    max_symbols_per_word: float | None = Field(0.1, ge=0)
    """Maximum number of hash signs per word, and of ellipses per word. null: no limit."""
    max_bullet_lines: Fraction = 0.9
    """Maximum fraction of lines that start with a bullet point. 1: off."""
    max_ellipsis_lines: Fraction = 0.3
    """Maximum fraction of lines that end with an ellipsis. 1: off."""
    min_alphabetic_words: Fraction = 0.8
    """Minimum fraction of words that have a letter. 0: off."""
    min_stop_words: NonNegativeInt = 2
    """Minimum number of different English stop words: the, be, to, of, and, that, have, with. 0: off."""
    max_duplicate_lines: Fraction = 0.3
    """Maximum fraction of lines that repeat earlier lines. 1: off."""
    max_duplicate_paragraphs: Fraction = 0.3
    """Maximum fraction of paragraphs that repeat earlier paragraphs. 1: off."""
    max_duplicate_line_characters: Fraction = 0.2
    """Maximum fraction of characters in repeated lines. 1: off."""
    max_duplicate_paragraph_characters: Fraction = 0.2
    """Maximum fraction of characters in repeated paragraphs. 1: off."""
    max_top_ngrams: dict[Length, Fraction] = {2: 0.20, 3: 0.18, 4: 0.16}
    """For each n, the maximum fraction of characters in the most frequent n-gram of words. {}: off."""
    max_duplicate_ngrams: dict[Length, Fraction] = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    """For each n, the maximum fraction of characters in repeated n-grams of words. {}: off."""


class Gopher(GopherConfig, Rule):
    """Drops pages that break one of Gopher's rules for quality and repetition."""

    step: Literal["gopher"] = "gopher"

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        rule = broken_rule(document.text, self)
        return Dropped(f"gopher_{rule}", document.text) if rule else document


def broken_rule(text: str, rules: GopherConfig) -> str:
    """The first rule that a page breaks; "" if it breaks none."""
    return next(_broken(text, rules), "")


def _broken(text: str, rules: GopherConfig) -> Iterator[str]:
    """The rules that a page breaks, in order."""
    words = text.split()
    count, characters = len(words), sum(map(len, words))
    if count < rules.min_words:
        yield "too_few_words"
    if rules.max_words is not None and count > rules.max_words:
        yield "too_many_words"
    if not words:
        return
    if characters < rules.min_mean_word_length * count:
        yield "short_words"
    if rules.max_mean_word_length is not None and characters > rules.max_mean_word_length * count:
        yield "long_words"
    if (symbols := rules.max_symbols_per_word) is not None:
        if text.count("#") > symbols * count:
            yield "hash_signs"
        if sum(map(text.count, _ELLIPSES)) > symbols * count:
            yield "ellipses"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if sum(line.startswith(_BULLETS) for line in lines) > rules.max_bullet_lines * len(lines):
        yield "bullet_lines"
    if sum(line.endswith(_ELLIPSES) for line in lines) > rules.max_ellipsis_lines * len(lines):
        yield "ellipsis_lines"
    if not _alphabetic(words, rules.min_alphabetic_words * count):
        yield "alphabetic_words"
    if all(len(STOP_WORDS.intersection(found)) < rules.min_stop_words for found in (words, map(str.lower, words))):
        yield "stop_words"
    paragraphs = [part for part in map(str.strip, _BLANK_LINES.split(text)) if part]
    for unit, parts, most, most_characters in (
        ("line", lines, rules.max_duplicate_lines, rules.max_duplicate_line_characters),
        ("paragraph", paragraphs, rules.max_duplicate_paragraphs, rules.max_duplicate_paragraph_characters),
    ):
        repeated, repeated_characters = _repeated(parts)
        if repeated > most * len(parts):
            yield f"duplicate_{unit}s"
        if repeated_characters > most_characters * sum(map(len, parts)):
            yield f"duplicate_{unit}_characters"
    for length in _exceeded_by_top(words, rules.max_top_ngrams, characters):
        yield f"top_{length}_gram"
    for length in _exceeded_by_repeated(words, rules.max_duplicate_ngrams, characters):
        yield f"duplicate_{length}_grams"


def _alphabetic(words: list[str], least: float) -> bool:
    """Whether `least` words have a letter. Most words have only letters, which is quick to see."""
    if sum(map(str.isalpha, words)) >= least:
        return True
    return sum(any(map(str.isalpha, word)) for word in words) >= least


def _repeated(parts: Sequence[str]) -> tuple[int, int]:
    """(how many of `parts` occurred before, their characters)."""
    different = set(parts)
    return len(parts) - len(different), sum(map(len, parts)) - sum(map(len, different))


def _exceeded_by_top(words: list[str], limits: dict[int, float], characters: int) -> Iterator[int]:
    """Each n whose most frequent n-gram exceeds its limit. Of equally frequent n-grams the longest counts.

    An n-gram that occurs once isn't repeated. No n-gram is more frequent than the most frequent shorter one, so n-grams
    are counted only if they can exceed the limit.
    """
    longest, often = max(map(len, words)), len(words)
    for length, most in sorted(limits.items()):
        if often * length * longest <= most * characters:
            continue
        counts = Counter(_ngrams(words, length))
        often = max(counts.values(), default=0)
        if often < 2:
            return
        top = max(sum(map(len, ngram)) for ngram, number in counts.items() if number == often)
        if often * top > most * characters:
            yield length


def _exceeded_by_repeated(words: list[str], limits: dict[int, float], characters: int) -> Iterator[int]:
    """Each n whose repeated n-grams exceed its limit. A word in several n-grams counts once.

    A word of a repeated n-gram is also in a repeated shorter one, so the fraction falls with n.
    """
    least = min(limits.values(), default=1.0) * characters
    for length, most in sorted(limits.items()):
        repeated = _characters_of_repeated(words, length)
        if repeated > most * characters:
            yield length
        if repeated <= least:
            return


def _characters_of_repeated(words: list[str], length: int) -> int:
    ngrams = list(_ngrams(words, length))
    if len(set(ngrams)) == len(ngrams):
        return 0
    seen: set[tuple[str, ...]] = set()
    characters = counted = 0  # words before `counted` are counted, or in no repeated n-gram
    for start, ngram in enumerate(ngrams):
        if ngram in seen:
            characters += sum(map(len, words[max(start, counted) : start + length]))
            counted = start + length
        else:
            seen.add(ngram)
    return characters


def _ngrams(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return pairwise(words) if length == 2 else zip(*(words[start:] for start in range(length)), strict=False)
