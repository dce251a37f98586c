"""Gopher's rules, personal data and the classifier: in files that aren't models, and in whole builds."""

import hashlib
import json
import math
import struct
from pathlib import Path

import pytest

from data_pipeline import report, write_manifest
from data_pipeline.cleaning.classifier import ClassifierConfig, check, scorer
from data_pipeline.config import CorpusConfig
from data_pipeline.execution.workers import without_ray
from data_pipeline.foundation.config_file import load
from data_pipeline.foundation.errors import UserError
from data_pipeline.pipeline import build
from data_pipeline.tools.provenance import trace
from data_pipeline.tools.provenance.finished_build import open_build
from tests.conftest import write_corpus_file
from tests.data_pipeline.fasttext_file import OUTPUTS, write_model
from tests.data_pipeline.pages import OFF, cleaned, documents_of, page
from tests.in_process import run_here
from tests.tables import each

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
        check(ClassifierConfig(path=str(path), label=label))
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
    for content in (whole + b"\0", struct.pack("<i", 1) + whole[4:], b"text\n" * 100):
        other.write_bytes(content)
        assert "no fastText classifier: " in problem(other)


def prose(number: int, word: str = "river") -> str:
    """A page of its own, with one of the words that the classifier knows."""
    return (
        f"On day {number} the ferry left late, since nobody could find its captain or the boy who sells tickets. "
        f"He was asleep behind house {number}, with a hat over his face and both feet in the {word} as always. "
        "Some of those waiting had begun to sing, others ate what they bring from home: bread, olives, an onion "
        "that must be shared."
    )


PAGES = [
    prose(0),
    "Too short a page for the rules of Gopher. It has three sentences. That is all it has.",
    prose(2, "casino"),
    prose(3) + " Write to ann@example.org or bob@example.org, or call 212-555-0123.",
    prose(4) + " The server is 93.184.216.34, and version 1.2.3.4 runs on it.",
    "\n".join(["The same line is here again and again, to be sure of that."] * 8),
    *(prose(number) for number in range(6, 30)),
]
CLEANING = {"gopher": True, "pii": ["email", "ip", "phone"], "language": {"detector": "none"}, "bad_words": []}


@pytest.fixture(scope="module", params=[False, True], ids=["at once", "after lines"])
def built(request, tmp_path_factory) -> tuple[Path, Path]:
    """A corpus with all three rules, and one with none. With `lines`, the classifier sees what deduplication leaves."""
    folder = tmp_path_factory.mktemp("quality")
    model = {"path": str(write_model(folder / "model.bin")), "label": "good", "threshold": 0.5}
    pages, dedup = [page(text) for text in PAGES], {**OFF, "lines": request.param}
    all_rules, none = {**CLEANING, "classifier": model}, {**CLEANING, "gopher": False, "pii": []}
    made = [
        cleaned(folder / name, [pages], cleaning=rules, dedup=dedup) for name, rules in (("a", all_rules), ("b", none))
    ]
    return made[0], made[1]


def traced(corpus: Path, number: int) -> dict:
    (found,) = trace.trace(open_build(corpus), f"c4/000.json.gz/{number:09d}")
    return trace.as_json(found)


def documents(corpus: Path) -> list[str]:
    return [row["text"] for row in documents_of(corpus)]


def test_each_rule_is_counted_and_named_in_the_report(built):
    found = report.read(built[0])
    dropped = {"gopher_too_few_words": 1, "gopher_duplicate_lines": 1, "classifier": 1}
    assert found.documents == report.DocumentCounts(len(PAGES), len(PAGES) - 3, dropped)
    assert found.masked == {"email": 2, "ip": 1, "phone": 1}
    assert found.sources["c4"].dropped == dropped
    text = (built[0] / "report.md").read_text()
    assert all(rule in text for rule in (*dropped, "## Masked personal data", "| email | 2 |"))
    assert "Masked personal data" in (built[0] / "report.html").read_text()
    assert not any(secret in text for secret in ("ann@", "93.184", "555-0123"))


def test_traces_name_the_rule_that_dropped_a_page_and_count_what_was_masked(built):
    rules = {0: "", 1: "gopher_too_few_words", 2: "classifier", 3: "", 5: "gopher_duplicate_lines"}
    assert {number: traced(built[0], number)["rule"] for number in rules} == rules
    (cleaning, *_) = traced(built[0], 3)["steps"]
    assert [drop["rule"] for drop in cleaning["dropped"]] == ["masked_email", "masked_email", "masked_phone"]
    done = run_here("data-pipeline", "trace", built[0], "c4/000.json.gz/000000003")
    assert "masked_email: 2" in done.stdout
    kept = [text for text in documents(built[0]) if "Write to" in text]
    assert [text[text.index("Write") :] for text in kept] == [
        "Write to |||EMAIL_ADDRESS||| or |||EMAIL_ADDRESS|||, or call |||PHONE_NUMBER|||."
    ]
    assert any("is |||IP_ADDRESS|||, and version 1.2.3.4 runs" in text for text in documents(built[0]))


def test_another_model_at_the_same_path_and_another_threshold_clean_again(built):
    """And the manifest has the model's checksum, not its path."""
    corpus, model = built[0], built[0].parents[1] / "model.bin"
    config, whole = corpus.parent / "corpus.yaml", documents(corpus)
    recorded = write_manifest.lineage(load(config, [], CorpusConfig))
    assert recorded["sources"][0]["cleaning"]["classifier"]["path"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert "model.bin" not in json.dumps(recorded)
    undecided = 0 * OUTPUTS  # 0.5 for every page, which is kept
    lower = ["cleaning.classifier.threshold=0.0001"]
    for outputs, changes, dropped in ((undecided, [], 0), (OUTPUTS, lower, 0), (OUTPUTS, [], 1)):
        write_model(model, outputs=outputs)
        with without_ray():
            build(load(config, changes, CorpusConfig), until="documents")
        assert report.read(corpus).documents.dropped.get("classifier", 0) == dropped
    assert documents(corpus) == whole


def test_both_sides_of_a_pair_are_masked(tmp_path):
    (tmp_path / "in").mkdir()
    pair = "ask {0} ann@example.org\tcall {0} 212-555-0123\n"
    (tmp_path / "in/pairs.tsv").write_text("".join(map(pair.format, range(40))))
    objective = {"name": "text_to_text", "inputs_length": 32, "targets_length": 32}
    rows = {"packing": "examples", "objective": objective, "apply_at": "build"}
    cleaning = {"profile": "none", "pii": ["email", "phone"]}
    source = {"format": "pairs", "path": str(tmp_path / "in"), "cleaning": cleaning}
    config = load(write_corpus_file(tmp_path / "corpus.yaml", sources=[source], rows=rows), [], CorpusConfig)
    with without_ray():
        build(config, until="documents")
    assert report.read(Path(config.output)).masked == {"email": 40, "phone": 40}
