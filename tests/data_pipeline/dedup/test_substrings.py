"""Equal substrings in texts that are longer than what is looked at together."""

import numpy as np

from data_pipeline.dedup.substrings import Anchors, EqualSubstrings
from data_pipeline.text.document import Document, Dropped, Tally
from tests.support.tables import each

WORDS = [f"w{number}" for number in range(25_000)]  # all different, in more characters than a chunk's 131,072


@each("length", [10, 50])
def test_each_run_of_words_of_a_long_text_has_one_key(length):
    found = list(EqualSubstrings(words=length).keys(Document("i", " ".join(WORDS), "u")))
    assert len(" ".join(WORDS)) > 1 << 17
    assert sorted(position for position, _ in found) == list(range(len(WORDS) - length + 1))
    assert len({words for _, words in found}) == len(found)


@each("number", [0, 24, 25, 49, 50])
def test_a_text_of_fewer_words_than_a_run_has_no_keys(number):
    documents = [(0, Document("i", " ".join(WORDS[:number]), "u"))]
    anchors = [row for table in Anchors(words=50).tables(documents) for row in table.tolist()]
    assert len(anchors) == (number == 50)
    repeated = np.arange(50, dtype=np.uint64)
    found = [row for table in EqualSubstrings(words=50).tables(documents, repeated) for row in table.tolist()]
    assert len(found) == (number == 50)


def test_a_repeat_at_any_place_of_a_long_text_is_dropped():
    """The words around the end of the first chunk, each run of 50 of which occurs in a short document."""
    step, document = EqualSubstrings(words=50), Document("i", " ".join(WORDS), "u")
    first, stop = 19_000, 22_000
    passage = Document("j", " ".join(WORDS[first:stop]), "v")
    short = {words[:2] for _, words in step.keys(passage)}
    lost = sorted(position for position, words in step.keys(document) if words[:2] in short)
    left = step.without(document, lost, Tally())
    assert not isinstance(left, Dropped)
    assert left.split() == WORDS[:first] + WORDS[stop:]
