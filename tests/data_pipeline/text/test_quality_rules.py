"""Gopher's rules beside their definition, the classifier, and both in whole builds."""

import hashlib
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.stages import report, write_manifest
from data_pipeline.stages.pipeline import build
from data_pipeline.text.cleaning.classifier import ClassifierConfig, label_of, scorer
from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.cleaning.gopher import Gopher, GopherConfig
from data_pipeline.text.document import Document, Tally
from data_pipeline.text.step import cleaned as cleaned_by
from tests.support.builds import OFF, OUTPUTS, built, cleaned, documents_of, page, plain, traced, write_model
from tests.support.tables import each

TOKENS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=40)
NO_RULES = {
    **{"min_words": 0, "max_words": None, "min_mean_word_length": 0, "max_mean_word_length": None},
    **{"max_symbols_per_word": None, "max_bullet_lines": 1, "max_ellipsis_lines": 1, "min_alphabetic_words": 0},
    **{"min_stop_words": 0, "max_duplicate_lines": 1, "max_duplicate_paragraphs": 1},
    **{"max_duplicate_line_characters": 1, "max_duplicate_paragraph_characters": 1},
    **{"max_top_ngrams": {}, "max_duplicate_ngrams": {}},
}


def broken(text: str, rules: GopherConfig) -> str:
    """The rule that drops the page, or ""."""
    tally = Tally()
    left = cleaned_by(Document(text=text), [Gopher(**dict(rules))], tally)
    assert (left is None) is bool(tally.dropped_documents)
    assert list(tally.dropped_documents.values()) in ([], [1])
    return next(iter(tally.dropped_documents), "").removeprefix("gopher_")


def by(text: str, **rules: object) -> str:
    return broken(text, GopherConfig.model_validate({**NO_RULES, **rules}))


def words(count: int) -> str:
    return " ".join(f"word{number}x" for number in range(count))


def test_the_defaults_are_the_published_thresholds():
    """Rae et al. 2021, appendix A.1.1 and table A1."""
    assert GopherConfig().model_dump() == {
        **{"min_words": 50, "max_words": 100_000, "min_mean_word_length": 3.0, "max_mean_word_length": 10.0},
        **{"max_symbols_per_word": 0.1, "max_bullet_lines": 0.9, "max_ellipsis_lines": 0.3},
        **{"min_alphabetic_words": 0.8, "min_stop_words": 2},
        **{"max_duplicate_lines": 0.30, "max_duplicate_paragraphs": 0.30},
        **{"max_duplicate_line_characters": 0.20, "max_duplicate_paragraph_characters": 0.20},
        "max_top_ngrams": {2: 0.20, 3: 0.18, 4: 0.16},
        "max_duplicate_ngrams": {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10},
    }
    assert CleaningConfig.model_validate({"gopher": True}).gopher == GopherConfig()
    assert CleaningConfig().gopher is None
    assert CleaningConfig.model_validate({"gopher": False}).gopher is None


@each(
    "kept, dropped, rule, setting",
    [
        (words(50), words(49), "too_few_words", {"min_words": 50}),
        (words(60), words(61), "too_many_words", {"max_words": 60}),
        ("abc abc", "abc ab", "short_words", {"min_mean_word_length": 3}),
        ("a" * 10 + " " + "b" * 10, "a" * 10 + " " + "b" * 11, "long_words", {"max_mean_word_length": 10}),
        ("# a b c d e f g h i", "# # a b c d e f g h", "hash_signs", {"max_symbols_per_word": 0.1}),
        ("a... b c d e f g h i j", "a... b… c d e f g h i j", "ellipses", {"max_symbols_per_word": 0.1}),
        ("- a\n" * 9 + "b", "• a\n" * 9 + "\n* b", "bullet_lines", {"max_bullet_lines": 0.9}),
        ("a...\n" * 3 + "b\n" * 7, "a…\n" * 4 + "b\n" * 6, "ellipsis_lines", {"max_ellipsis_lines": 0.3}),
        ("é b c d2 55", "é b c -- 55", "alphabetic_words", {"min_alphabetic_words": 0.8}),
        ("The end OF it", "the end the", "stop_words", {"min_stop_words": 2}),
    ],
)
def test_a_page_is_kept_at_the_threshold_and_dropped_beyond(kept, dropped, rule, setting):
    assert (by(kept, **setting), by(dropped, **setting)) == ("", rule)


