"""What the rule `pii` replaces and leaves, and what a build reports of it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pii.patterns import PLACEHOLDERS, mask
from pii.rule import PersonalData

from data_pipeline.base.config_file import check
from data_pipeline.base.errors import UserError
from data_pipeline.config import CorpusConfig
from data_pipeline.stages import report
from data_pipeline.stages.pipeline import build
from data_pipeline.text.cleaning.config import CleaningConfig
from data_pipeline.text.document import Tally
from tests.support.builds import OFF, cleaned, documents_of, page, plain
from tests.support.tables import each

PAGES = [
    "Write to ann@example.org or bob@example.org, or call 212-555-0123.",
    "The server is 93.184.216.34, and version 1.2.3.4 runs on it.",
    "Nothing to hide.",
]


def test_a_build_counts_what_it_replaces_and_shows_none_of_it(tmp_path):
    cleaning = {"profile": "none", "rules": [{"rule": "pii"}]}
    corpus = cleaned(tmp_path, [[page(text) for text in PAGES]], cleaning=cleaning)
    assert [row["text"] for row in documents_of(corpus)] == [
        "Write to |||EMAIL_ADDRESS||| or |||EMAIL_ADDRESS|||, or call |||PHONE_NUMBER|||.",
        "The server is |||IP_ADDRESS|||, and version 1.2.3.4 runs on it.",
        "Nothing to hide.",
    ]
    assert report.read(corpus).masked == {"email": 2, "ip": 1, "phone": 1}
    text = (corpus / "report.md").read_text()
    assert all(part in text for part in ("## Masked personal data", "| email | 2 |"))
    assert not any(secret in text for secret in ("ann@", "93.184", "555-0123"))


def of_corpus(rules: list[dict[str, object]], **changes: object) -> CorpusConfig:
    """A corpus of the sources web and wiki with these rules of the corpus."""
    sources = [{"format": "text", "path": f"{name}.txt", "name": name} for name in ("web", "wiki")]
    given = {"name": "x", "output": "x", "sources": sources, "cleaning": {"profile": "none", "rules": rules}}
    return check({**given, **changes}, CorpusConfig, "a.yaml")


def test_a_rule_of_the_corpus_takes_the_sources_that_it_names():
    rules = [{"step": "pii", "kinds": ["email"], "sources": ["web"]}, {"step": "pii", "kinds": ["ip"]}]
    kinds = {
        name: [step.kinds for step in steps if isinstance(step, PersonalData)]
        for name, steps in of_corpus(rules).all_steps.items()
    }
    assert kinds == {"web": [["email"], ["ip"]], "wiki": [["ip"]]}


def test_a_rule_that_names_an_unknown_source_is_refused():
    rules = [{"step": "pii", "sources": ["web", "blogs"]}]
    with pytest.raises(UserError, match=r"cleaning\.rules: no source blogs; there are web, wiki"):
        of_corpus(rules)
    web = {"format": "text", "path": "web.txt", "name": "web", "cleaning": {"profile": "none", "rules": rules}}
    with pytest.raises(UserError, match=r"sources\.0\.cleaning\.rules: no source blogs; there are web"):
        of_corpus([], sources=[web])


@each("place", ["source", "corpus"])
def test_both_sides_of_a_pair_are_masked(tmp_path, place):
    pair = "ask {0} ann@example.org\tcall {0} 212-555-0123\n"
    (tmp_path / "pairs.tsv").write_text("".join(map(pair.format, range(40))))
    rows = {"packing": "complete_documents", "objective": {"name": "text_to_text"}}
    cleaning = {"profile": "none", "rules": [{"step": "pii", "kinds": ["email", "phone"]}]}
    source = {"format": "pairs", "path": str(tmp_path / "pairs.tsv")}
    of_place = {
        "source": {"sources": [{**source, "cleaning": cleaning}]},
        "corpus": {"sources": [source], "cleaning": cleaning},
    }
    corpus = Path(build(plain(tmp_path, "", "pairs", rows=rows, **of_place[place]), until="documents"))
    assert report.read(corpus).masked == {"email": 40, "phone": 40}


def test_of_the_section_cleaning_of_the_corpus_pairs_take_only_the_rules():
    pairs = {"format": "pairs", "path": "pairs.tsv"}
    rows = {"packing": "complete_documents", "objective": {"name": "text_to_text"}}
    cleaning = {"profile": "c4", "gopher": True}
    of_pairs = {"sources": [pairs], "rows": rows, "dedup": OFF}
    assert of_corpus([], **of_pairs, cleaning=cleaning).all_steps == {"pairs": []}
    with_rules = of_corpus([], **of_pairs, cleaning={**cleaning, "rules": [{"step": "pii"}]})
    assert with_rules.all_steps == {"pairs": [PersonalData()]}


def test_the_key_of_earlier_corpus_files_is_refused_with_the_rule_unless_it_is_empty():
    assert check({"pii": []}, CleaningConfig, "a.yaml") == CleaningConfig()
    with pytest.raises(UserError, match=r"^a.yaml: pii: gone; rules: \[{step: pii, kinds: \[email, ip, phone\]}\] "):
        check({"pii": ["email"]}, CleaningConfig, "a.yaml")


ALL = ("email", "ip", "phone")


def masked(text: str, *kinds: str) -> str:
    """The text with short placeholders: E, I and P in angle brackets."""
    tally = Tally()
    found = mask(text, kinds or ALL, tally)
    for kind, placeholder in PLACEHOLDERS.items():
        assert found.count(placeholder) == tally.masked_data[kind]
        found = found.replace(placeholder, f"<{kind[0].upper()}>")
    assert tally.examples == {}
    return found


MASKED = [
    # mail addresses
    ("Write to ann@example.org.", "Write to <E>."),
    ("<ann.b+news@mail.example.co.uk>, o'neil@x-y.ie!", "<<E>>, <E>!"),
    ("mailto:ann@example.org?subject=a", "mailto:<E>?subject=a"),
    ("https://a.org/?mail=ann@example.org", "https://a.org/?mail=<E>"),
    ("ann@example.org,bob@example.org", "<E>,<E>"),
    ("müller@x.de, mu\u0308ller@x.de, info@müller.de", "<E>, <E>, <E>"),
    ("Пишите на иван@почта.рф или ivan@xn--80a1acny.xn--p1ai!", "Пишите на <E> или <E>!"),
    ("ΜΑΡΙΑ@παράδειγμα.ελ; अजय@डाटा.भारत; ann@example.org으로", "<E>; <E>; <E>으로"),
    ("请联系ann@example.org或ติดต่อbob@example.org", "请联系<E>或ติดต่อ<E>"),
    ("邮箱：用户@例子.中国。联系info@例子.中国，用户@example.cn给我", "邮箱：<E>。联系<E>，<E>给我"),
    # public addresses
    ("(93.184.216.34:8080), 93.184.216.0/24", "(<I>:8080), <I>/24"),
    ("http://93.184.216.34/a", "http://<I>/a"),
    ("2001:4860:4860::8888, 2a00:1450:4001:81b:0:0:0:200e", "<I>, <I>"),
    (
        "[2606:4700::6810:84e5]:443, ::ffff:93.184.216.34 and 2A00:1450::93.184.216.34/64.",
        "[<I>]:443, ::ffff:<I> and <I>/64.",
    ),
    ("172.15.0.99 and 172.32.0.99", "<I> and <I>"),
    # phone numbers
    ("Call (212) 555-0123 or 212-555-0123, 212.555.0123!", "Call <P> or <P>, <P>!"),
    ("1-212-555-0123 and 1 (212) 555 0123", "<P> and <P>"),
    ("+1 (212) 555-0123, +12125550123", "<P>, <P>"),
    ("+33.1.23.45.67.89; +49 (0)30 12345-67", "<P>; <P>"),
    ("tel:+442079460958", "tel:<P>"),
    ("+47 2222 222, +298 123 456", "<P>, <P>"),  # seven digits, and six after a code of three
    ("(212)-555-0123, 1 (212).555.0123", "<P>, <P>"),
    ("212-555-0123/4 or 212.555.0123/24.", "<P> or <P>."),
]
LEFT = [
    # an at sign alone
    "https://ann:secret@host.org/x and ftp://ann@host.org",
    "https://blog.org/@ann/story by @ann.b",
    "git@code.org:team/project.git",
    "icon@2x.png and lodash@4.17.21",
    "photos/12345@N00/ at a@b or x@y.c",
    "请写信到我们的新的电子邮箱地址用户@例子.中国 用户@例子.中国给我们大家写信吧",  # where it begins is unknown
    # private addresses and versions
    "192.168.1.77 10.200.3.44 172.16.9.99 172.31.9.99 127.0.0.1 169.254.0.44 100.64.0.77 224.0.0.99 255.255.255.0",
    "fe80::1 ::1 fd00::99 2001:db8::99 198.51.100.99 203.0.113.99",
    "version 93.184.21.3, Version: 4.118.20.3 and v93.18.2.3",
    "release 1.2.3.4 of 2.31.0.1, see section 4.3.40.2 and § 12.99.3.1",
    "Browser/90.0.44.212 (Engine/93.18.21.3)",
    "1.93.184.216.34 and 93.184.216.34.5 and 93.184.216.340 and 93.184.216.034",
    "namespace std::vector 2012:10:11",
    # other numbers
    "ISBN 978-0-306-40615-7, ISBN-10 0-306-40615-2 and 978-212-555-0123",
    "2012-10-11, 10/11/2012, 2012.10.11 12:30",
    "GMT +1 2012-10-11 12:00, +02 2012-10-11 and UTC+1 2012",
    "$212.555.0123, 212-555-0123/456 and 212-555-0123/4/5",
    "$ 212.555.0123 or €\u00a0212.555.0123",
    "+39 06 6982, +49 (0)30 1234",  # too short
    "$1,299.00 or 1.299.000,00 or +10,000,000",
    "2125550123 and 212 555 0123 and 555-0123",
    "/item-212-555-0123.html",
    "+33.333333333 and 1+49301234567 and C++17",
    "112-555-0123 and 212-155-0123 and (112) 555-0123",
    # hyphens between other groups of digits
    "(212)--555-0123",
]


@each("text, expected", [*MASKED, *((text, text) for text in LEFT)])
def test_personal_data_is_masked_and_what_only_looks_like_it_is_left(text, expected):
    assert masked(text) == expected


def test_only_the_named_kinds_are_masked():
    text = "ann@example.org 93.184.216.34 212-555-0123"
    assert masked(text, "email") == "<E> 93.184.216.34 212-555-0123"
    assert masked(text, "ip", "phone") == "ann@example.org <I> <P>"
    assert mask(text, [], Tally()) == text


PARTS = [
    *("a@b.org", "@", "93.184.216.34", "2a00::5", "212-555-0123", "+49 30 123456"),
    *("x", ".", "-", "/", "http://", ":", "1", "é"),
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map(", ".join))
def test_masked_text_has_nothing_more_to_mask(text):
    once = mask(text, ALL, Tally())
    assert mask(once, ALL, Tally()) == once


# E.164's country codes, ITU Operational Bulletin 1114 (2016). +1 and +7 have forms of their own.
ASSIGNED = """
20 211-213 216 218 220-258 260-269 27 290 291 297-299 30-34 350-359 36 370-383 385-387 389 39-41 420 421 423 43-49
500-509 51-58 590-599 60-66 670 672-683 685-692 800 808 81 82 84 850 852 853 855 856 86 870 878 880-883 886 90-95
960-968 970-977 979 98 992-996 998
"""


def test_only_assigned_country_codes_begin_a_phone_number():
    spans = [span.partition("-") for span in ASSIGNED.split()]
    assigned = {code for first, _, last in spans for code in range(int(first), int(last or first) + 1)}
    for code in range(200, 1000):
        if code // 100 != 7:
            expected = code in assigned or code // 10 in assigned
            assert (masked(f"+{code} 12 345 6789") == "<P>") == expected, code
