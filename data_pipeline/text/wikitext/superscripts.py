"""Superscripts and subscripts as text: 10<sup>6</sup> isn't 106, and 1<sup>st</sup> is 1st.

What stands before a superscript is known once its line has no quotes, tags and templates left. Until then, a character
that no page contains marks where a superscript begins.
"""

import re

# EXPONENT marks a superscript that begins with a variable: it is always a power.
RAISED, EXPONENT, LOWERED = "\x04", "\x05", "\x06"
MARKS = RAISED + EXPONENT + LOWERED

_TAG = re.compile(r"<(/?)su(?:b|(p))\b[^<>]*>", re.IGNORECASE)
# 2<sup>''a''</sup>, 2<sup>n</sup>, 2<sup>k+1</sup>; but 2<sup>a</sup> is the feminine second.
_VARIABLE = re.compile(r" *(?:''\w''|[ij]?[knxyz](?: *[-+−] *\w+)? *(?:</sup|$))")
_POWER = re.compile(
    rf"{RAISED}(?<=[\w)\]|′]{RAISED}) *(?=[-−+–]?[.,]?\d|[-−–]\w)|{EXPONENT}(?<=[\w)\]|′]{EXPONENT}) *(?=[-−–]?\w)"
)
_INDEX = re.compile(rf"{LOWERED}(?<=\d{LOWERED})(?=\d)")
_MARK = re.compile(f"[{MARKS}]")


def mark_tags(text: str) -> str:
    """Replaces each <sup> and <sub> by a mark, except at the beginning of a word, and removes </sup> and </sub>."""
    return _TAG.sub(_mark, text)


def _mark(tag: re.Match[str]) -> str:
    text = tag.string
    before = text[tag.start() - 1 : tag.start()]
    if tag[1]:  # two pairs of quotes aren't four quotes
        return LOWERED if before == "'" and text.startswith("'", tag.end()) else ""
    if not before.strip():
        return ""
    return LOWERED if not tag[2] else EXPONENT if _VARIABLE.match(text, tag.end()) else RAISED


def raised(text: str) -> str:
    """The content of a superscript, marked."""
    return (EXPONENT if _VARIABLE.match(text) else RAISED) + text if text else ""


def without_marks(line: str) -> str:
    r"""A complete line with a caret for each power, and an underscore for an index that would merge with a number.

    "10\x046"  ->  "10^6"        "1\x04st"  ->  "1st"        "x\x061"  ->  "x1"        "101\x062"  ->  "101_2"
    """
    if RAISED in line or EXPONENT in line or LOWERED in line:
        return _MARK.sub("", _POWER.sub("^", _INDEX.sub("_", line)))
    return line
