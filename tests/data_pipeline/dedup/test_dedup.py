"""Deduplication of a whole corpus by the real stages, compared with hand-worked cases and references in memory; and
MinHash, which finds near-duplicates as often as the formula 1 − (1 − s^rows)^bands says, for a Jaccard similarity s."""

import hashlib
import itertools
import math
import os
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta, timezone
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.documents import SCHEMA
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.equal import EqualDocuments, EqualLines, EqualSpans, sentences_of
from data_pipeline.dedup.keys import KeyBucket, Keys, write_duplicates
from data_pipeline.dedup.minhash import Clusters, MinHashConfig, NearDuplicates
from data_pipeline.dedup.newest_url import NewestUrl
from data_pipeline.dedup.places import Span
from data_pipeline.dedup.reading import Decision, Earlier, Reading
from data_pipeline.dedup.registry import STEPS, key_steps
from data_pipeline.dedup.step import KeyStep
from data_pipeline.dedup.substrings import EqualSubstrings, SubstringsConfig
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import write_names
from data_pipeline.stages import report
from data_pipeline.stages.dedup import Comparing
from data_pipeline.stages.stage import Build
from data_pipeline.stages.table import forget
from data_pipeline.text.cleaning.bad_words import BadWords
from data_pipeline.text.document import Document, Dropped, Tally, normalize_url
from data_pipeline.text.sentences import count_sentences
from data_pipeline.text.step import Rule
from tests.conftest import run as run_command
from tests.conftest import write_corpus_file
from tests.support.builds import (
    OFF,
    built,
    checksums,
    cleaned,
    documents_of,
    dropped_of,
    page,
    plain,
    published,
    texts_of,
    trained,
    write_pages,
)
from tests.support.slow import slow
from tests.support.tables import each

Page = dict[str, str]
RIVERS = ("Elbe", "Rhine", "Loire", "Seine", "Tagus", "Ebro", "Po", "Drava", "Sava", "Tisza", "Volga", "Don")


def dealt(pages: list[Page], files: int, seed: int) -> list[list[Page]]:
    """`pages` shuffled and split into `files` files."""
    shuffled = pages[:]
    random.Random(seed).shuffle(shuffled)
    return [shuffled[number::files] for number in range(files)]


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


class Result:
    """The content of a corpus directory after `data-pipeline documents`."""

    def __init__(self, corpus: Path):
        self.rows = documents_of(corpus)
        self.texts = [row["text"] for row in self.rows]
        found = report.read(corpus)
        self.dropped = {**found.documents.dropped, **found.lines.dropped, **found.spans.dropped}


@pytest.fixture
def deduplicated(tmp_path):
    """deduplicated(files of pages, key=value of `dedup`): builds a corpus of them."""
    made = itertools.count()

    def make(files: list[list[Page]], cleaning: dict | None = None, **dedup: object) -> Result:
        settings = {"cleaning": cleaning or {"profile": "none"}, "dedup": {**OFF, **dedup}}
        return Result(cleaned(tmp_path / f"inputs-{next(made)}", files, **settings))

    return make


@pytest.fixture(scope="module")
def real_pages() -> list[Page]:
    """300 pages of published C4, with duplicates of every kind planted in them."""
    pages = published(300)
    chance = random.Random(7)
    for number in range(0, 300, 10):  # lines of other pages, in other letter case
        victim, donor = pages[number], pages[(number * 7 + 3) % 300]
        line = chance.choice(donor["text"].split("\n"))
        victim["text"] += f"\n{line.upper()} \n{line}"
    for number in range(5, 300, 20):  # runs of sentences of other pages
        sentences = sentences_of(pages[(number * 11 + 8) % 300]["text"])[:5]
        pages[number]["text"] += "\n" + "".join(sentences).strip()
    pages += [page(pages[n]["text"], f"http://mirror.org/{n}") for n in range(0, 60, 3)]
    pages += [page("Another text under a known address. It is newer.", pages[n]["url"], "2020") for n in range(90, 95)]
    pages += [page("Older. It loses.", pages[n]["url"].replace("http:", "https:"), "2001") for n in range(95, 99)]
    # of equal timestamps, the smallest md5 of the URL stays
    pages += [page(f"Page {n} is as old. It wins or loses.", pages[n]["url"] + "?utm_source=x") for n in range(99, 110)]
    return pages


# ---- parts


@each("steps", [{}, *slow({"urls": "newest", "lines": True, "spans": True, "minhash": True})])
def test_a_large_file_is_written_in_parts_and_gives_the_same_documents(small_corpus, tmp_path, real_pages, steps):
    """Compares one part with many, and checks which files are left after a rebuild with fewer parts."""
    cleaned(tmp_path, [real_pages], tokenizer=trained(small_corpus), dedup={**OFF, **steps})

    def build_in(corpus: str, characters: int) -> dict[str, str]:
        changes = (f"output={tmp_path / corpus}", f"characters_per_part={characters}")
        found = checksums(built(tmp_path / "corpus.yaml", *changes))
        return {name: digest for name, digest in found.items() if name.startswith(("documents/", "shards/"))}

    whole, many = build_in("whole", 10**9), build_in("many", 50_000)
    assert sum(name.startswith("documents/") for name in many) > 10
    assert Result(tmp_path / "many").rows == Result(tmp_path / "whole").rows
    differing = {name for name, _ in whole.items() ^ many.items()}
    assert not [name for name in differing if name.startswith("shards/")]
    assert build_in("many", 10**9) == whole
    assert not list((tmp_path / "many").rglob("part-00000_*"))


