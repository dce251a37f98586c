"""Items of evaluation sets in texts that are longer than what is looked at together."""

from data_pipeline.dedup.decontamination import DecontaminationConfig, Ngrams
from tests.support.tables import each


@each("lengths", [(13,), (12,), (8,), (9, 12), (10, 13), (5, 8)])
def test_an_item_at_any_place_of_a_long_text_is_found(lengths):
    """The items are all runs of so many words around the end of the first chunk of 131,072 characters. A text of fewer
    than 8 words isn't looked for."""
    words = [f"w{number}" for number in range(25_000)]
    assert len(" ".join(words[:20_000])) < 1 << 17 < len(" ".join(words[:20_600]))
    runs = [(first, length) for length in lengths for first in range(20_000, 20_600)]
    texts = [(number, " ".join(words[first : first + length])) for number, (first, length) in enumerate(runs)]
    ngrams = Ngrams.of(texts, DecontaminationConfig())
    found = {(match.word, item) for match in ngrams.matches([(7, " ".join(words))]) for item in match.items}
    assert found == {(first, number) for number, (first, length) in enumerate(runs) if length >= 8}
