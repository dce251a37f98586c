"""Counts what a sentencepiece model changes in texts before it splits them: decoding doesn't bring these places back.

T5's normalization turns line breaks and tabs into spaces, leaves one space of several, and gives characters the form of
NFKC: ² becomes 2, and e with a combining accent becomes é.
"""

import re
import unicodedata
from collections.abc import Mapping

import sentencepiece

from data_pipeline.base.formatting import first_few
from data_pipeline.corpus.tokenizer.text_model import CodePoints

RUN = "  "  # stands for several spaces in a row, and for a space at the start or the end of a text
DECOMPOSED = "e\u0301"  # stands for a letter and a mark that become one character
_NAMES = {
    "\n": ("line break", "line breaks"),
    "\t": ("tab", "tabs"),
    RUN: ("run of spaces", "runs of spaces"),
    DECOMPOSED: ("decomposed character", "decomposed characters"),
}
_RUN = re.compile(r" {2,}")
_CHARACTERS_AT_ONCE = 1 << 20
_SHOWN = 5


class Changes:
    """Counts the places that a normalization changes. `model`: of a sentencepiece model; None: T5's for a new one."""

    def __init__(self, model: bytes | None = None):
        self._normalizer = sentencepiece.SentencePieceNormalizer(
            model_proto=model,
            rule_name="nmt_nfkc" if model is None else None,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            escape_whitespaces=False,
        )
        self._points, self._runs, self._decomposed = CodePoints(), 0, 0
        self._waiting, self._size = list[str](), 0

    def add(self, text: str) -> None:
        self._runs += _runs_of_spaces(text)
        self._decomposed += _decomposed(text)
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= _CHARACTERS_AT_ONCE:
            self._see()

    @property
    def counts(self) -> dict[str, int]:
        """The number of each character that is changed, of runs of spaces, under RUN, and of marks that become one
        character with what is before them, under DECOMPOSED."""
        self._see()
        seen = {**self._points.counts, DECOMPOSED: self._decomposed}
        found = {one: n for one, n in seen.items() if n and self._normalizer.normalize(one) != one}
        return {**found, **({RUN: self._runs} if self._runs else {})}

    def _see(self) -> None:
        self._points.add("".join(self._waiting))
        self._waiting, self._size = [], 0


def _runs_of_spaces(text: str) -> int:
    """The number of runs of several spaces, and of a single space at the start or the end of the text."""
    inner = len(_RUN.findall(text)) if RUN in text else 0  # few texts have one, and `in` is 20 times as fast
    first = text.startswith(" ") and not text.startswith(RUN)
    last = len(text) > 1 and text.endswith(" ") and not text.endswith(RUN)
    return inner + first + last


def _decomposed(text: str) -> int:
    """The number of characters by which NFC shortens the text: é from e and a mark is one.

    Too few, if there are also characters that NFC divides, such as U+0958.
    """
    return max(0, len(text) - len(unicodedata.normalize("NFC", text)))


def describe(changed: Mapping[str, int]) -> str:
    """A line that says what is changed, and how to keep it; "" if nothing is changed.

    {"\\n": 2, "²": 1}  ->  "normalization changes line breaks (2) and other characters (1: ²), and …"
    """
    if not changed:
        return ""
    found = [f"{plural} ({changed[one]:,})" for one, (_, plural) in _NAMES.items() if one in changed]
    if others := {one: n for one, n in changed.items() if one not in _NAMES}:
        shown = first_few(map(name, sorted(others, key=lambda one: (-others[one], one))), _SHOWN)
        found.append(f"other characters ({sum(others.values()):,}: {shown})")
    listed = " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
    return (
        f"normalization changes {listed}, and decoding doesn't bring them back; a tokenizer that is trained with "
        "tokenizer.normalization: identity changes nothing"
    )


def name(one: str) -> str:
    """What is changed, in a table: "line break", "²", "U+00AD"."""
    visible = one.isprintable() and not one.isspace() and not unicodedata.combining(one[0])
    return _NAMES[one][0] if one in _NAMES else one if visible else f"U+{ord(one):04X}"
