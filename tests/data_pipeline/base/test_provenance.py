"""What became of documents, traced in real builds; items of evaluation sets, planted in real pages and looked for."""

import gzip
import json
import random
import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from pydantic_core import to_json

from data_pipeline.base.config_file import load
from data_pipeline.base.errors import UserError
from data_pipeline.base.json_file import parse_json
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.decontamination import DecontaminationConfig, EvaluationSet, Item, Ngrams, read_items
from data_pipeline.stages import evaluation_sets, report, table
from data_pipeline.stages.pipeline import build
from data_pipeline.stages.report_pages import render
from data_pipeline.text.document import Counts, Document, Dropped, Tally
from data_pipeline.tools import trace
from data_pipeline.tools.planning import forecast_build
from tests.conftest import write_corpus_file
from tests.support.builds import OFF, built, documents_of, plain, published, texts_of, traced, trained, write_pages
from tests.support.in_process import done_here, refused_here
from tests.support.tables import each

PROSE = "The river {0} rises in the hills. It runs past {0} town. Then it reaches the sea near {0}."
SHARED = "Every page of this site ends with the same long line."
PAGES = [
    {"text": f"{PROSE.format('Elbe')}\n{SHARED}", "url": "http://a.org/0"},
    {"text": f"{PROSE.format('Loire')}\nHome | About | Contact | Imprint\n{SHARED}", "url": "http://a.org/1"},
    {"text": "Only one sentence is here.", "url": "http://a.org/2"},
    {
        "text": "Dies ist eine deutsche Seite. Sie hat genug Sätze. Aber sie ist nicht englisch.",
        "url": "http://a.org/3",
    },
    {"text": PROSE.format("Seine"), "url": "https://www.a.org/4/", "timestamp": "2020"},
    {"text": PROSE.format("Old"), "url": "http://a.org/4", "timestamp": "2010"},
    {"text": "", "url": "http://a.org/6"},
    {"text": PROSE.format("Tagus"), "url": "http://a.org/7"},
]
MORE = [{"text": PROSE.format(f"Nile{n}"), "url": f"http://b.org/{n}"} for n in range(40)]


@pytest.fixture(scope="module")
def pair(small_corpus, tmp_path_factory) -> tuple[Path, Path]:
    """Two corpora of the same pages: by the default rules and Gopher's, and without those for lines and languages."""
    folder = tmp_path_factory.mktemp("provenance")
    for name, pages in (("pages", PAGES), ("more", MORE)):
        write_pages(folder / f"in/{name}.json.gz", [{"timestamp": "2019", **page} for page in pages])
    sources = [{"format": "c4", "path": str(folder / "in"), "language": "en"}]
    made = []
    for name, changes in (
        ("a", {"cleaning": {"gopher": {"min_words": 5, "min_stop_words": 0}}, "dedup": {}}),
        ("b", {"cleaning": {"web_rules": False, "language": {"detector": "none"}}, "dedup": {"lines": False}}),
    ):
        output = {"output": str(folder / name), "sources": sources, "tokenizer": trained(small_corpus)}
        made.append(built(write_corpus_file(folder / f"{name}.yaml", **output, **changes)))
    return made[0], made[1]


def page_id(number: int) -> str:
    return f"c4/pages.json.gz/{number:09d}"


def test_traces_name_the_step_and_the_rule_of_each_document_and_add_up_to_the_report_and_the_documents(pair):
    kept = {row["id"]: row for row in documents_of(pair[0])}
    rules = ["", "", "too_few_sentences", "language_other", "", "duplicate_url", "empty", ""]
    steps = ["", "", "page", "language", "", "urls", "reading", ""]
    for number, (step, rule) in enumerate(zip(steps, rules, strict=True)):
        found = traced(pair[0], page_id(number))
        assert (found.step, found.rule, found.id in kept) == (step, rule, not rule)
        assert found.text == (PAGES[number]["text"] if rule else kept[found.id]["text"])[:200]
        assert found.kept == (page_id(4) if rule == "duplicate_url" else "")
        if not rule:
            assert (found.language, found.split) == (kept[found.id]["language"], kept[found.id]["split"])
    dropped = report.read(pair[0]).documents.dropped
    assert Counter(filter(None, rules)) == {rule: n for rule, n in dropped.items() if n}
    assert report.read(pair[0]).lines.dropped == {"no_endmark": 1, "duplicate_line": 1}


def test_a_url_finds_each_page_that_has_it_also_one_that_cleaning_dropped(pair):
    found = trace.trace(str(pair[0]), "http://www.a.org/4?utm_source=x")
    assert [one.id for one in found] == [page_id(5), page_id(4)]
    assert traced(pair[1], "http://a.org/2").rule == "too_few_sentences"