# ---- by hand


def test_a_reading_takes_the_changes_from_the_table_then_the_decisions_since_and_writes_the_next_table(tmp_path):
    """The first reading applies what "documents" decided. The second applies the table of the first, then "lines" and
    bad words. Each table is whole, although the block reads only one row."""
    corpus = LocalStore(tmp_path)
    texts = ["Kept.\nTwice.", "Kept.", "Once.\nTwice.", "shit\nTwice.", "shit", "Last."]
    read = [Document(f"a/b/{number + 3}", text, language="en") for number, text in enumerate(texts)]

    def decision(step: KeyStep, keys: Keys, elsewhere: list[int]) -> Decision:
        """Of unit 1 of 2. `elsewhere`: positions of what another unit keeps."""
        keys.write(tmp_path / f"{step.step}-keys", slots=8)
        positions = np.array(elsewhere, np.uint64)
        name, units = f"{step.step}-duplicates", np.ones(len(positions), np.uint64)
        write_duplicates(tmp_path / name, units, positions, 2, np.arange(len(positions), dtype=np.uint64))
        return Decision(step, f"{step.step}-keys", write_names(corpus, [name]))

    def changes(earlier: Earlier, name: str) -> tuple[list[str | None], Tally]:
        """What is left of each text, read again from the table that a reading writes, and what was counted."""
        reading, tally = Reading(Context(corpus), earlier), Tally()
        with reading.write_changes(name, reading.rows(read, tally), tally) as rows:
            next(rows)
        counted = Tally()
        again = Reading(Context(corpus), replace(earlier, changes=name, since=[])).rows(read, counted)
        return [left.text if left else None for _, _, left in again], counted

    keys = Keys(group=1, order=0)
    for document in (0, 5):  # equal within the unit: the last one goes
        keys.add(document, 0, (7,))
    first = Earlier(1, [Span("a/b", 3, 9)], "", [decision(EqualDocuments(), keys, [1 << 32])])
    left, counted = changes(first, "first")
    assert left == ["Kept.\nTwice.", None, "Once.\nTwice.", "shit\nTwice.", "shit", None]
    assert counted.dropped_documents == {"duplicate_document": 2}

    lines = decision(EqualLines(), Keys(group=1, order=1), [(0 << 32) + 1, (1 << 32) + 0, 3 << 32])
    since = [lines, Decision(BadWords(languages=["en"]))]
    left, counted = changes(replace(first, changes="first", since=since), "second")
    assert left == ["Kept.", None, "Once.\nTwice.", "Twice.", None, None]
    assert counted.dropped_documents == {"duplicate_document": 2, "bad_words": 1}
    assert counted.dropped_lines == {"duplicate_line": 2}
    columns = Reading(Context(corpus), replace(first, since=since)).columns(["url", "timestamp"])
    assert {*columns} == {*SCHEMA.names}  # a rule sees all fields
    columns = Reading(Context(corpus), replace(first, since=[lines])).columns(["url", "timestamp"])
    assert {*columns} == {"url", "timestamp", "id", "text", "target", "language"}


class Renames(Rule):
    step: Literal["renames"] = "renames"

    def apply(self, document: Document, tally: Tally) -> Document:
        return replace(document, title="", target=document.target.upper(), split="validation")


def test_a_table_of_changes_has_all_fields_that_a_rule_may_change(tmp_path):
    corpus, read = (
        LocalStore(tmp_path),
        [Document("a/b/0", "A text.", title="A", source="a", split="train", target="t")],
    )
    earlier = Earlier(0, [Span("a/b", 0, 1)], "", [Decision(Renames())])
    reading, tally = Reading(Context(corpus), earlier), Tally()
    with reading.write_changes("table", reading.rows(read, tally), tally) as rows:
        ((_, _, changed),) = rows
    ((_, _, again),) = Reading(Context(corpus), replace(earlier, changes="table", since=[])).rows(read, Tally())
    assert again == changed == replace(read[0], title="", split="validation", target="T")


def test_a_field_that_a_rule_has_emptied_is_empty_in_the_tables_of_all_later_steps(tmp_path):
    """Each reading takes the columns that it asks for, as in a build: the second step compares texts alone."""
    corpus = LocalStore(tmp_path)
    stored = Document("a/b/0", "A text.", title="A", source="a", timestamp="2019")
    earlier = Earlier(0, [Span("a/b", 0, 1)], "", [Decision(Renames())])
    for table in ("lines", "documents", "left"):
        reading, tally = Reading(Context(corpus), earlier), Tally()
        own = SCHEMA.names if table == "left" else EqualDocuments.columns
        read = [Document(**{name: getattr(stored, name) for name in reading.columns(own)})]
        with reading.write_changes(table, reading.rows(read, tally), tally) as rows:
            ((_, _, left),) = rows
        earlier = replace(earlier, changes=table, since=[])
    assert left == replace(stored, title="", split="validation")


def steps_of(**sections: object) -> list[str]:
    """The steps of a corpus of one source."""
    made = {"name": "a", "output": "a", "sources": [{"format": "text", "path": "a.txt", "language": "en"}]}
    config = CorpusConfig.model_validate({**made, **sections})
    return [step.step for step in config.steps_of(config.sources[0])]


