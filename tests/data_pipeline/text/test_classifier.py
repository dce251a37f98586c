"""The classifier, by itself and in whole builds with Gopher's rules."""

import hashlib
import json
import math
import pickle
import struct
from pathlib import Path

import fasttext
import numpy as np
import pytest

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig
from data_pipeline.engine.context import Context
from data_pipeline.stages import dedup, report, write_manifest
from data_pipeline.stages import documents as documents_stage
from data_pipeline.stages.inputs import inputs_of
from data_pipeline.stages.parts import Part
from data_pipeline.text.cleaning.classifier import ClassifierConfig, label_of, scorer
from data_pipeline.text.document import Document, Tally
from tests.support.builds import OFF, OUTPUTS, built, cleaned, documents_of, page, plain, traced, write_model
from tests.support.tables import each


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


def test_a_worker_loads_each_of_two_classifiers_once_a_stage_and_asks_for_the_memory_of_both(tmp_path, monkeypatch):
    """Though one of them isn't for all sources."""
    models = [str(write_model(tmp_path / name)) for name in ("one.bin", "other.bin")]
    steps = [{"step": "classifier", "path": model, "label": "good"} for model in models]
    steps[1]["sources"] = ["b"]
    sources = [{"format": "text", "name": name, "path": str(tmp_path / name)} for name in ("a", "b")]
    for name in ("a/0.txt", "a/1.txt", "b/0.txt", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The river.")
    config = plain(tmp_path, "", "text", sources=sources, steps=steps, cleaning=None, bytes_per_shared_unit=0)
    store, loaded, load = LocalStore(tmp_path / "corpus"), list[str](), fasttext.load_model
    monkeypatch.setattr(fasttext, "load_model", lambda path: loaded.append(path) or load(path))

    units = documents_stage.plan(config, store, inputs_of(config).files)
    work = dedup.Work(config, [Part("p", "a", "", 1, {}, 1, checksums=["same"])], config.all_steps, [])
    both = 2 * sum(Path(model).stat().st_size for model in models)
    assert [unit.memory for unit in (*units, *dedup.plan(work, []))] == [both] * 5
    for unit in units:
        spec = pickle.loads(pickle.dumps(unit.spec))  # as a worker gets it
        documents_stage.write_documents(Context(store, shared="documents"), spec)
    assert loaded == models
    row = 0, Document("b/0.txt/0", "The river."), Document("b/0.txt/0", "The river.")
    for rule in [*config.all_steps["b"], *config.all_steps["b"]]:
        rule = pickle.loads(pickle.dumps(rule))
        assert [*rule.left(Context(store, shared="deduplicated"), [row], Tally())] == [row]
    assert loaded == [*models, *models]
