"""Counts and finds sentences as C4 did: Punkt (Kiss & Strunk 2006) with NLTK's English parameters."""

import functools
import re
from collections.abc import Iterator
from itertools import islice

from punkt import PunktParameters, PunktSentenceTokenizer
from punkt.data import english
from punkt.rules.language import LanguageVars

_MARKED_WORD = re.compile(r"(?<!\S)[^\s.?!]*+[.?!]\S*+")
_END_MARK = re.compile("[.?!]")
_PLAIN_END = re.compile(r"[.?!][ \n]+(?=[A-Z])")  # Punkt sees no end in some other white space
_PLAIN_WORD = range(2, 30)  # letters
_NON_WORD = """)";}]*:@'({["""
_BOUNDARY = re.compile(rf"[.?!](?=(?P<after_tok>[?!{re.escape(_NON_WORD)}]|\s+(?P<next_tok>\S+)))")
_REALIGNED = r"""["')\]}]+?(?:\s+|(?=--)|$)"""


def count_sentences(text: str, at_most: int | None = None) -> int:
    """The number of sentences in `text`, or `at_most` if there are more; 0 for white space alone.

    "Dr. Who is here. He waits."  ->  2        "Stop!!!"  ->  2, as in NLTK
    """
    if not text or text.isspace():
        return 0
    if at_most == 1 or not _BOUNDARY.search(text):  # without a boundary there is one sentence
        return 1
    if at_most and _ends_plainly(text, at_most - 1):
        return at_most
    return sum(1 for _ in islice(_english().span_tokenize(text), at_most))


def sentence_starts(text: str) -> list[int]:
    """Where each sentence of `text` starts: "Dr. Who is here. He waits."  ->  [0, 17]. [] for white space alone."""
    return [start for start, _ in _english().span_tokenize(text)] if text.strip() else []


def _ends_plainly(text: str, times: int) -> bool:
    """Whether `times` or more sentences end in the plainest way: a word of ASCII letters and a mark, then a capital.

    Punkt ends a sentence there unless the word is an abbreviation or the first of a collocation. This check is quicker
    than Punkt's tokens.
    """
    kept = _kept_together()
    for end in _PLAIN_END.finditer(text):
        before = text[max(0, end.start() - _PLAIN_WORD.stop) : end.start()].rsplit(None, 1)
        word = before[-1] if before else ""
        if len(word) in _PLAIN_WORD and word.isascii() and word.isalpha() and word.lower() not in kept:
            times -= 1
            if not times:
                return True
    return False


@functools.cache
def _kept_together() -> frozenset[str]:
    return frozenset(english.ABBREV_TYPES) | {first for first, _ in english.COLLOCATIONS}


def candidates(text: str) -> Iterator[tuple[re.Match, str]]:
    """For each word: the last mark that may end a sentence, and the word up to the mark with what follows."""
    for word in _MARKED_WORD.finditer(text):
        marks = [mark.start() for mark in _END_MARK.finditer(word[0])]
        for boundary in (_BOUNDARY.match(text, word.start() + mark) for mark in reversed(marks)):
            if boundary:
                yield boundary, text[word.start() : boundary.end()] + boundary["after_tok"]
                break


class _AsOfOld(PunktSentenceTokenizer):
    """Punkt as in NLTK until 3.6.5, with which C4 was made.

    Later versions treat typographic quotes and runs of marks ("!!!!") differently: 1 % of C4's lines would have another
    number of sentences.
    """

    __slots__ = ()

    def _raw_spans(self, text: str) -> Iterator[tuple[int, int]]:
        start = 0
        for boundary, context in candidates(text):
            if self._context_has_sentbreak(context):
                yield start, boundary.end()
                start = boundary.start("next_tok") if boundary["next_tok"] else boundary.end()
        yield start, len(text.rstrip())


@functools.cache
def _english() -> PunktSentenceTokenizer:
    learned = {
        "abbrev_types": set(english.ABBREV_TYPES),
        "collocations": set(english.COLLOCATIONS),
        "sent_starters": set(english.SENT_STARTERS),
        "ortho_context": dict(english.ORTHO_CONTEXT),
    }
    rules = LanguageVars(non_word_chars=_NON_WORD, boundary_realignment_pattern=_REALIGNED)
    return _AsOfOld(PunktParameters(**learned), rules=rules)