def test_rules_of_what_is_left_follow_the_last_step_that_shortens_texts_by_default_and_decontamination_is_last():
    shortening = [name for name, step in key_steps().items() if step.shortens]
    assert shortening == ["lines", "spans", "substrings"]
    sets = {"sets": [{"name": "a", "path": "a.txt", "format": "text"}]}
    rules, last = ["language", "bad_words"], "decontamination"
    for on, steps in {
        ("lines",): ["page", "lines", *rules, last],
        ("spans", "urls"): ["page", "urls", "spans", *rules, last],
        ("substrings", "documents"): ["page", "anchors", "substrings", *rules, "documents", last],
        ("minhash",): ["page", *rules, "minhash", last],
    }.items():
        dedup = {**OFF, **{step: "newest" if step == "urls" else True for step in on}}
        assert steps_of(dedup=dedup, decontamination=sets) == steps


def test_the_list_of_steps_is_the_order():
    names = ["lines", "page", {"step": "substrings", "words": 20}, "language", "minhash", "urls"]
    assert steps_of(steps=names) == ["lines", "page", "anchors", "substrings", "language", "minhash", "urls"]


@each(
    "given, message",
    [
        ({"steps": ["lines", "lines"]}, "steps: lines is named twice; only rules may be"),
        (
            {"steps": ["lines"], "cleaning": {}},
            "steps: the list replaces cleaning; leave out one of the two, or set it to null",
        ),
        ({"steps": ["page"], "dedup": {"minhash": True}}, "steps: the list replaces dedup.minhash; leave out one"),
        ({"steps": [{"step": "page", "sources": ["b"]}]}, "steps: no source b; there are text"),
        ({"steps": ["pages"]}, "steps.0.step: expected one of page, paragraphs, gopher, .* got 'pages'"),
        ({"steps": [{"step": "minhash", "band": 9}]}, "steps.0.band: unknown key; nearest valid key: steps.0.bands"),
    ],
)
def test_a_list_of_steps_that_makes_no_sense_is_refused(given, message):
    source = {"format": "text", "path": "a.txt"}
    with pytest.raises(UserError, match=message):
        check({"name": "a", "output": "a", "sources": [source], **given}, CorpusConfig, "a.yaml")


def test_a_build_takes_the_steps_in_the_order_of_the_list(tmp_path):
    """A line that is on two pages is dropped before the rule counts the lines' words, or after it. A rule for one
    source leaves the other's pages alone."""
    shared = "This line is long enough."
    for name in "ab":
        write_pages(tmp_path / name / "0.json.gz", [page(f"{shared}\nShort {name}.", f"http://{name}.org/")])
    sources = [{"format": "c4", "name": name, "path": str(tmp_path / name)} for name in "ab"]
    rule = {"step": "page", "web_rules": False, "min_sentences_per_page": 0}
    kept = {}
    for name, steps in {
        "before": ["lines", rule],
        "after": [rule, {"step": "lines"}],
        "of_a": [{**rule, "sources": ["a"]}, "documents", rule],
    }.items():
        changes = {"steps": steps, "cleaning": None, "dedup": None, "output": str(tmp_path / f"corpus-{name}")}
        config = write_corpus_file(tmp_path / f"{name}.yaml", sources=sources, **changes)
        kept[name] = sorted(row["text"] for row in documents_of(built(config, until="documents")))
    assert kept == {"before": [shared], "after": [shared], "of_a": [shared, shared]}
    dropped = [report.read(tmp_path / f"corpus-{name}").documents.dropped for name in ("before", "after")]
    assert dropped == [{"too_few_sentences": 1}, {"empty_after_dedup": 1}]


SHORT_LINES = {"step": "page", "web_rules": False, "min_words_per_line": 3, "min_sentences_per_page": 0}
LINES = {
    "a": ["This line is on both pages.", "Two words.", "No.", "The last line of a."],
    "b": ["This line is on both pages.", "Yes.", "No.", "The last line of b."],
}


@each(
    "of_a, settings, dropped",
    [
        ({"profile": "none", "min_words_per_line": 3}, {"dedup": {**OFF, "lines": True}}, (2, 1)),
        (None, {"steps": ["urls", SHORT_LINES]}, (4, 0)),
        (None, {"steps": ["urls", SHORT_LINES, "lines"]}, (4, 1)),
        (None, {"steps": ["urls", "lines", SHORT_LINES]}, (3, 2)),
    ],
)
def test_the_report_counts_all_lines_as_read_whatever_cleans_a_source_and_whatever_the_order(
    tmp_path, of_a, settings, dropped
):
    sources = []
    for name, lines in LINES.items():
        write_pages(tmp_path / name / "0.json.gz", [page("\n".join(lines), f"http://{name}.org/")])
        sources.append({"format": "c4", "name": name, "path": str(tmp_path / name)})
    if of_a:
        sources[0]["cleaning"] = of_a
    else:
        settings = {"cleaning": None, "dedup": None, **settings}
    corpus = built(write_corpus_file(tmp_path / "corpus.yaml", sources=sources, **settings), until="documents")
    found = report.read(corpus).lines
    assert found.read == 8
    assert (found.dropped.get("too_short", 0), found.dropped.get("duplicate_line", 0)) == dropped


