"""Duplicate lines: a line on several pages stays on one of them (C4's rule, TFDS `c4_utils`)."""

from collections.abc import Iterator

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import Step, enough_left, rank
from data_pipeline.text.document import Document, Tally


class EqualLines(Step):
    """Lines are equal after strip and lower. The page with the smallest md5 of its URL keeps the first copy.

    Blank lines don't count. Of 1.6 × 10¹⁰ different lines, about as many as C4's pages in all languages have, 7 pairs
    are expected to share a 64-bit hash.
    """

    name = "lines"

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        if document.target:  # the text of a pair is its input with the prefix
            return
        order = rank(document)
        for number, line in enumerate(document.text.split("\n")):
            if normalized := line.strip().lower():
                yield number, (hash64(normalized), order)

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        """ "One.\nTwo.\nThree." without [1]  ->  "One.\nThree." """
        if document.target:
            return document.text
        lines = document.text.split("\n")
        tally["line_seen"] += sum(1 for line in lines if line and not line.isspace())
        gone = set(duplicates)
        for number in duplicates:
            tally.drop("line_duplicate_line", lines[number])
        text = "\n".join(line for number, line in enumerate(lines) if number not in gone) if gone else document.text
        return enough_left(text.strip(), document, tally, min_sentences)
