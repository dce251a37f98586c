"""One document of text, from any source."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored in `documents/*.parquet`.

    `id` is the source's name, the path relative to the source's root and the record's ordinal, so it is the same on
    every machine. `target` is set for text-to-text pairs, whose input is `text`. A field that the source doesn't give
    is "", and so is one that was not read.
    """

    id: str = ""
    text: str = ""
    url: str = ""
    title: str = ""
    language: str = ""
    source: str = ""
    split: str = ""
    timestamp: str = ""
    target: str = ""