def test_language_and_bad_words_look_at_what_duplicate_lines_have_left_of_a_page(deduplicated):
    """TFDS's order. A page in two languages is English once its German lines stay on another page only; that page is
    then dropped for its language, with the lines. A page whose line with a bad word is removed has no bad word left."""
    english = [f"The {river} is a river that flows through {n} towns of the plain." for n, river in enumerate(RIVERS)]
    german = "Die Donau fließt hier seit vielen Jahren ruhig durch die alte Stadt.\nDer Turm der Kirche ist sehr hoch."
    german += "\nIm Sommer sitzen viele Menschen gerne am Ufer und schauen auf das Wasser."
    bad = "Nobody says shit in front of the whole congregation here."
    smaller, larger = sorted(["http://a.org/1", "http://b.org/2"], key=md5)
    least, most = sorted(["http://c.org/3", "http://d.org/4"], key=md5)
    pages = [
        page("\n".join(english[:4]) + "\n" + german, larger),
        page(german, smaller),
        page("\n".join(english[4:8]) + "\n" + bad, most),
        page("\n".join(english[8:]) + "\n" + bad, least),
    ]
    for files in ([pages], [[one] for one in pages]):
        found = deduplicated(files, {"profile": "c4"}, lines=True, documents=True)
        kept = {row["url"]: row["text"] for row in found.rows}
        assert kept == {larger: "\n".join(english[:4]), most: "\n".join(english[4:8])}
        assert {row["language"] for row in found.rows} == {"en"}
        assert (found.dropped["language_other"], found.dropped["bad_words"]) == (1, 1)
    with pytest.raises(FailedError, match="no document is left of 4 read"):  # each on its own is dropped
        deduplicated([pages], {"profile": "c4"}, documents=True)


def test_the_newest_page_of_a_url_stays_also_if_cleaning_drops_it(deduplicated):
    """C4 chooses among all pages that aren't too long; if cleaning drops the newest, no page is left."""
    text = "A first sentence stands here. A second one follows it. And a third one ends it."
    pages = [
        page(text + " Old.", "http://www.a.org/x/", "2019-01-01T00:00:00Z"),
        page(text + " New.", "https://a.org/x?utm_source=y", "2019-03-01T00:00:00Z"),
        page(text + " Older.", "http://a.org/x", "2018-12-01T00:00:00Z"),
        page(text + " Case counts.", "http://A.org/x", "2018-12-01T00:00:00Z"),
        page(text + " Loses to a page that is dropped.", "http://b.org/", "2018-12-01T00:00:00Z"),
        page("Too short.", "http://b.org", "2019-12-01T00:00:00Z"),
        page(text + " Beats a page that is too long.", "http://c.org/", "2018-12-01T00:00:00Z"),
        page(text * 10, "http://c.org/", "2019-12-01T00:00:00Z"),
        page(text + " No address."),
        page(text + " No address."),
    ]
    cleaning = {"profile": "none", "min_sentences_per_page": 3, "max_page_characters": 500}
    for files in ([pages], [[one] for one in pages]):
        found = deduplicated(files, cleaning, urls="newest")
        ends = [row["text"].removeprefix(text).strip() for row in found.rows]
        assert ends == ["New.", "Case counts.", "Beats a page that is too long.", "No address.", "No address."]
        assert found.dropped["duplicate_url"] == 3


PACKAGE = """
from dataclasses import replace
from typing import Literal

from data_pipeline.dedup.keys import hash64
from data_pipeline.dedup.step import KeyStep
from data_pipeline.text.step import Rule


class UpToBar(Rule):
    step: Literal["up_to_bar"] = "up_to_bar"

    def apply(self, document, tally):
        return replace(document, text=document.text.partition("|")[0])


class Sites(KeyStep):
    step: Literal["sites"] = "sites"
    columns, order, counted_as = ("id", "url"), 0, "line_of_site"

    def keys(self, document):
        yield 0, (hash64(document.url.split("/")[2]),)


class Hollow(Sites):
    step: Literal["hollow"] = "hollow"
    columns, counted_as = ("id", "source"), ""

    def keys(self, document):
        if document.id[-1] in "45":
            yield 0, (hash64(document.source),)

    def without(self, document, duplicates, tally):
        return " " if duplicates else document.text
"""
OFFERS = """
[encdec_pretrain.steps]
up_to_bar = own:UpToBar
sites = own:Sites
hollow = own:Hollow
"""


# From the oldest to the newest; those of a line are equally old. Two are in another form than ISO 8601.
TIMES = [
    ["", " "],
    ["25/04/2019"],
    ["April 2019"],
    ["2019", "2019-01-01", "2019-01-01T00:00Z", "2018-12-31T24:00:00Z"],
    ["2019-04-24T23:59:60Z", "2019-04-25", "2019-04-25 00:00:00+00:00", "2019-04-24T19:00-0500"],
    ["2019-04-25T12:57:54Z", "2019-04-25T14:57:54+02:00", "2019-04-25 12:57:54 UTC", "2019-04-25T07:27:54.00-05:30"],
    ["2019-04-25T12:57:54.000000001Z"],
    ["2019-04-25T12:57:54.1Z", "2019-04-25T12:57:54,100", "2019-04-25t12:57:54.1z"],
    ["2019-04-25T12:57:54.25Z"],
    ["2019-04-25T13:00:00+00"],
    ["2019-04-25T12:57:54-01:00"],
    ["2019-04-26"],
]


def rank_of(timestamp: str) -> tuple[int, ...]:
    """The newest page of a URL has the smallest."""
    return NewestUrl.words("http://a.org/", timestamp, True)[1:-1]


def test_the_newest_page_is_that_of_the_latest_instant():
    ranks = [{rank_of(time) for time in times} for times in TIMES]
    assert [len(equal) for equal in ranks] == [1] * len(TIMES)
    assert ranks == sorted(ranks, key=min, reverse=True)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.datetimes(), st.integers(-14 * 60, 14 * 60)), min_size=2, max_size=2))
def test_instants_are_those_of_the_calendar(drawn):
    """Python's own, in which every offset is possible."""
    times = [time.replace(tzinfo=timezone(timedelta(minutes=offset))) for time, offset in drawn]
    first, second = (rank_of(time.isoformat()) for time in times)
    assert (first < second, first == second) == (times[0] > times[1], times[0] == times[1])


