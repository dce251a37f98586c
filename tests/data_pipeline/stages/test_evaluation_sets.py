"""Items of evaluation sets, planted in real pages and looked for by real builds."""

import gzip
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.base.config_file import load
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.decontamination import EvaluationSet, Item, read_items
from data_pipeline.stages import evaluation_sets, report, table
from data_pipeline.stages.pipeline import build
from data_pipeline.tools.planning import forecast_build
from tests.conftest import write_corpus_file
from tests.support.builds import OFF, built, plain, published, texts_of, traced, write_pages
from tests.support.in_process import refused_here
from tests.support.tables import each

QUESTIONS = 30


def sentence(chance: random.Random, words: int) -> str:
    """Words that no page has."""
    made = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9))) for _ in range(words)]
    return " ".join(made).capitalize() + "?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three evaluation sets and two files of pages, in which all questions with an even number are planted.

    boolq: 30 questions of 13 to 40 words, the passages of some of which others share. pairs: sources of 8 to 12 words.
    short: one item of 7 words, one of 20.
    """
    folder = tmp_path_factory.mktemp("evaluation")
    chance = random.Random(1)
    questions = [sentence(chance, chance.randint(13, 40)) for _ in range(QUESTIONS)]
    passages = [sentence(chance, 60) for _ in range(QUESTIONS // 3)]
    with gzip.open(folder / "boolq.jsonl.gz", "wt") as out:
        for number, question in enumerate(questions):
            item = {"question": question, "passage": {"text": passages[number // 3]}, "answer": bool(number % 2)}
            out.write(json.dumps(item) + "\n")
    sources = [sentence(chance, chance.randint(8, 12)) for _ in range(QUESTIONS)]
    (folder / "pairs.tsv").write_text("".join(f"{number}\t{text}\tnicht\n" for number, text in enumerate(sources)))
    (folder / "short.txt").write_text(f"{sentence(chance, 7)}\n\n{sentence(chance, 20)}\n")

    pages = published(150)
    planted = [*questions[::2], *sources[::2], (folder / "short.txt").read_text().splitlines()[0]]
    for one, text in zip(pages, planted, strict=False):
        words = one["text"].split(" ")
        at = chance.randrange(len(words) + 1)
        disguised = text.upper().replace(" ", chance.choice([" ", " – ", "\n"])).replace("?", "!")
        one["text"] = " ".join([*words[:at], disguised, *words[at:]])
    start = chance.randrange(40)  # a part of a passage: 13 of its 60 words
    pages[len(planted)]["text"] += "\n" + " ".join(passages[1].split()[start : start + 13])
    pages[len(planted) + 1]["text"] += "\n" + " ".join(passages[2].split()[start : start + 12])
    pages[len(planted) + 2]["text"] += "\n" + " ".join(sources[1].split()[:-1])  # all but one word of an item
    write_pages(folder / "0.json.gz", pages[:9:-1])  # more than are looked at together; the planted ones come last
    write_pages(folder / "1.json.gz", pages[9::-1])
    return folder


def corpus_file(folder: Path, name: str, **changes: object) -> Path:
    sets = [
        {"name": "boolq", "path": str(folder / "boolq.jsonl.gz"), "fields": ["question", "passage.text"]},
        {"name": "pairs", "path": str(folder / "*.tsv"), "format": "tsv", "fields": [2]},
        {"name": "short", "path": str(folder / "short.txt"), "format": "text"},
    ]
    given: dict[str, object] = {"output": str(folder / name), "decontamination": {"sets": sets}}
    sources = [{"format": "c4", "path": [str(folder / "0.json.gz"), str(folder / "1.json.gz")], "language": "en"}]
    return write_corpus_file(folder / f"{name}.yaml", sources=sources, **{**given, **changes})


@pytest.fixture(scope="module")
def corpora(folder) -> tuple[Path, Path]:
    """A corpus without the planted items, of all stages, and one with them."""
    dedup = {**OFF, "substrings": True}
    clean = built(corpus_file(folder, "clean", dedup=dedup))
    return clean, built(corpus_file(folder, "plain", dedup=dedup, decontamination={}), until="documents")


def test_every_planted_item_is_found_and_no_other_document_is_dropped(corpora):
    """30 planted items in documents of their own; a part of a passage that three questions share, in another."""
    found = report.read(corpora[0])
    kept, before = texts_of(corpora[0]), texts_of(corpora[1])
    assert len(before) - len(kept) == QUESTIONS + 1 == found.documents.dropped["contaminated"]
    assert {url: before[url] for url in kept} == kept
    sets = found.evaluation_sets
    assert {name: {key: n for key, n in vars(own).items() if key != "bytes"} for name, own in sets.items()} == {
        "boolq": {"items": 30, "too_short": 0, "found": 17, "share": 0.566667, "documents_dropped": 16},
        "pairs": {"items": 30, "too_short": 0, "found": 15, "share": 0.5, "documents_dropped": 15},
        "short": {"items": 2, "too_short": 1, "found": 0, "share": 0.0, "documents_dropped": 0},
    }
    told = (corpora[0] / "report.md").read_text()
    assert "| boolq | 30 | 0 | 17 | 56.67% | 16 |" in told
    assert report.read(corpora[1]).evaluation_sets == {}


def test_the_trace_of_a_document_names_the_item_and_the_words(folder, corpora):
    url_of_the_first_question = published(1)[0]["url"]
    found = traced(corpora[0], url_of_the_first_question)
    assert (found.step, found.rule) == ("decontamination", "contaminated")
    with gzip.open(folder / "boolq.jsonl.gz", "rt") as lines:
        question = json.loads(next(lines))["question"]
    where, words = found.found.split(": ")
    assert where == "boolq, boolq.jsonl.gz line 1"
    assert words.replace(" – ", " ").lower() == " ".join(question.lower().split()[:13]).rstrip("?")


def test_a_plan_has_the_stages_of_the_build(folder, corpora):
    found, config = report.read(corpora[0]), load(folder / "clean.yaml", [], CorpusConfig)
    planned = forecast_build(config, found, "of it", workers=2)
    done = [stage.name for stage in found.stages]
    assert [stage.name for stage in planned.stages] == done
    assert done == [stage.name for stage in table.stages_of(config) if stage.name in done]  # in the order of the table


def test_evaluation_sets_of_an_earlier_build_are_not_read_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "items.txt").write_text("An item of the set has thirteen words at least, or else it is too short.\n")
    read: list[str] = []

    def listened(path: str, one_set: EvaluationSet) -> Iterator[Item]:
        read.append(path)
        return read_items(path, one_set)

    monkeypatch.setattr(evaluation_sets, "read_items", listened)
    sets = [{"name": "items", "path": str(tmp_path / "items.txt"), "format": "text"}]
    config = plain(tmp_path, tmp_path / "a.txt", "text", dedup=OFF, decontamination={"sets": sets})
    times = []
    for _ in range(2):
        build(config, until="documents")
        times.append(len(read))
    assert times == [2, 2]  # the check and the unit


def test_another_set_redoes_what_depends_on_it_and_no_set_leaves_no_file(folder, capsys):
    config = corpus_file(folder, "changing", dedup={**OFF, "documents": True})
    corpus = built(config, until="documents")
    kept = texts_of(corpus)

    def said(*overrides: str) -> list[str]:
        capsys.readouterr()
        built(config, *overrides, until="documents")
        return [line for line in capsys.readouterr().out.splitlines() if " to do " in line]

    assert said() == []
    assert [line.split(":")[0] for line in said("decontamination.ngram=14")] == ["evaluation-sets", "deduplicated"]
    index = corpus / ".stages/evaluation-sets/ngrams.safetensors"
    written = index.read_bytes()
    index.unlink()
    assert [line.split(":")[0] for line in said("decontamination.ngram=14")] == ["evaluation-sets"]
    assert index.read_bytes() == written
    said("decontamination.sets=[]", "dedup.documents=false")
    assert not index.parent.exists()
    assert len(texts_of(corpus)) == len(kept) + QUESTIONS + 1
    said()
    assert texts_of(corpus) == kept


@each(
    "name, content, of, message",
    [
        ("a.jsonl", '{"q": "x"}\n{"p": "y", "z": 1}\n', {}, 'a.jsonl: line 2: no field "q"; it has p, z'),
        ("a.jsonl", '{"q": 3}\n', {}, 'a.jsonl: line 1: field "q": expected text, found a JSON int'),
        ("a.jsonl", '{"q": "x"}\nnothing\n', {}, "a.jsonl: line 2: expected a JSON object"),
        ("a.jsonl", "PAR1\x15\x04", {}, "a.jsonl: byte 0: declared as jsonl, but looks like a Parquet file"),
        ("a.jsonl", "\n \n", {}, "a.jsonl: no items; expected format jsonl"),
        ("b.jsonl", '{"q": "x"}', {}, "a.jsonl: no such file (path of evaluation set 's')"),
        ("a.jsonl", "a\tb\nc\td\n", {"format": "tsv"}, 'a.jsonl: line 1: no column "q"; it has a, b'),
        ("a.jsonl", "a\tb\nc\n", {"format": "tsv", "fields": [2]}, "a.jsonl: line 2: no column 2; it has 1"),
        ("a.jsonl", '{"q": 1}\n' * 2, {"format": "text", "fields": []}, "but looks like JSON Lines with the keys q"),
        ("a.jsonl", "x\0y", {"format": "text", "fields": []}, "a.jsonl: line 1: holds NUL bytes"),
    ],
)
def test_a_bad_file_is_one_line_before_anything_is_built(folder, tmp_path, name, content, of, message):
    (tmp_path / name).write_text(content)
    one = {"name": "s", "path": str(tmp_path / "a.jsonl"), "fields": ["q"], **of}
    config = corpus_file(folder, "bad", output=str(tmp_path / "bad"), decontamination={"sets": [one]})
    assert message in refused_here(2, "data-pipeline", "build", config)
    assert not (tmp_path / "bad").exists()
