"""Wikipedia dumps: which pages are articles, which are dropped, and damage that is noted rather than lost."""

import bz2
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from data_pipeline.cleaning.wikitext.namespaces import is_redirect
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources.wikipedia import url_title
from tests.conftest import SAMPLES
from tests.data_pipeline.reading import read, read_bytes
from tests.tables import each

DATA = Path(__file__).parents[1] / "data" / "wikipedia"
ENWIKI = [SAMPLES / f"enwiki-20060303-pages-articles{part}.xml.bz2" for part in (1, 2)]

SITEINFO = """<siteinfo><base>https://it.wikipedia.org/wiki/Pagina_principale</base><namespaces>
<namespace key="0" /><namespace key="1">Discussione</namespace><namespace key="14">Categoria</namespace>
<namespace key="5">Discussioni Wikipedia</namespace></namespaces></siteinfo>"""


def page(title: str, text: str, extra: str = "", revision: str = "") -> str:
    return f"<page><title>{title}</title>{extra}<revision>{revision}<text>{text}</text></revision></page>"


def export(*pages: str, siteinfo: str = SITEINFO) -> bytes:
    return f"<mediawiki>{siteinfo}{''.join(pages)}</mediawiki>".encode()


@pytest.fixture
def parse(tmp_path):
    return partial(read_bytes, "wikipedia", tmp_path / "a.xml")


# --- which pages are articles


NAMES = ["Categoria:A", "discussioni_wikipedia:B", "DISCUSSIONE:C", "Alien: Covenant", "Categorie:D", "E"]
MAIN = "<ns>0</ns>"
MODELS = [page(model, "a = 1", MAIN, f"<model>{model}</model>") for model in ("Scribunto", "wikitext")]
EMPTY = page("A", "").replace("<text></text>", "<text deleted='deleted' />")


@each(
    "pages, kept, counters",
    [
        # a namespace element decides where there is one
        ([page("Categoria: A", "A", MAIN), page("B", "B", "<ns>1</ns>")], {0: "Categoria: A"}, "not_article"),
        # otherwise a prefix that <siteinfo> lists, in any case, with underscores or spaces; others belong to the title
        ([page(name, "text") for name in NAMES], {3: "Alien: Covenant", 4: "Categorie:D", 5: "E"}, 3 * "not_article "),
        ([page("A", "#ANYTHING", '<redirect title="B" />'), page("B", "\n#redirect [[C]]")], {}, 2 * "redirect "),
        ([page("C", "#RINVIA[[D]]"), page("D", "The #REDIRECT of [[a page]]")], {1: "D"}, "redirect"),
        (MODELS, {1: "wikitext"}, "not_article"),
        ([page("A", " \n ", MAIN), EMPTY], {}, 2 * "empty "),
    ],
)
def test_articles_are_kept_and_other_pages_counted(parse, pages, kept, counters):
    found, stats = parse(export(*pages))
    assert {record.ordinal: record.title for record in found} == kept
    assert stats.counters == {"read": len(pages), **Counter(counters.split())}


REDIRECTS = [
    *("#REDIRECT [[A]]", "#redirect: [[A]] {{R from move}}", "  #Redirect[[A|b]]\n\nand more text " * 200),
    *("#WEITERLEITUNG [[A]]", "#ПЕРЕНАПРАВЛЕНИЕ [[А]]", "#перенапр [[А]]", "#重定向 [[甲]]", "＃転送 [[甲]]"),
    *("#تحويل [[ا]]", "#تغییر مسیر [[ا]]", "#הפניה [[א]]", "#ÁTIRÁNYÍTÁS [[A]]", "#YÖNLENDİRME [[A]]"),
    *("#पुनर्निर्देशन [[अ]]", "#넘겨주기 [[가]]", "#เปลี่ยนทาง [[ก]]", "#đổi [[A]]", "#Unheardof [[A]]\n[[Category:B]]"),
]
LISTS = ["A #REDIRECT [[A]]", "#REDIRECT", "# [[A]]\n# [[B]]", "#One [[A]]\n#Two [[B]]", "#See [[A]] for more", ""]


@each("wikitext, expected", [*((text, True) for text in REDIRECTS), *((text, False) for text in LISTS)])
def test_a_redirect_is_known_in_any_language_and_a_list_is_none(wikitext, expected):
    assert is_redirect(wikitext) is expected


