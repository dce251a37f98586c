"""The keys of equal documents and of equal spans of three sentences."""

from data_pipeline.dedup.equal import EqualDocuments, EqualSpans
from data_pipeline.text.document import Document
from tests.support.tables import each


def test_documents_are_compared_by_all_bits_of_their_digest():
    document = Document("i", "It ran.", "u")
    ((item, (first, second)),) = EqualDocuments().keys(document)
    assert (item, first << 64 | second) == (0, int.from_bytes(document.digest, "big"))
    assert len(document.digest) == 16


@each("sentences, spans", [(1, 0), (2, 0), (3, 1), (4, 2), (9, 7)])
def test_a_span_begins_at_each_sentence_that_two_follow(sentences, spans):
    text = " ".join(f"The river number {number} ran." for number in range(sentences))
    found = list(EqualSpans().keys(Document("i", text, "u")))
    assert [number for number, _ in found] == list(range(spans))
    assert len({words for _, words in found}) == spans
