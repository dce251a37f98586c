"""Duplicate spans: three sentences that occur several times stay in one place (Raffel et al. 2020, section 2.2).

The paper describes spans, but its program compares lines. The parameters are datatrove's: windows of 3 sentences, one
sentence apart; shorter documents are never touched. Only case and white space are normalised.
"""

from collections.abc import Iterator

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import Step, enough_left, rank
from data_pipeline.text.document import Document, Tally
from data_pipeline.text.sentences import sentence_starts

SENTENCES = 3


class EqualSpans(Step):
    """The document with the smallest md5 of its URL keeps the first copy of a span.

    The three sentences of a duplicate are dropped, even those it shares with other spans. Still every sentence stays
    somewhere: in the span that is kept, in a document with a smaller md5 or earlier in the same document.
    """

    name = "spans"
    version = 3

    def keys(self, document: Document) -> Iterator[tuple[int, tuple[int, ...]]]:
        if document.target:
            return
        order = rank(document)
        sentences = [" ".join(sentence.lower().split()) for sentence in sentences_of(document.text)]
        for number in range(len(sentences) - SENTENCES + 1):
            yield number, (hash64("\n".join(sentences[number : number + SENTENCES])), order)

    def without(self, document: Document, duplicates: list[int], tally: Tally, min_sentences: int) -> str | None:
        """ "It ran. It hid. It slept.\nIt woke." without span [0]  ->  "It woke." """
        if not duplicates:
            return document.text
        sentences = sentences_of(document.text)
        gone = {number + offset for number in duplicates for offset in range(SENTENCES)}
        for number in duplicates:
            tally.drop("span_duplicate_span", "".join(sentences[number : number + SENTENCES]))
        kept: list[str] = []
        for number, sentence in enumerate(sentences):
            if number not in gone:
                kept.append(sentence)
            elif kept and "\n" in sentence[len(sentence.rstrip()) :]:
                kept[-1] = kept[-1].rstrip() + "\n"  # the removed sentence ended a paragraph; keep that end
        return enough_left("".join(kept).strip(), document, tally, min_sentences)


def sentences_of(text: str) -> list[str]:
    """The sentences of `text`, each with the white space after it: "It ran. It hid."  ->  ["It ran. ", "It hid."]"""
    starts = sentence_starts(text)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
