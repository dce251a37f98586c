"""What every source yields."""

from dataclasses import dataclass


@dataclass(slots=True)
class Record:
    """One record of an input file, before cleaning.

    `ordinal`: index of the record among all records of its file, dropped ones included, so that it never depends on
    what the filters do. `text`: as the file has it (for Wikipedia: wikitext). Empty strings: the file doesn't say.
    """

    ordinal: int
    text: str
    url: str = ""
    title: str = ""
