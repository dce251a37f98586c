"""Exact duplicates: lines on several pages (C4's rule, TFDS `c4_utils`), spans of sentences, whole documents."""

from collections.abc import Iterator
from typing import Literal

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import KeyStep, ShorteningStep, rank
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.sentences import sentence_starts

SENTENCES = 3  # of a span


class EqualLines(ShorteningStep):
    """Lines are equal after strip and lower. The page with the smallest md5 of its URL keeps its first copy.

    Blank lines don't count. C4's pages in all languages have about 1.6 × 10¹⁰ different lines, of which 7 pairs are
    expected to share a 64-bit hash.
    """

    step: Literal["lines"] = "lines"

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        if document.target:  # inputs of text-to-text pairs share their prefix
            return
        order = rank(document)
        for number, line in enumerate(document.text.split("\n")):
            if normalized := line.strip().lower():
                yield number, (hash64(normalized), order)

    def without(self, document: Document, duplicates: list[int], tally: Tally) -> str | Dropped:
        """ "One.\nTwo.\nThree." without [1]  ->  "One.\nThree." """
        if document.target:
            return document.text
        lines = document.text.split("\n")
        tally.lines_seen += sum(1 for line in lines if line and not line.isspace())
        gone = set(duplicates)
        for number in duplicates:
            tally.line("duplicate_line", lines[number])
        text = "\n".join(line for number, line in enumerate(lines) if number not in gone) if gone else document.text
        return self.enough(text.strip(), document)


class EqualSpans(ShorteningStep):
    """The document with the smallest md5 of its URL keeps the first copy of a span.

    All three sentences of a duplicate are dropped, also those that other spans share. Every sentence still stays
    somewhere: in the kept span, which is in a document with a smaller md5 or earlier in the same document.
    """

    step: Literal["spans"] = "spans"

    version = 3

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        if document.target:
            return
        order = rank(document)
        sentences = [" ".join(sentence.lower().split()) for sentence in sentences_of(document.text)]
        for number in range(len(sentences) - SENTENCES + 1):
            yield number, (hash64("\n".join(sentences[number : number + SENTENCES])), order)

    def without(self, document: Document, duplicates: list[int], tally: Tally) -> str | Dropped:
        """ "It ran. It hid. It slept.\nIt woke." without span [0]  ->  "It woke." """
        if not duplicates:
            return document.text
        sentences = sentences_of(document.text)
        gone = {number + offset for number in duplicates for offset in range(SENTENCES)}
        for number in duplicates:
            tally.span("duplicate_span", "".join(sentences[number : number + SENTENCES]))
        kept: list[str] = []
        for number, sentence in enumerate(sentences):
            if number not in gone:
                kept.append(sentence)
            elif kept and "\n" in sentence[len(sentence.rstrip()) :]:
                kept[-1] = kept[-1].rstrip() + "\n"  # the removed sentence ended a paragraph
        return self.enough("".join(kept).strip(), document)


def sentences_of(text: str) -> list[str]:
    """The sentences of `text`, each with the white space after it: "It ran. It hid."  ->  ["It ran. ", "It hid."]"""
    starts = sentence_starts(text)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


class EqualDocuments(KeyStep):
    """Compares documents by a 128-bit hash of their text and target."""

    step: Literal["documents"] = "documents"

    counted_as = "duplicate_document"
    group = 2
    order = 0

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        digest = document.digest
        yield 0, (int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big"))