def test_repeated_lines_and_paragraphs_count_from_their_second_copy():
    lines = "a\nb\nc\nd\ne\nf\ng\nh\na\nb"  # 2 of 10 lines, 2 of 10 characters
    assert by(lines, max_duplicate_lines=0.2, max_duplicate_line_characters=0.2) == ""
    assert by(lines, max_duplicate_lines=0.19) == "duplicate_lines"
    assert by(lines, max_duplicate_line_characters=0.19) == "duplicate_line_characters"
    paragraphs = "aa\nbb\n\ncc\n \naa\nbb"  # 1 of 3 paragraphs, 5 of 12 characters
    assert by(paragraphs, max_duplicate_paragraphs=0.34, max_duplicate_paragraph_characters=0.42) == ""
    assert by(paragraphs, max_duplicate_paragraphs=0.33) == "duplicate_paragraphs"
    assert by(paragraphs, max_duplicate_paragraph_characters=0.41) == "duplicate_paragraph_characters"


def fraction_of_top(tokens: list[str], n: int) -> float:
    """By definition: occurrences times characters of the most frequent n-gram, 0 if none occurs twice."""
    ngrams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    most = max((ngrams.count(ngram) for ngram in ngrams), default=0)
    if most < 2:
        return 0.0
    return max(most * len("".join(ngram)) for ngram in ngrams if ngrams.count(ngram) == most) / len("".join(tokens))


def fraction_of_repeated(tokens: list[str], n: int) -> float:
    """By definition: characters of the words in any n-gram that occurred before."""
    ngrams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    repeated = {at + step for at, ngram in enumerate(ngrams) if ngram in ngrams[:at] for step in range(n)}
    return len("".join(tokens[place] for place in repeated)) / len("".join(tokens))


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 20), min_size=2, max_size=6), st.integers(1, 12))
def test_fractions_of_ngrams_are_those_of_the_definition(tokens, twentieths, first):
    """The rule that drops a page is the first whose fraction is above its limit: shortcuts change nothing."""
    limits = {first + place: twentieth / 20 for place, twentieth in enumerate(twentieths)}
    size = len("".join(tokens))
    top = [n for n, most in limits.items() if fraction_of_top(tokens, n) * size > most * size]
    repeated = [n for n, most in limits.items() if fraction_of_repeated(tokens, n) * size > most * size]
    text = " ".join(tokens)
    for of in (fraction_of_top, fraction_of_repeated):
        assume(all(abs(of(tokens, n) - most) > 1e-9 for n, most in limits.items()))
    assert by(text, max_top_ngrams=limits) == (f"top_{top[0]}_gram" if top else "")
    assert by(text, max_duplicate_ngrams=limits) == (f"duplicate_{repeated[0]}_grams" if repeated else "")


def prose(number: int, word: str = "river") -> str:
    """A page of its own, with one of the words that the classifier knows."""
    return (
        f"On day {number} the ferry left late, since nobody could find its captain or the boy who sells tickets. "
        f"He was asleep behind house {number}, with a hat over his face and both feet in the {word} as always. "
        "Some of those waiting had begun to sing, others ate what they bring from home: bread, olives, an onion "
        "that must be shared."
    )


LOGITS = {"river river casino": 2, "river\nriver casino unknown\x00": 2, "casino": -4, "": 0, "nothing known": 0}


@each("text, logit", LOGITS.items())
def test_scores_are_those_of_the_formula(tmp_path, text, logit):
    path = str(write_model(tmp_path / "model.bin"))
    expected = 1 / (1 + math.exp(-logit))
    for label, probability in (("good", expected), ("__label__bad", 1 - expected)):
        score = scorer(ClassifierConfig(path=path, label=label))
        assert score(text) == pytest.approx(probability, abs=2e-4)


def problem(path: Path, label: str = "good") -> str:
    with pytest.raises(UserError) as refused:
        label_of(ClassifierConfig(path=str(path), label=label))
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


def test_a_file_that_is_no_whole_classifier_is_refused_in_a_line(tmp_path):
    whole = write_model(tmp_path / "model.bin").read_bytes()
    said = f"cleaning.classifier.path: {tmp_path / 'no.bin'}: can't be read: No such file or directory"
    assert problem(tmp_path / "no.bin") == said
    assert "can't be read: Is a directory" in problem(tmp_path)
    assert "has no label 'fine'; it has good, bad" in problem(tmp_path / "model.bin", "fine")
    assert "word vectors" in problem(write_model(tmp_path / "vectors.bin", kind=1))
    other = tmp_path / "other.bin"
    for length in range(len(whole)):
        other.write_bytes(whole[:length])
        assert "no fastText classifier: " in problem(other)
    with_buckets = write_model(tmp_path / "buckets.bin", buckets=3)
    assert label_of(ClassifierConfig(path=str(with_buckets), label="good")) == label_of(
        ClassifierConfig(path=str(tmp_path / "model.bin"), label="good")
    )
    a_bucket_more = whole[:40] + struct.pack("<i", 1) + whole[44:]  # than its matrix has rows for
    a_label_less = write_model(tmp_path / "rows.bin", outputs=np.zeros((3, 2), "<f4")).read_bytes()
    for content in (whole + b"\0", struct.pack("<i", 1) + whole[4:], b"text\n" * 100, a_bucket_more, a_label_less):
        other.write_bytes(content)
        assert "no fastText classifier: " in problem(other)