def test_what_rules_and_steps_of_a_package_leave_empty_is_counted_and_a_step_without_text_loses_none(
    tmp_path, monkeypatch
):
    """The first page has nothing before the bar. Of the others a line is dropped, then the second of a.org, and then
    "hollow" empties the second of two documents. A rule may have any name: this one's drops documents."""
    (tmp_path / "own.py").write_text(PACKAGE)
    installed = tmp_path / "own-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(OFFERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    sites = ("a.org/0", "a.org/1", "a.org/2", "b.org/3", "c.org/4", "d.org/5")
    texts = {f"http://{site}": f"The text of {site}.\nOn each page." for site in sites}
    write_pages(
        tmp_path / "0.json.gz", (page(f"{'|' if '/0' in url else ''}{text}", url) for url, text in texts.items())
    )
    steps = ["up_to_bar", "lines", "sites", "hollow"]
    config = write_corpus_file(tmp_path / "corpus.yaml", dedup=None, cleaning=None, steps=steps)
    done = run_command("data-pipeline", "documents", config)
    assert done.returncode == 0, done.stderr
    found = Result(tmp_path / "corpus")
    counts = report.read(tmp_path / "corpus")
    assert counts.documents.dropped == {"empty": 1, "line_of_site": 1, "empty_after_dedup": 1}
    assert counts.lines == report.LineCounts(10, {"duplicate_line": 4})
    keeper = min(sites[1:], key=lambda site: md5(f"http://{site}"))  # of the line
    kept = [f"The text of {site}." + ("\nOn each page." if site == keeper else "") for site in sites[1:5]]
    assert found.texts == [kept[0], *kept[2:]]


class Fuzzy(NearDuplicates):
    step: Literal["lines-fuzzy"] = "lines-fuzzy"


def test_a_step_that_is_off_takes_no_other_steps_files_with_it(tmp_path, monkeypatch):
    """And merging removes the merged files of its own stage alone."""
    monkeypatch.setitem(STEPS, "lines-fuzzy", Fuzzy)
    other = ["lines-fuzzy-keys", "lines-fuzzy-keys-merged", "lines-fuzzy-duplicates", "lines-fuzzy-clusters", "tokens"]
    own = ["lines-keys", "lines-keys-merged", "lines-duplicates", "minhash-clusters"]
    for name in [*other, *own]:
        (tmp_path / ".stages" / name).mkdir(parents=True)
    config = plain(tmp_path, "x", "text").model_copy(update={"steps": [Fuzzy()]})
    forget(LocalStore(tmp_path), config)
    assert {folder.name for folder in (tmp_path / ".stages").iterdir()} == set(other)

    (tmp_path / ".stages/lines-fuzzy-keys-merged-sites-keys").mkdir()
    Comparing("lines-fuzzy", Fuzzy).merged_keys.run(Build(config, LocalStore(tmp_path), []))
    left = {folder.name for folder in (tmp_path / ".stages").iterdir()}
    assert left == {*other, "lines-fuzzy-keys-merged-sites-keys"} - {"lines-fuzzy-keys-merged"}


def test_a_build_removes_the_files_of_stages_that_it_no_longer_needs(tmp_path):
    """Stages of URLs need a document with a URL, the others the setting. Without deduplication, no parts are left."""
    pages = [page("One text.", "http://a.org"), page("Another text.")]
    kept = {"driver", "workers", "documents", "deduplicated", "plans", "timings", "complete", "revisions.json"}

    def folders(**dedup: object) -> set[str]:
        corpus = cleaned(tmp_path, [pages], cleaning={"profile": "none"}, dedup={**OFF, **dedup})
        return {path.name for path in (corpus / ".stages").iterdir()} - kept

    steps = {f"{step}-{kind}" for step in ("urls", "lines") for kind in ("keys", "duplicates")}
    assert folders(urls="newest", lines=True) == steps
    pages[0]["url"] = ""
    assert folders(urls="newest", lines=True) == {"lines-keys", "lines-duplicates"}
    assert folders() == set()
    assert not [*(tmp_path / "corpus/.stages/documents").glob("*.parquet")]
    assert not (tmp_path / "corpus/.stages/deduplicated").exists()


def test_a_line_too_long_beside_an_empty_one_leaves_no_text(tmp_path):
    """The page is dropped: with no rule for sentences, the empty line would be all that is left."""
    corpus = cleaned(
        tmp_path, [[page("abcdefgh\n\n"), page("abc\n\n")]], cleaning={"profile": "none", "max_word_length": 5}
    )
    assert Result(corpus).texts == ["abc\n\n"]


def test_equal_documents_leave_the_smallest_id(deduplicated):
    found = deduplicated([[page("One."), page("Two.")], [page("Two."), page("one."), page("One.")]], documents=True)
    ids = [f"c4/{file}.json.gz/{number:09d}" for file, number in (("000", 0), ("000", 1), ("001", 1))]
    assert [row["id"] for row in found.rows] == ids
    assert found.dropped["duplicate_document"] == 2


def test_pairs_are_equal_if_their_targets_are_too_and_keep_their_lines():
    pair = Document(id="a", text="translate: yes\ntranslate: yes", target="ja")
    (same,), (other,) = (list(EqualDocuments().keys(replace(pair, target=target))) for target in ("ja", "oui"))
    assert same == next(EqualDocuments().keys(replace(pair, id="b")))
    assert same != other
    steps = [EqualLines(), EqualSpans(), EqualSubstrings(words=2), NearDuplicates()]
    assert not [key for step in steps for key in step.keys(pair)]
    assert EqualLines(min_sentences=3).without(pair, [], Tally()) == pair.text