def test_the_last_revision_counts_and_only_its_main_slot(parse):
    revisions = (
        "<page><title>A</title><ns>0</ns><revision><id>1</id><timestamp>2001-01-01T00:00:00Z</timestamp><text>old</text>"
        "</revision><revision><timestamp>2002-01-01T00:00:00Z</timestamp><text>new</text>"
        "<content><role>other</role><model>json</model><text>{}</text></content></revision></page>"
        "<page><title>B</title><ns>0</ns><revision><content><role>main</role><model>wikitext</model><text>b</text>"
        "</content></revision></page>"
    )
    kept, _ = parse(export(revisions))
    assert [(record.text, record.timestamp) for record in kept] == [("new", "2002-01-01T00:00:00Z"), ("b", "")]


def test_addresses_are_written_as_wikipedia_writes_them(parse):
    kept, _ = parse(export(page("Cos'è l'&quot;IA&quot; (2?) A/B &amp; C", "text")))
    assert kept[0].url == "https://it.wikipedia.org/wiki/Cos%27%C3%A8_l%27%22IA%22_(2%3F)_A/B_%26_C"
    assert url_title("Who's (on) A/B: 1,2!") == "Who%27s_(on)_A/B:_1,2!"


def test_the_wikis_names_of_files_and_categories_are_told(parse):
    """They are found by their namespace numbers: Media is -2, File 6, Category 14."""
    names = {-2: "Sonido", 6: "Lakaw_Lakaw", 7: "Talk", 14: "\u200eKlase"}
    siteinfo = "".join(f'<namespace key="{key}">{name}</namespace>' for key, name in names.items())
    siteinfo = f"<siteinfo><namespaces>{siteinfo}</namespaces></siteinfo>"
    [record], _ = parse(export(page("Klase: A", "a"), page("B", "b"), siteinfo=siteinfo))
    assert record.hidden_namespaces == {"sonido", "lakaw lakaw", "klase"}


def test_language_is_the_exports_and_without_siteinfo_there_is_no_address_and_english_namespaces_hold(parse):
    kept, _ = parse(export(page("A", "a")).replace(b"<mediawiki>", b'<mediawiki version="0.11" xml:lang="it">'))
    assert kept[0].language == "it"
    kept, _ = parse(export(page("Category:A", "a"), page("B", "b"), siteinfo=""))
    assert [(record.title, record.url) for record in kept] == [("B", "")]


def test_a_byte_order_mark_before_the_declaration(parse):
    kept, stats = parse(b'\xef\xbb\xbf<?xml version="1.0" encoding="UTF-8"?>\n' + export(page("À", "Größe &lt; 1")))
    assert [(record.title, record.text) for record in kept] == [("À", "Größe < 1")]
    assert not stats.damage


def test_concatenated_exports_are_read_one_after_the_other(parse):
    other = SITEINFO.replace("//it.", "//fr.").replace("Categoria", "Catégorie")
    first, second = export(page("Catégorie:A", "a")), export(page("Catégorie:A", "a"), page("B", "b"), siteinfo=other)
    kept, stats = parse(first + b'\n<?xml version="1.0"?>\n' + second)
    assert [(record.ordinal, record.url) for record in kept] == [
        (0, "https://it.wikipedia.org/wiki/Cat%C3%A9gorie:A"),
        (2, "https://fr.wikipedia.org/wiki/B"),
    ]
    assert stats.counters == {"read": 3, "not_article": 1}


# --- damage


def test_a_cut_at_any_byte_of_the_xml_is_never_silent(parse):
    data = export(page("A", "a"), page("À", "à &amp; b", "<ns>0</ns>"))
    ends = [match.end() for match in re.finditer(b"</page>", data)]
    for length in range(data.index(b"<siteinfo>"), len(data)):
        kept, stats = parse(data[:length])
        whole = sum(end <= length for end in ends)
        begun = len(re.findall(rb"<page[\s>]", data[:length]))
        assert len(kept) == whole
        counted = {"read": begun, "damaged": begun - whole}  # the missing end of the export isn't a page
        assert stats.counters == {"truncated_xml": 1, **{rule: n for rule, n in counted.items() if n}}
        reason = "the XML ends inside this page" if begun > whole else "the XML ends before </mediawiki>"
        assert [note[1] for note in stats.damage] == [reason]
        assert stats.damage[0][0].startswith(f"page {whole}")


