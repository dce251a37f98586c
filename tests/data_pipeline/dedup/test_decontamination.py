"""Items of evaluation sets: how they are read, and found in texts, also in those that are longer than what is looked at
together."""

import gzip

import pytest

from data_pipeline.base.errors import UserError
from data_pipeline.dedup.decontamination import DecontaminationConfig, EvaluationSet, Ngrams, read_items
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


def test_short_texts_without_spaces_must_be_there_as_a_whole_and_of_longer_ones_13_words():
    """8 words are 12 letters of Han: a text of 11 isn't looked for, of 12 to 19 only as a whole; 13 words are 20."""
    config, article = DecontaminationConfig(), "人人生而自由在尊严和权利上一律平等他们赋有理性和良心"
    long = Ngrams.of([(7, article)], config)
    for letters, items in ((19, []), (20, [[7]])):
        assert [match.items for match in long.matches([(0, f"Ulm – {article[:letters]} – Ulm")])] == items
    assert not len(Ngrams.of([(0, "在尊严和权利上一律平等。")], config).known)
    ngrams = Ngrams.of([(0, "他们赋有理性和良心并应以兄弟关系")], config)
    assert [match.words for match in ngrams.matches([(0, "x他们赋有理性和良心,并应以兄弟关系的精神")])]
    assert not list(ngrams.matches([(0, "他们赋有理性和良心,并应以兄弟关")]))


# ---- evaluation files


@each(
    "name, content, of, texts",
    [
        ("a.jsonl", '{"a.b": "x"}\n\n{"a": {"b": "y"}}\n', {"fields": ["a.b"]}, [["x"], ["y"]]),
        ("a.jsonl", '{"c": ["x", "y"]}\n{"c": null}', {"fields": ["c"]}, [["x", "y"], []]),
        ("a.jsonl", '{"q": "z", "c": [{"t": "x"}, {"t": "y"}]}', {"fields": ["c.t", "q"]}, [["x", "y", "z"]]),
        ("a.tsv", "id\tq\n1\tx\n2\ty", {"format": "tsv", "fields": ["q"]}, [["x"], ["y"]]),
        ("a.tsv", "1\tx\r\n2\ty\r\n", {"format": "tsv", "fields": [2, 1]}, [["x", "1"], ["y", "2"]]),
        ("a.txt", "\ufeffx\n\ny z\n", {"format": "text"}, [["x"], ["y z"]]),
    ],
)
def test_items_are_read_from_each_format(tmp_path, name, content, of, texts):
    (tmp_path / name).write_text(content)
    found = list(read_items(str(tmp_path / name), EvaluationSet(name="s", path=name, **of)))
    assert [item.texts for item in found] == texts
    lines = [number for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    assert [item.line for item in found] == lines[len(lines) - len(texts) :]


def test_a_file_cut_short_is_refused(tmp_path):
    whole = gzip.compress(b'{"q": "x"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: .* \(format jsonl of evaluation set 's'\)"):
        list(read_items(str(tmp_path / "a.jsonl.gz"), EvaluationSet(name="s", path="a", fields=["q"])))


@each(
    "given, message",
    [
        ({"sets": [{"name": "s", "path": "a"}]}, "format jsonl needs the names of the fields"),
        ({"sets": [{"name": "s", "path": "a", "format": "text", "fields": ["q"]}]}, "format text has none"),
        ({"sets": [{"name": "s", "path": "a", "fields": [1]}]}, "expected names, or for tsv"),
        ({"sets": [{"name": "s", "path": "a", "format": "tsv", "fields": ["q", 1]}]}, "expected names, or for tsv"),
        ({"sets": [{"name": "s", "path": "a", "format": "text"}] * 2}, "each set needs a different name, got s, s"),
        ({"ngram": 5}, "shortest: 8 is more than ngram, 5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        DecontaminationConfig.model_validate(given)