def test_a_trace_is_printed_as_lines_or_json(pair):
    printed = done_here("data-pipeline", "trace", pair[0], page_id(5)).splitlines()
    assert printed[:4] == [
        page_id(5),
        "  url       http://a.org/4",
        "            dropped by urls: duplicate_url",
        f"  stays     {page_id(4)}",
    ]
    (found,) = json.loads(done_here("data-pipeline", "trace", pair[0], page_id(5), "--json"))
    assert (found["rule"], found["kept"]) == ("duplicate_url", page_id(4))


@each("name", ["c4/other.json.gz/000000001", "http://nowhere.org/", "pages"])
def test_an_unknown_document_is_one_line(pair, name):
    said = refused_here(2, "data-pipeline", "trace", pair[0], name)
    assert said == f"error: {name}: {pair[0]} has no such document, neither kept nor dropped"


def test_the_page_says_how_to_compare_two_corpora(pair, tmp_path, monkeypatch):
    """The web rules dropped a line of a document, the language a document."""
    page = (Path(__file__).parents[3] / "docs/how-to/trace-a-document.md").read_text()
    table, code, domains = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "corpora").mkdir()
    for name, corpus in zip(("c4", "another"), pair[::-1], strict=True):
        (tmp_path / "corpora" / name).symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    exec(table, dropped := {})
    assert dropped["counts"].sum() == len(dropped["dropped"]) == sum(report.read(pair[1]).documents.dropped.values())
    assert dropped["copies"].to_dict() == {page_id(4): 1}
    exec(code + domains, found := {})
    assert sum(found["counts"].field("counts").to_pylist()) == len(found["urls"])
    assert found["only_in_a"]["id"].to_pylist() == [page_id(3)]
    differing = {identity for identity in map(page_id, (0, 1)) if texts(pair[0])[identity] != texts(pair[1])[identity]}
    assert page_id(1) in differing
    assert set(found["other_text"]["id"].to_pylist()) == differing


def texts(corpus: Path) -> dict[str, str]:
    return {row["id"]: row["text"] for row in documents_of(corpus)}


def test_examples_are_chosen_by_hash_whatever_the_order():
    texts = [f"line {n}" for n in range(50)]
    one, other, halves, added = Tally(), Tally(), (Tally(), Tally()), Tally()
    for number, text in enumerate([*texts, *texts]):
        one.document("rule", text)
        other.document("rule", texts[-1 - number % 50])
        halves[number % 2].document("rule", text)
    for half in halves:
        added.add(half)
    assert len(one.examples["rule"]) == 3
    assert one.examples == other.examples
    assert added == one
    assert one.examples["rule"] != texts[:3]


def test_what_is_counted_keeps_its_kind_whatever_the_rule_is_called_also_in_a_file():
    """Documents, lines, spans and personal data have counts of their own, and a listener hears of each document."""
    heard = []
    tally = Tally(lambda *drop: heard.append(drop))
    tally.read += 5
    tally.lines_passed += 2
    tally.document("line_policy", "x" * 300)
    tally.line("policy", "a line")
    tally.span("read", "a span")
    tally.masked("email")
    tally.drop("a step", document := Document("id"), why := Dropped("masked_email"))
    tally.document("masked_email", number=2)
    left_out = ("reading", Document(), Dropped("masked_email"))
    assert heard == [
        ("reading", Document(text="x" * 300), Dropped("line_policy")),
        ("a step", document, why),
        left_out,
        left_out,
    ]
    read = parse_json(to_json(tally.recorded()), Counts, "a file")
    assert (read.read, read.lines_passed, read.undecodable) == (5, 2, 0)
    assert read.dropped_documents == {"line_policy": 1, "masked_email": 3}
    assert (read.dropped_lines, read.dropped_spans, read.masked_data) == ({"policy": 1}, {"read": 1}, {"email": 1})
    total = Tally()
    total.add(read)
    total.add(read)
    assert (total.read, total.dropped_documents["masked_email"], total.dropped_lines["policy"]) == (10, 6, 2)
    assert total.examples == read.examples


def test_the_page_is_whole_and_shows_examples_as_they_are(pair):
    found = report.read(pair[0])
    assert (pair[0] / "report.md").read_text() == render(found)
    found.examples["empty"] = ["<script>alert(1)</script> ![x](https://example.org)"]
    page = MarkdownIt().enable("table").render(render(found))
    assert not re.search(r"<script|<img", page)
    for rule in (*found.documents.dropped, *found.lines.dropped):
        assert f"<td>{rule}</td>" in page
    assert sum(found.token_lengths.values()) == found.documents.kept
    assert "<td>&lt;script&gt;alert(1)&lt;/script&gt; ![x](https://example.org)</td>" in page


# ---- items of evaluation sets


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