BAD = [
    *(b"a \x01 b", b"a \xff b", b"a \xe2\x82 b", b"\xed\xa0\x80", b"&#x1;", b"&nbsp;", b"a <b> c"),
    *(b"a</text></text>", b"<!DOCTYPE a>", b"<![CDATA[ never closed", b"<!-- never closed", bytes(100)),
]


@each("bad", BAD)
def test_after_a_bad_page_reading_goes_on_with_the_next(parse, bad):
    data = export(page("A", "a"), page("B", "BAD"), page("C", "c")).replace(b"BAD", bad)
    kept, stats = parse(data)
    assert [(record.ordinal, record.title) for record in kept] == [(0, "A"), (2, "C")]
    assert stats.counters == {"read": 3, "damaged": 1}
    position, reason = stats.damage[0]
    assert position == f"page 1, byte {data.index(b'<page><title>B')} of the XML"
    assert reason.startswith("not well-formed XML")


@each("data", [export(), b"<mediawiki/>", b"<mediawiki>\n</mediawiki>\n", export() + export()])
def test_an_export_may_be_empty(parse, data):
    kept, stats = parse(data)
    assert (kept, list(stats.damage)) == ([], [])


def test_a_page_without_its_end_and_bytes_between_pages(parse):
    lost_end = page("B", "b").removesuffix("</page>")
    kept, stats = parse(export(page("A", "a"), lost_end, page("C", "c"), "junk", page("D", "d"), "<page></page>"))
    assert [(record.ordinal, record.title) for record in kept] == [(0, "A"), (2, "C"), (3, "D")]
    assert [reason for _, reason in stats.damage] == [
        "the next page begins before this one ends",
        "bytes between two pages that are no part of a MediaWiki export",
        "a page without a title",
    ]


@each(
    "data",
    [
        b"<html><body></body></html>",
        b"not XML",
        b" ",
        b"<page><title>A</title></page>",
        b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><mediawiki>&b;</mediawiki>',
        b"<mediawiki><siteinfo>\xff</siteinfo></mediawiki>",
        b'<?xml version="1.0" encoding="windows-1252"?>' + export(page("A", "a")),
        export(page("A", "a")).decode().encode("utf-16"),
    ],
)
def test_anything_but_a_mediawiki_export_is_damage(parse, data):
    with pytest.raises(DamagedInput, match="iconv" if b"1252" in data or b"\0" in data else "XML"):
        parse(data)


@pytest.mark.timing
@each("unit", [b"<page", b"<page>", b"</page>", b"<", b"<a>", b"<mediawiki>", b"x", b"<page><title>", b"&"])
def test_time_is_linear_whatever_the_xml(parse, unit):
    data = b"<mediawiki><page><title>A</title><revision><text>" + unit * (1_000_000 // len(unit))
    start = time.process_time()
    _, stats = parse(data)
    assert time.process_time() - start < 5
    assert stats.counters["damaged"]


# --- real dumps


def test_exports_of_schema_0_10_and_of_0_9_that_begins_with_a_comment():
    kept, stats = read("wikipedia", DATA / "enwiki-20171220.xml")
    assert stats.counters == {"read": 5, "not_article": 1}
    (painting,) = [(record.url, record.language) for record in kept if "Ville" in record.title]
    assert painting == ("https://en.wikipedia.org/wiki/Ville-d%27Avray_(1865_painting)", "en")
    kept, stats = read("wikipedia", DATA / "nlwiki-20140927.xml")
    assert {record.title for record in kept} == {"Anthony Fokker", "Alan Turing"}
    assert stats.counters == {"read": 3, "redirect": 1}


@each("path, pages", zip(ENWIKI, [728, 767], strict=True))
def test_samples_hold_the_pages_their_licence_note_says(path, pages):
    xml = bz2.decompress(path.read_bytes()).decode()
    kept, stats = read("wikipedia", path)
    names = re.findall("<title>(.*?)</title>", xml)
    namespaces = tuple(f"{name}:" for name in re.findall('<namespace key="(?!0")[^"]*">(.*?)</namespace>', xml))
    articles = [not name.startswith(namespaces) for name in names]
    redirects = [bool(re.match("(?i)#redirect", text)) for text in re.findall('<text xml:space="preserve">(.*)', xml)]
    counters = stats.counters
    assert counters["read"] == len(names) == len(redirects) == pages
    assert counters["not_article"] == articles.count(False)
    assert counters["redirect"] == sum(map(bool.__and__, articles, redirects))
    assert len(kept) == counters["read"] - counters["not_article"] - counters["redirect"]
    assert not stats.damage
