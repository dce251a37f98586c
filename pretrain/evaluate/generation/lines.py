"""Reads lines of text from a file or a pipe. This module doesn't import torch, so that texts are checked before a model
is opened."""

from pathlib import Path
from typing import TextIO

from data_pipeline.base.errors import UserError
from data_pipeline.base.formatting import is_utf8


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
