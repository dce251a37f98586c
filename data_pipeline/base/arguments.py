"""Checks arguments of Python calls: a wrong one is a UserError, as it is on the command line. Reads lines of text from
a file or a pipe."""

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from data_pipeline.base import paths
from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import is_utf8

_LARGEST = 2**63 - 1


def integer(name: str, given: Any, least: int, most: int = _LARGEST) -> int:
    """`given`, maybe a NumPy integer, as an int. Raises UserError for other types, and outside of `least` to `most`."""
    number = _as_int(given)
    if number is None:
        raise UserError(f"{name}: expected an integer, got {given!r}")
    if not least <= number <= most:
        expected = f"{least} or more" if number < least and most == _LARGEST else f"{least} to {most}"
        raise UserError(f"{name}: expected {expected}, got {number}")
    return number


def seed(given: Any) -> int:
    """`given` as the `seed` of a config: an integer of 64 bits."""
    return integer("seed", given, -(2**63))


def local_path(given: str | Path) -> Path:
    """`given` as a path on this machine; a leading `~` or `~user` becomes the home directory.

    Raises UserError for a URL, an empty path and a user who has no home directory.
    """
    try:
        return Path(paths.local(str(given)))
    except ValueError as error:
        raise UserError(str(error)) from None


def token_ids(given: Any, size: int) -> list[int]:
    """`given`, ids from 0 to `size` - 1, as a list. Raises UserError for anything else, such as the labels' -100."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"expected token ids, got {given!r}")
    found = []
    for one in given:
        number = _as_int(one)
        if number is None or not 0 <= number < size:
            hint = "; leave out the padding of labels" if number == -100 else ""
            raise UserError(f"expected token ids from 0 to {size - 1}, got {one if number is None else number!r}{hint}")
        found.append(number)
    return found


def texts(given: Any) -> list[str]:
    """`given` as a list: a str is one text. Raises UserError for anything but texts."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise UserError(f"texts: expected a text or a list of texts, got {given!r}")
    found = list(given)
    for number, one in enumerate(found):
        if not isinstance(one, str):
            raise UserError(f"texts.{number}: expected a text, got {one!r}")
    return found


def lines_of(source: Path | TextIO) -> list[str]:
    """The lines of a file, or of `source` to its end. Raises UserError if there are none, or they can't be read."""
    name = source if isinstance(source, Path) else "stdin"
    try:
        read = (
            source.read_text(encoding="utf-8-sig", errors="surrogateescape")
            if isinstance(source, Path)
            else source.read()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: can't be read: {error}") from None
    lines = read.split("\n")
    if wrong := [number for number, line in enumerate(lines, 1) if not is_utf8(line)]:
        raise UserError(f"{name}: line {wrong[0]} isn't UTF-8")
    if lines[-1] == "":
        del lines[-1]
    if not lines:
        raise UserError(f"{name}: has no line of text")
    return lines


def _as_int(given: Any) -> int | None:
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None
