"""Lines that stand on more than one page stay on one of them (C4's rule, TFDS `c4_utils`)."""

from collections.abc import Iterator

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import Row, enough_left, rank
from data_pipeline.text.tally import Tally


class EqualLines:
    """Equal after strip and lower; the page of the smallest md5 of its URL keeps the line, where it stands first.

    Blank lines are no lines. Of 1.6 × 10¹⁰ different lines, about those of C4's pages in all languages, 7 pairs are
    expected to share a hash of 64 bits.
    """

    group, order = 1, 1

    def keys(self, row: Row) -> Iterator[tuple[int, tuple[int, ...]]]:
        if row["target"]:  # a pair's text is an input, prefix and all
            return
        winner = rank(row)
        for number, line in enumerate(row["text"].split("\n")):
            if normalized := line.strip().lower():
                yield number, (hash64(normalized), winner)

    def without(self, row: Row, lost: list[int], tally: Tally, min_sentences: int) -> str | None:
        """ "One.\nTwo.\nThree." without [1]  ->  "One.\nThree." """
        if row["target"]:
            return row["text"]
        lines = row["text"].split("\n")
        tally["line_seen"] += sum(1 for line in lines if line and not line.isspace())
        gone = set(lost)
        for number in lost:
            tally.drop("line_duplicate_line", lines[number])
        text = "\n".join(line for number, line in enumerate(lines) if number not in gone) if gone else row["text"]
        return enough_left(text.strip(), row, tally, min_sentences)