def test_a_span_of_three_sentences_stays_once_and_two_sentences_are_no_span(deduplicated):
    story = "The fox ran off. The dog slept on. The sun went down."
    pages = [
        page(f"First page here. {story} End of the first.", "u/1"),  # md5: 0f…; of the second, 95…
        page("Second page here.\nTHE FOX ran  off. The dog slept on. The sun went down.\nEnd of the second.", "u/2"),
        page("The fox ran off. The dog slept on. Nothing else.", "u/3"),
    ]
    found = deduplicated([pages[:1], pages[1:]], spans=True)
    assert found.texts == [pages[0]["text"], "Second page here.\nEnd of the second.", pages[2]["text"]]
    assert found.dropped["duplicate_span"] == 1


def test_texts_keep_their_paragraphs_without_a_lost_span():
    document = Document("i", "It ran. It hid. It slept.\nIt woke. It ate.", "u")
    assert EqualSpans().without(document, [0], Tally()) == "It woke. It ate."
    document = Document("i", "Day came. It ran. It hid. It slept.\nIt woke.", "u")
    assert EqualSpans().without(document, [1], Tally()) == "Day came.\nIt woke."
    assert EqualSpans(min_sentences=3).without(document, [1], Tally()).rule == "too_few_sentences_after_dedup"


# ---- against a reference in memory


def lines_in_memory(pages: list[Page]) -> list[str]:
    owner: dict[str, str] = {}
    for one in pages:
        for line in one["text"].split("\n"):
            owner[line.strip().lower()] = min(owner.get(line.strip().lower(), "g"), md5(one["url"]))
    texts = []
    for one in pages:
        kept, seen = [], set()
        for line in one["text"].split("\n"):
            key = line.strip().lower()
            if owner[key] == md5(one["url"]) and key not in seen:
                kept.append(line)
            seen.add(key)
        if kept and count_sentences(text := "\n".join(kept).strip()) >= 3:
            texts.append(text)
    return sorted(texts)


def newest_in_memory(pages: list[Page]) -> list[Page]:
    best: dict[str, Page] = {}
    for one in sorted(pages, key=lambda one: md5(one["url"])):
        held = best.setdefault(normalize_url(one["url"]), one)
        if one["timestamp"] > held["timestamp"]:
            best[normalize_url(one["url"])] = one
    return list(best.values())


@each("files, keys_per_bucket", [(1, 2**24), (5, 300)])
def test_urls_lines_and_documents_agree_with_a_reference_however_pages_are_dealt(
    deduplicated, real_pages, files, keys_per_bucket
):
    cleaning = {"profile": "none", "min_sentences_per_page": 3}
    steps = {"urls": "newest", "lines": True, "documents": True, "keys_per_bucket": keys_per_bucket}
    found = deduplicated(dealt(real_pages, files, seed=files), cleaning, **steps)
    # sentences are counted line by line, as cleaning does for C4's minimum
    pages = [one for one in real_pages if sum(map(count_sentences, one["text"].splitlines())) >= 3]
    newest = {id(one) for one in newest_in_memory(real_pages)}
    assert sorted(found.texts) == sorted(set(lines_in_memory([one for one in pages if id(one) in newest])))
    assert found.dropped["duplicate_url"] == sum(id(one) not in newest for one in pages) > 0
    assert found.dropped["duplicate_line"] > 60


def test_no_span_of_three_sentences_is_left_twice_and_none_is_lost(deduplicated, real_pages):
    pages = newest_in_memory(real_pages)
    results = [deduplicated(dealt(pages, files, seed=files), spans=True, keys_per_bucket=500) for files in (1, 7)]
    assert sorted(results[0].texts) == sorted(results[1].texts)
    both = [one["text"] for one in pages], results[0].texts
    of_both = ([" ".join(one.lower().split()) for text in texts for one in sentences_of(text)] for texts in both)
    before, after = map(set, of_both)
    assert after == before
    assert results[0].dropped["duplicate_span"] > 30
    keys = EqualSpans()
    for texts, twice in zip(both, (True, False), strict=True):
        hashes = [words[0] for text in texts for _, words in keys.keys(Document(text=text, url="u"))]
        planted = len(hashes) - len(set(hashes))
        assert planted > 100 if twice else planted == 0


def test_a_chain_of_near_duplicates_is_one_cluster(deduplicated):
    """a ~ b and b ~ c, but not a ~ c: the smallest id of the three stays, whichever units they are in."""
    words = [f"w{number}" for number in range(2000)]
    chain = [" ".join(words[start : start + 1500]) for start in (0, 60, 120, 180, 240)]
    files = [[page(text)] for text in [*chain, "quite another text"]]
    found = deduplicated(files, minhash={"bands": 14, "rows": 9})
    assert found.texts == [chain[0], "quite another text"]


# ---- the mechanism


def test_clusters_are_the_same_however_few_pairs_are_worked_in_at_a_time():
    """Compares random pairs of 300 documents with a reference that joins labels one pair at a time."""
    pairs = np.random.default_rng(0).integers(0, 300, (220, 2)).astype(np.uint64)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    first = list(range(300))
    for one, other in pairs.tolist():
        joined = {first[one], first[other]}
        first = [min(joined) if label in joined else label for label in first]
    for size, least_pending in ((len(pairs), 10**6), (7, 1), (1, 20)):
        clusters = Clusters(least_pending)
        for start in range(0, len(pairs), size):
            clusters.join(pairs[start : start + size])
        documents, found = clusters.members()
        assert documents.tolist() == sorted(set(pairs.ravel().tolist()))
        assert found.tolist() == [first[document] for document in documents.tolist()]