PAGES = [
    prose(0),
    "Too short a page for the rules of Gopher. It has three sentences. That is all it has.",
    prose(2, "casino"),
    prose(3),
    prose(4),
    "\n".join(["The same line is here again and again, to be sure of that."] * 8),
    *(prose(number) for number in range(6, 30)),
]
CLEANING = {"gopher": True, "language": {"detector": "none"}, "bad_words": []}


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "after lines"])
def corpora(request, tmp_path_factory) -> tuple[Path, Path]:
    """A corpus with both rules, and one with none. With `lines`, the classifier sees what deduplication leaves."""
    folder = tmp_path_factory.mktemp("quality")
    model = {"path": str(write_model(folder / "model.bin")), "label": "good", "threshold": 0.5}
    pages, dedup = [page(text) for text in PAGES], {**OFF, "lines": request.param}
    all_rules, none = {**CLEANING, "classifier": model}, {**CLEANING, "gopher": False}
    first = cleaned(folder / "a", [pages], cleaning=all_rules, dedup=dedup)
    return first, cleaned(folder / "b", [pages], cleaning=none, dedup=dedup)


def documents(corpus: Path) -> list[str]:
    return [row["text"] for row in documents_of(corpus)]


def test_each_rule_is_counted_and_named_in_the_report(corpora):
    found = report.read(corpora[0])
    dropped = {"gopher_too_few_words": 1, "gopher_duplicate_lines": 1, "classifier": 1}
    assert found.documents == report.DocumentCounts(len(PAGES), len(PAGES) - 3, dropped)
    assert found.sources["c4"].dropped == dropped
    text = (corpora[0] / "report.md").read_text()
    assert all(rule in text for rule in dropped)


def test_traces_name_the_rule_that_dropped_a_page(corpora):
    rules = {0: "", 1: "gopher_too_few_words", 2: "classifier", 3: "", 5: "gopher_duplicate_lines"}
    found = {number: traced(corpora[0], f"c4/000.json.gz/{number:09d}") for number in rules}
    assert {number: one.rule for number, one in found.items()} == rules


def test_another_model_at_the_same_path_and_another_threshold_clean_again(corpora):
    """And the manifest has the model's checksum, not its path."""
    corpus, model = corpora[0], corpora[0].parents[1] / "model.bin"
    config, whole = corpus.parent / "corpus.yaml", documents(corpus)
    recorded = write_manifest.recorded(load(config, [], CorpusConfig))
    assert recorded["sources"][0]["cleaning"]["classifier"]["path"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert "model.bin" not in json.dumps(recorded)
    undecided = 0 * OUTPUTS  # 0.5 for every page, which is kept
    lower = ["cleaning.classifier.threshold=0.0001"]
    for outputs, changes, dropped in ((undecided, [], 0), (OUTPUTS, lower, 0), (OUTPUTS, [], 1)):
        write_model(model, outputs=outputs)
        built(config, *changes, until="documents")
        assert report.read(corpus).documents.dropped.get("classifier", 0) == dropped
    assert documents(corpus) == whole


def test_bad_words_are_looked_for_in_pages_of_every_tag_and_pages_without_a_list_are_counted_once(tmp_path, capsys):
    """A page of the list's language goes, whichever code its source gives it, and so does one of unknown language.
    The languages of pages that stay have one code each."""
    bad, good = "Nobody says shit here.", "Nobody says much here."
    tags = ["en", "eng", "EN_us", "", "und", "deu", "de", "sw"]
    pages = [{"text": text, "language": tag} for tag in tags for text in (bad, good)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pages))
    settings = {"cleaning": {"profile": "none", "bad_words": ["eng"]}, "dedup": OFF}
    corpus = Path(build(plain(tmp_path, tmp_path / "a.jsonl", "jsonl", **settings), until="documents"))
    found = report.read(corpus)
    assert found.documents == report.DocumentCounts(16, 11, {"bad_words": 5})
    assert found.languages == {"de": 4, "en": 2, "sw": 2, "unknown": 2, "en-us": 1}
    said = [line for line in capsys.readouterr().err.splitlines() if "bad_words" in line]
    shown = "6 (de 4, sw 2); they weren't searched for bad words"
    assert said == [f"documents in languages whose list cleaning.bad_words doesn't name: {shown}"]
