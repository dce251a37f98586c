"""What became of documents, traced in real builds, and the pages about them."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from data_pipeline.stages import report
from data_pipeline.stages.report_pages import render
from data_pipeline.tools import trace
from tests.conftest import write_corpus_file
from tests.support.builds import built, documents_of, traced, trained, write_pages
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