def test_minhash_and_substrings_are_switches_or_sections():
    assert steps_of(dedup={**OFF, "substrings": True}, cleaning={"profile": "none"}) == ["anchors", "substrings"]
    assert DedupConfig.model_validate({"substrings": {"words": 30}}).substrings == SubstringsConfig(words=30)
    assert DedupConfig().substrings is None
    assert DedupConfig.model_validate({"minhash": True}).minhash == MinHashConfig(bands=14, rows=8, ngram=5)
    near = steps_of(dedup={"minhash": {"rows": 7}}, cleaning={"profile": "none"})
    assert near == ["urls", "lines", "documents", "minhash"]
    assert steps_of(dedup=OFF, cleaning={"profile": "none"}) == []
    assert len([*NearDuplicates().keys(Document(text="one two"))]) == 14


def test_a_bucket_reads_its_share_of_the_keys_and_a_line_on_every_page_costs_one(tmp_path):
    """Otherwise one hash could fill a bucket, however many buckets there are."""
    assert [KeyBucket.enough(keys, 100) for keys in (0, 1, 100, 101, 200, 201, 1000)] == [1, 1, 1, 2, 2, 4, 16]
    assert KeyBucket.enough(10**12, 100) == 2**34
    assert KeyBucket.slots(4096 * 100, 100) == 4096
    assert KeyBucket.slots(8 * 10**10, 2**24) == 8192  # of four snapshots of Common Crawl
    assert KeyBucket.slots(10**12, 1) == 2**20
    keys, chance = Keys(group=1, order=1), random.Random(0)
    for document in range(1000):
        keys.add(document, 0, (42, 1000 - document))
        keys.add(document, 3, (chance.getrandbits(64), 0))
    for slots in (4096, 8):
        assert keys.write(tmp_path / "keys.safetensors", slots) == 1001
    tables = [KeyBucket(number, 8).read(LocalStore(tmp_path), ["keys.safetensors"])[0] for number in range(8)]
    assert sum(map(len, tables)) == 1001
    assert max(map(len, tables)) < 1001 / 8 * 2
    assert tables[0][0].tolist() == [42, 1, 999 << 32]
    assert tables[0].dtype == np.uint64


# ---- equal substrings, and MinHash's curve


LENGTH = 50


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    """100 pages of published C4. In 40 of them stand passages of 49 to 120 words of others, in other line breaks."""
    made = published(100)
    originals = [one["text"].split() for one in made]
    chance = random.Random(5)
    for number in range(40):
        donor = chance.choice([words for words in originals if len(words) > 150])
        length = chance.choice([49, 50, 51, 70, 120])
        first = chance.randrange(len(donor) - length)
        own = made[number]["text"].split(" ")
        at = chance.randrange(len(own) + 1)
        passage = chance.choice([" ", "\n"]).join(donor[first : first + length])
        made[number]["text"] = " ".join([*own[:at], passage, *own[at:]])
    made[50]["text"] += "\n" + made[50]["text"]  # twice on one page
    made[51]["text"] += " ha" * 500  # it overlaps itself
    return made


def in_memory(pages: list[Page]) -> dict[str, str]:
    """The words that are left on each page: of equal runs of 50 words, the page of the smallest md5 keeps the first."""
    best: dict[tuple[str, ...], tuple[str, int]] = {}
    runs = {}
    for one in pages:
        words = one["text"].split()
        runs[one["url"]] = [tuple(words[at : at + LENGTH]) for at in range(len(words) - LENGTH + 1)]
        for at, run in enumerate(runs[one["url"]]):
            best[run] = min(best.get(run, ("g", 0)), (md5(one["url"]), at))
    left = {}
    for one in pages:
        lost = [at for at, run in enumerate(runs[one["url"]]) if best[run] != (md5(one["url"]), at)]
        gone = {place for at in lost for place in range(at, at + LENGTH)}
        words = [word for at, word in enumerate(one["text"].split()) if at not in gone]
        if words:
            left[one["url"]] = " ".join(words)
    return left


@each("files, keys_per_bucket", [(1, 2**24), (7, 300)])
def test_every_repeat_of_50_words_is_dropped_and_nothing_else(tmp_path, pages, files, keys_per_bucket):
    dedup = {**OFF, "substrings": True, "keys_per_bucket": keys_per_bucket}
    corpus = cleaned(tmp_path, dealt(pages, files, seed=files), dedup=dedup)
    found, expected = texts_of(corpus), in_memory(pages)
    assert {url: " ".join(text.split()) for url, text in found.items()} == expected
    changed = [one for one in pages if expected.get(one["url"]) != " ".join(one["text"].split())]
    assert len(changed) > 25
    spans = report.read(corpus).spans
    assert spans.dropped["duplicate_substring"] >= len(changed)
    dropped = sum(len(one["text"].split()) - len(expected.get(one["url"], "").split()) for one in pages)
    assert spans.substring_words == dropped
    assert f"{spans.dropped['duplicate_substring']:,}" in (corpus / "report.md").read_text()


