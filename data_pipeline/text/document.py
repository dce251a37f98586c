"""One document of text, from any source."""

from dataclasses import dataclass


@dataclass(slots=True)
class Document:
    """A document as it is stored in `documents/*.parquet`.

    `id` is source name + path relative to the source's root + record ordinal: the same on every machine.
    `target`: of a text-to-text pair, whose `text` is the input. Empty strings stand for what a source doesn't say.
    """

    id: str
    text: str
    url: str = ""
    title: str = ""
    language: str = ""
    source: str = ""
    split: str = ""
    timestamp: str = ""
    target: str = ""