@each(
    "text, lost, left",
    [
        ("One two three four.", [1], "One four."),
        ("One\ntwo three four.", [1], "One\nfour."),
        ("One two three\n\nfour.", [1], "One\n\nfour."),
        ("one two three four", [0, 2], ""),
        ("one two three four five", [0, 1], "four five"),
        ("a b c d e f g", [1, 5], "a d e"),
    ],
)
def test_text_around_a_lost_run_keeps_its_line_break(text, lost, left):
    document = Document("i", text, "u")
    found = EqualSubstrings(words=2).without(document, lost, Tally())
    assert found == (left or Dropped("empty_after_dedup", "u"))


@each("one_file", [False, True])
def test_the_document_that_stays_is_named(tmp_path, one_file):
    """For each step, in one unit and in several. The second file begins with pages that cleaning drops."""
    texts = published(6)
    near = texts[4]["text"].rsplit(" ", 1)[0]
    short = [page("Short.", f"http://short.org/{number}") for number in range(3)]
    first = [page(texts[0]["text"], "http://a.org/0", "2019"), *texts[1:5]]
    second = [
        page("Another text of the page. It is newer. It wins.", "http://a.org/0", "2020"),
        page(texts[2]["text"], "http://b.org/2"),
        page(near, "http://b.org/4"),
    ]
    files = [first + short + second, []] if one_file else [first, short + second]
    dedup = {**OFF, "urls": "newest", "documents": True, "minhash": True}
    cleaning = {"profile": "none", "min_sentences_per_page": 2}
    corpus = cleaned(tmp_path, [own for own in files if own], cleaning=cleaning, dedup=dedup, bytes_per_shared_unit=0)

    def identity(number: int) -> str:
        unit, ordinal = (0, number) if one_file or number < 5 else (1, number - 5)
        return f"c4/{unit:03d}.json.gz/{ordinal:09d}"

    rows = dropped_of(corpus)
    assert {row["id"]: (row["step"], row["rule"], row["kept"]) for row in rows} == {
        identity(0): ("urls", "duplicate_url", identity(8)),
        **{identity(number): ("page", "too_few_sentences", "") for number in (5, 6, 7)},
        identity(9): ("documents", "duplicate_document", identity(2)),
        identity(10): ("minhash", "near_duplicate", identity(4)),
    }
    texts_before = {row["id"]: row["text"] for row in rows}
    assert texts_before[identity(10)] == near[:200]
    assert texts_before[identity(5)] == "Short."


def test_every_dropped_document_is_in_the_table_with_its_rule(tmp_path, real_pages):
    """As many as the report counts; the others are in the corpus."""
    dedup = {**OFF, "urls": "newest", "documents": True, "minhash": {"bands": 20, "rows": 5}}
    cleaning = {"profile": "none", "gopher": {"min_words": 5, "min_stop_words": 0}}
    corpus = cleaned(tmp_path, dealt(real_pages, 4, seed=5), cleaning=cleaning, dedup=dedup)
    rows = dropped_of(corpus)
    assert Counter(row["rule"] for row in rows) == report.read(corpus).documents.dropped
    kept = {row["id"] for row in documents_of(corpus)}
    assert len({row["id"] for row in rows} | kept) == len(rows) + len(kept) == len(real_pages)
    names = {"duplicate_url", "duplicate_document", "near_duplicate"}
    assert {row["rule"] for row in rows if row["kept"]} == names
    assert not [row for row in rows if row["rule"] in names and row["kept"] == row["id"]]
    assert {row["kept"] for row in rows} <= {"", *kept, *(row["id"] for row in rows)}


def test_without_keep_dropped_no_table_is_left_and_the_documents_are_the_same(tmp_path, real_pages):
    corpus = cleaned(tmp_path, [real_pages], dedup={**OFF, "urls": "newest", "lines": True})
    before = checksums(corpus)
    assert any(name.startswith("dropped/") for name in before)
    after = checksums(built(tmp_path / "corpus.yaml", "keep_dropped=false", until="documents"))
    assert after == {name: digest for name, digest in before.items() if not name.startswith("dropped/")}


WORDS, PAIRS = 300, 400


@each("config", [MinHashConfig(ngram=1), MinHashConfig(bands=12, rows=5, ngram=1)])
def test_the_measured_curve_lies_within_the_binomial_interval_of_the_theory(config):
    """Four standard deviations: one bin in 15,000 would lie outside by chance, and a wrong number of bands far off."""
    step, bands, rows = NearDuplicates(**dict(config)), config.bands, config.rows
    wanted = np.linspace(0.3, 1, PAIRS)
    lost = np.round(WORDS * (1 - wanted) / (1 + wanted)).astype(int)
    similarity = (WORDS - lost) / (WORDS + lost)
    found = np.empty(PAIRS, bool)
    for pair, number in enumerate(lost.tolist()):
        words = [f"p{pair}w{word}" for word in range(WORDS + number)]
        texts = (" ".join(words[:WORDS]), " ".join(words[number:]))
        first, second = ({key for _, key in step.keys(Document(text=text))} for text in texts)
        found[pair] = bool(first & second)
    chances = 1 - (1 - similarity**rows) ** bands
    checked = 0
    for low, high in itertools.pairwise(np.linspace(0.3, 1, 8)):
        inside = (similarity >= low) & ((similarity < high) | (high == 1))
        theory = chances[inside]
        mean, deviation = theory.mean(), math.sqrt((theory * (1 - theory)).sum()) / len(theory)
        assert abs(found[inside].mean() - mean) <= 4 * deviation
        checked += 0.1 < mean < 0.9
    assert checked >= 2
    assert found[similarity >= 0.95].mean() > 0.97
    middle = (1 / bands) ** (1 / rows)  # where the curve is steepest
    assert (similarity[found] >= middle - 0.3).mean() > 0.97
