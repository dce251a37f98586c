"""Wikipedia dumps: which pages are articles, damage that is noted rather than lost, ranges of a multistream dump; and
wikitext to plain text: each construct, whole pages, and absurd markup."""

import bz2
import itertools
import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import mwparserfromhell
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.local_store import LocalStore
from data_pipeline.config import SourceConfig
from data_pipeline.sources.record import Input, Range, ReadStats, Record
from data_pipeline.sources.wikipedia import read as read_dump
from data_pipeline.sources.wikipedia import url_title
from data_pipeline.sources.wikipedia_export import index_of, ranges
from data_pipeline.stages.inputs import list_inputs, pieces
from data_pipeline.text.wikitext.markup import plain_text
from data_pipeline.text.wikitext.namespaces import is_redirect
from tests.conftest import SAMPLES
from tests.support.reading import flat, read, read_bytes
from tests.support.tables import each

DATA = Path(__file__).parents[2] / "data" / "wikipedia"
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
    assert flat(stats.counters) == {"read": len(pages), **Counter(counters.split())}


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
    assert flat(stats.counters) == {"read": 3, "not_article": 1}


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
        assert flat(stats.counters) == {"truncated_xml": 1, **{rule: n for rule, n in counted.items() if n}}
        reason = "the XML ends inside this page" if begun > whole else "the XML ends before </mediawiki>"
        assert [note[1] for note in stats.damage] == [reason]
        assert stats.damage[0][0].startswith(f"page {whole}")


BAD = [
    *(b"a \x01 b", b"a \xff b", b"a \xe2\x82 b", b"\xed\xa0\x80", b"&#x1;", b"&nbsp;", b"a <b> c"),
    *(b"a</text></text>", b"<!DOCTYPE a>", b"<![CDATA[ never closed", b"<!-- never closed", bytes(100)),
]


@each("bad", BAD)
def test_reading_goes_on_with_the_page_after_a_bad_one(parse, bad):
    data = export(page("A", "a"), page("B", "BAD"), page("C", "c")).replace(b"BAD", bad)
    kept, stats = parse(data)
    assert [(record.ordinal, record.title) for record in kept] == [(0, "A"), (2, "C")]
    assert flat(stats.counters) == {"read": 3, "damaged": 1}
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
    assert stats.counters.dropped_documents["damaged"]


# --- real dumps


def test_exports_of_schema_0_10_and_of_0_9_that_begins_with_a_comment():
    kept, stats = read("wikipedia", DATA / "enwiki-20171220.xml")
    assert flat(stats.counters) == {"read": 5, "not_article": 1}
    (painting,) = [(record.url, record.language) for record in kept if "Ville" in record.title]
    assert painting == ("https://en.wikipedia.org/wiki/Ville-d%27Avray_(1865_painting)", "en")
    kept, stats = read("wikipedia", DATA / "nlwiki-20140927.xml")
    assert {record.title for record in kept} == {"Anthony Fokker", "Alan Turing"}
    assert flat(stats.counters) == {"read": 3, "redirect": 1}


COUNTED = [{"read": 728, "redirect": 336, "not_article": 1}, {"read": 767, "redirect": 171}]


@each("path, articles, counters", zip(ENWIKI, [391, 596], COUNTED, strict=True))
def test_samples_hold_the_pages_their_licence_note_says(path, articles, counters):
    kept, stats = read("wikipedia", path)
    assert (len(kept), flat(stats.counters), list(stats.damage)) == (articles, counters, [])


# ---- ranges of a multistream dump


@pytest.fixture(scope="module")
def xml() -> bytes:
    """60 pages of the real dump, with its head."""
    pages = bz2.decompress((SAMPLES / "enwiki-20060303-pages-articles1.xml.bz2").read_bytes()).split(b"  <page>")
    return b"  <page>".join([pages[0], *pages[300:360]]) + b"</mediawiki>\n"


@pytest.fixture(scope="module")
def dump(xml, tmp_path_factory) -> Path:
    """A dump as Wikimedia makes it: one stream for the head, one for every 7 pages, one for the end, and the index."""
    head, *pages = re.split(rb"(?=  <page>)", xml.removesuffix(b"</mediawiki>\n"))
    path = tmp_path_factory.mktemp("dump") / "enwiki-multistream.xml.bz2"
    data, index = bz2.compress(head), b""
    for first in range(0, len(pages), 7):
        group = pages[first : first + 7]
        for page in group:
            title, number = re.search(b"<title>(.*)</title>", page)[1], re.search(rb"<id>(\d+)", page)[1]
            index += b"%d:%s:%s\n" % (len(data), number, title)
        data += bz2.compress(b"".join(group))
    path.write_bytes(data + bz2.compress(b"</mediawiki>\n"))
    Path(index_of(str(path))).write_bytes(bz2.compress(index))
    return path


def read_all(inputs: list[Input]) -> tuple[list[Record], Counter, list]:
    stats = ReadStats()
    records = [record for file in inputs for record in read_dump(file, stats)]
    return records, flat(stats.counters), stats.damage


def test_names_of_indexes_are_wikimedias():
    stem = "a/enwiki-x-pages-articles-multistream"
    assert index_of(f"{stem}.xml.bz2") == f"{stem}-index.txt.bz2"
    assert index_of(f"{stem}1.xml-p1p41242.bz2") == f"{stem}-index1.txt-p1p41242.bz2"


def inputs_of(dump: Path, target_bytes: int) -> list[Input]:
    return [Input(str(dump), *cut) for cut in ranges(str(dump), index_of(str(dump)), target_bytes)]


@each("target", [1, 20_000, 100_000, 10**9])
def test_ranges_together_are_the_file(dump, target):
    inputs = inputs_of(dump, target)
    assert inputs[0].start == 0
    assert inputs[-1].stop is None
    assert all(left.stop == right.start for left, right in itertools.pairwise(inputs))
    assert all(file.stop - file.start >= target for file in inputs[:-1])
    whole, counters, _ = read_all([Input(str(dump))])
    assert counters["read"] == 60
    assert len(whole) > 15
    assert read_all(inputs) == (whole, counters, [])


@each("at", [b"</text>", b"</mediawiki>"])
def test_a_dump_cut_off_in_a_page_or_between_pages_is_noted_once(dump, tmp_path, at):
    path, data, inputs = tmp_path / "a.xml.bz2", dump.read_bytes(), inputs_of(dump, 1)
    last = bz2.decompress(data[inputs[-1].start :])
    path.write_bytes(data[: inputs[-1].start] + bz2.compress(last[: last.rindex(at)]))
    whole, counters, damage = read_all([Input(str(path))])
    assert counters["truncated_xml"] == len(damage) == 1
    assert counters["damaged"] == (at == b"</text>")
    cut = read_all([replace(file, path=str(path)) for file in inputs])
    assert cut[:2] == (whole, counters)
    assert [reason for _, reason in cut[2]] == [reason for _, reason in damage]


def test_each_dump_that_is_cut_off_is_counted(dump, tmp_path):
    path, cut = tmp_path / "a.xml", export(page("A", "a"))
    path.write_bytes(cut[: -len("</mediawiki>")])
    _, counters, damage = read_all([Input(str(path))] * 3)
    assert (counters, len(damage)) == ({"read": 3, "truncated_xml": 3}, 3)


def test_a_corrupt_stream_costs_only_its_own_range(dump, tmp_path):
    inputs = inputs_of(dump, 1)
    data = bytearray(dump.read_bytes())
    data[inputs[4].start + 3000] ^= 0xFF
    path = tmp_path / "a.xml.bz2"
    path.write_bytes(data)
    for number, file in enumerate(inputs):
        stats = ReadStats()
        damaged = Input(str(path), file.start, file.stop, file.first_ordinal)
        if number == 4:
            with pytest.raises(DamagedInput, match="corrupt bz2"):
                list(read_dump(damaged, stats))
        else:
            assert list(read_dump(damaged, stats)) == list(read_dump(file, ReadStats()))


def test_a_file_that_is_no_bzip2_is_one_range(xml, dump, tmp_path):
    (tmp_path / "a.xml").write_bytes(xml)
    assert ranges(str(tmp_path / "a.xml"), index_of(str(dump)), 1) == [Range()]


def test_a_large_dump_without_its_index_is_one_piece_and_the_way_out_is_said(dump, tmp_path, capsys):
    for name in ("a-multistream.xml.bz2", "a.xml.bz2"):
        path = shutil.copy(dump, tmp_path / name)
        (file,) = list_inputs(SourceConfig(format="wikipedia", path=str(path))).files
        assert pieces(file, 1000, LocalStore(tmp_path)) == [Range()]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("a-multistream-index.txt.bz2, beside it")
    shutil.copy(index_of(str(dump)), tmp_path / "a-multistream-index.txt.bz2")
    (file,) = list_inputs(SourceConfig(format="wikipedia", path=str(tmp_path / "a-multistream.xml.bz2"))).files
    assert pieces(file, 1000, LocalStore(tmp_path)) == ranges(str(dump), index_of(str(dump)), 1000)


@each(
    "index, message",
    [
        (b"12:1:A\n", "no bzip2 stream begins at its byte 12"),
        (b"999999999:1:A\n", "no bzip2 stream begins at its byte 999999999"),
        (b"not an index\n", "line 1: expected offset:page id:title"),
        (b"", "empty file"),
        (bz2.compress(b""), "is empty: expected offset:page id:title"),
        (b"600:1:A\n500:2:B\n", "line 2: offset 500 comes after 600"),
        (None, "7 pages begin at its byte [0-9]+, not 6"),  # its own index, but for one page
    ],
)
def test_an_index_that_is_not_the_files_is_one_clear_error(dump, tmp_path, index, message):
    path = tmp_path / "index.txt"
    lines = bz2.decompress(Path(index_of(str(dump))).read_bytes()).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]) if index is None else index)
    with pytest.raises(UserError, match=message):
        ranges(str(dump), str(path), 1000)


# ---- wikitext to plain text


CONSTRUCTS = r"""
# links
a [[city]], [[Danube|the river]] and [[house]]s → a city, the river and houses
[[Ulm (city)|]] and [[#Part|below]] → Ulm and below
A[[Category:Foo]]B [[Category:Bar|sort]] → AB
[[Kategorie:Ort]][[Catégorie:Lieu]][[Categoría:X]][[Категория:Y]][[Category : Z]]A → A
A\n\n[[de:Ulm]]\n[[zh-min-nan:Ulm]]\n[[simple:Ulm]] → A
see [[:Category:A]], [[:File:B.jpg]] and [[:de:Ulm|Ulm]] → see Category:A, File:B.jpg and Ulm
the word [[wikt:house]] → the word house
[[Alien: Covenant]] → Alien: Covenant
[[Imagine: John Lennon]] → Imagine: John Lennon
# files
A[[File:B.jpg|thumb|A [[caption|long]] one with [http://a.org a link]]] C → A C
A[[Datei:B.jpg]][[Fichier:B.jpg|x]][[Immagine:B.png]][[Bestand:B.svg|[[a]]]][[Файл:B.jpg]][[ファイル:B.jpg]] → A
A [[Unknown:B.JPG|thumb|caption]]B → A B
# external links
[http://a.org the label], [http://a.org]; [//b.org a [sic] label] → the label, ; a [sic] label
https://a.org → https://a.org
# templates
it {{convert|5|km|mi}} text → it 5 km text
{{convert|2|to|3|m2|sqft|abbr=on}}; {{cvt|6|ft|2|in|m}}; {{convert|20|C}} → 2 to 3 m²; 6 ft 2 in; 20 °C
{{lang|fr|mot juste}}, {{lang-de|''Wort''}}, {{nowrap|10 {{abbr|km|kilometre}}}} → mot juste, Wort, 10 km
a{{snd}}b {{circa|1900}} {{frac|1|2}} {{formatnum:1234}} → a – b c. 1900 1/2 1234
2{{frac|1|2}} in, 3{{sfrac|4}}, {{convert|5{{fraction|1|2}}|mi}}, a{{frac|2|3}} → 2 1/2 in, 3 1/4, 5 1/2 mi, a2/3
{{Infobox|a={{b|c={{d}}}}\n|e=[[f]]\n}}\n'''A''' is{{cn}} here {{x}}. → A is here.
Ulm ({{IPAc-en|a}}; born 1900 {{x}}) is ({{x}}) big {{y}}, yes → Ulm (born 1900) is big, yes
{{{1|default}}}A → A
# unknown templates with one argument are text in the middle of a sentence
È stata {{chiarire|la prima}} opera, di {{M|23.1|u=°C}} e {{TA|25 990}} abitanti.
    → È stata la prima opera, di 23.1 °C e 25 990 abitanti.
dell'{{cn|unico}} duca, nel {{Numero|1900}}. → dell'unico duca, nel 1900.
{{vol-xx|Vom}} was ''{{IAST|Aşoka}}'' ({{IPA2|&aelig;}}), base-{{num|16}}&nbsp;{{x|k}}. → Vom was Aşoka (æ), base-16 k.
the ''{{a|b}}'' is 1, ''{{a|c}}'' is 2 and {{a|{{c|[[d|e]]}}}}s, {{a|1=f}}. → the b is 1, c is 2 and es, f.
a {{val|5|ul=km}} road → a 5 km road
# {{=}} stands for an equals sign that divides no argument
with {{nowrap|n {{=}} 5}}, {{nowrap|1 {{=}} 2}} and {{lang|en|p {{=}} 0.05}}, a {{=}} b
    → with n = 5, 1 = 2 and p = 0.05, a = b
# so is the first of several that reads as prose: no code, file or identifier, and a number with its unit
l'ha {{chiarire|scritta|quando?}} con la {{NazNB|CA|ITA}} e {{nihongo||東京|Tōkyō}} ({{link|de|Ziel}})
    → l'ha scritta con la ITA e Tōkyō (Ziel)
da {{M|10||km}}, {{M|10|k|m}}, {{M|4|-|6|ul=m²}} a {{M|1,5|e=6|u=km}}, {{M|5|+-|2|Pa}} o {{M|3|a|4|m}} e
    → da 10 km, 10 km, 4–6 m² a 1,5×10^6 km, 5 ± 2 Pa o 3 a 4 m e
di 30 m{{exp|3}} per {{Exp|4,2|5}} kg; scritto in {{TeX}} e {{LaTeX}}.
    → di 30 m^3 per 4,2×10^5 kg; scritto in TeX e LaTeX.
del {{ITA}}, alta 600 {{m s.l.m.}}, nell'anno {{CURRENTYEAR}}. → del ITA, alta 600 m s.l.m., nell'anno 2013.
is at {{coor dms|48|52|25.5|N|2|17|41.5|E|type:x}}, {{Coord|13|N|105.5|W}} and {{coord|1.5|-2}} too
    → is at 48°52′25.5″N 2°17′41.5″E, 13°N 105.5°W and too
born {{OldStyleDate|31 March|1727|20 March}} in {{verse||Isaiah|14:9-17|NIV}}, a
    → born 31 March 1727 in Isaiah 14:9-17, a
in {{x|A.jpg|20}} or {{x|IV2|2EE}} or {{x|26|2035}} or {{x|8|&minus;20}} or {{x|n=a}} or {{puppet}} so
    → in or or or or or so
A {{sfn|Smith|2005}} and {{ref|a|b}} is{{x|a|b}} c. {{x|a|b}} D → A and is c. D
# ... elsewhere, or by their names, they are notes, pictures and boxes
So it is {{ref|N2}}. A{{x|7}} b. {{x|8}}\n* {{flagicon|Austria}} Vienna\n{{Portale|musica}}\n{{x|B}}
    → So it is. A b.\nVienna
at {{coord|40 N}} and {{x|A.jpg}} or {{x|a_1}} so {{x|http://a}} or {{x|QB1}} but {{x|y|z}}, {{x|}} a
    → at and or so or but, a
{{x|a}}== A == {{x|b}}\nb\n{{x|a}} {{x|b}}* c {{x|d}}{{x|e}}\n== D =={{x|e}} → A\nb\nc
{{Box\n|a}} and {{x|b\nc}} d → and d
# one begins where another does
x {{{{a}}|b}} y {{{{{{c}}}}}} z → x b y z
# the text of a template may have a name; so may that of a quotation, in any language
The {{lang|code=la|text=vici}} {{langue|fr|texte=mot}} {{ill|A|de|B|lt=label}} {{ill|de|C}} {{lang|fr|2=b}} is
    → The vici mot label C b is
{{lien|langue=en|trad=A|fr=B}} {{tsl|en|A|甲}} {{link-en|甲|A}} {{transl|ar|DIN|qalam}} is {{x|de|text=y}} z
    → B 甲 甲 qalam is y z
A ({{zh|s=汉|t=漢|p=hàn|links=no}}), {{lang-zh|c=塔}} → A (汉, 漢, hàn), 塔
{{as of|2010|lc=y}}, {{As of|2010|5|12}}; {{as of|2010|5|12|df=US|lc=y|post=,}} {{as of|2010|since=y}}
    → as of 2010, As of 12 May 2010; as of May 12, 2010, Since 2010
{{sortname|John|Smith}} ({{height|ft=6|in=1}}) {{flag|GBR|name=Britain}} {{start date|2010|05|12}} {{as of|2010|alt=a}}
    → John Smith (6 ft 1 in) Britain 12 May 2010 a
A {{citation needed span|text=passage|date=May}} and {{vanchor|a|text=b}} by {{nihongo|1=Tower|2=塔}}.
    → A passage and b by Tower.
{{quote|text=A|author=B}}{{cquote|quote=C}}{{rquote|left|D|B}}{{quote box\n|quote=E\n|author=B\n}}{{Quote|\ntext=F}}
    → A\n\nC\n\nD\n\nE\n\nF
{{Zitat|Text=A|Autor=B}}{{Zitat-en|Text=C}} {{"|Text=D}} {{"-fr|E}} {{Citation bloc|texte=F}} → A\n\nC\n"D" "E"\nF
{{Cita|texto=A|autor=B}}{{Citazione|testo=C}}{{Citaat|tekst=D}}{{Cytat|treść=E}}{{Citação|texto=F}}
    → A\n\nC\n\nD\n\nE\n\nF
{{Цитата|текст=А|автор=Б}}{{Citat|text=C}}{{Lainaus|teksti=D}}{{Alıntı|metin=E}}{{引文|内容=甲}}
    → А\n\nC\n\nD\n\nE\n\n甲
{{Idézet|szó=Ez az.|szerző=B}}{{Caja de cita|cita=A}}{{Citát 2|obsah=B}} → Ez az.\n\nA\n\nB
{{인용문 상자|내용=가}} → 가
Il dit {{citation|oui|auteur=B}} et {{citation étrangère|langue=en|yes}}. → Il dit « oui » et « yes ».
Ce {{citation nécessaire|fait|date=mai}} et {{citation needed|reason=B}} ici. → Ce fait et ici.
A {{Publicitat|text=B}} {{cite quote|quote=C}} {{Internetquelle|zitat=C}} {{cita web|cita=C}} {{quote request|for=C}} c
    → A B c
# the page's own name
'''{{PAGENAME}}''' is {{NOMEPAGINA}}, {{lc:{{PAGENAME}}}} → Ulm is Ulm, ulm
# tables and tags
A\n{| class=x\n|-\n| a || {{b|c|}}\n{|\n| nested\n|}\n|}\nB → A\n\nB
A\n:{|\n! a\n|}\nB → A\n\nB
A<table border=1><tr><td>x<table><tr><td>y</table></table>B → A\nB
A<br/>B<BR>C → A\nB\nC
H<sub>2</sub>O, 10<sup>6</sup>, 1<sup>st</sup> → H2O, 10^6, 1st
x<sub>1</sub><sup>2</sup>, ''m''<sup>2</sup>, &pi;<sup>2</sup>, 10<SUP class=x> 7</SUP>, 10<small><sup>6</sup></small>
    → x1^2, m^2, π^2, 10^7, 10^6
10{{sup|&minus;6}}, {{mvar|x}}{{sub|1}}{{sup|2}}, SO{{su|b=4|p=2-}}, {{chem|SO|4|2-}}, 10<sup>{{nowrap|6}}</sup>
    → 10^−6, x1^2, SO4^2-, SO4^2-, 10^6
2<sup>''a''</sup>, 2<sup>n</sup>, 2<sup>n+1</sup>, 2<sup>a</sup>, 10<sup>−n</sup>, 101<sub>2</sub>
    → 2^a, 2^n, 2^n+1, 2a, 10^−n, 101_2
[[m]]<sup>2</sup>, Na<sup>+</sup>, 1{{sup|st}} → m^2, Na+, 1st
<sup>14</sup>C ''T''<sub>''p''</sub>''M'' and [[A|<sup>2</sup>H]]\n*<sup>*</sup> a → 14C TpM and 2H\na
A<ref>B</ref><ref name="x" /><ref name=y>[[C]] {{d}}</ref>. → A.
A<math>\begin{x}</math><gallery>\nFile:a.jpg|b\n</gallery><timeline>x</timeline><!-- c\n\n-->B → AB
if a < b and <b>c</b> > d, <foo> → if a < b and c > d, <foo>
<nowiki>[[a]] '''b''' {{c}}</nowiki>\n<nowiki>*</nowiki> d → [[a]] '''b''' {{c}}\n* d
<nowiki>&nbsp;*&eacute;&</nowiki>a → *é&a
# formulas
where <math>E = mc^2</math> is → where E = mc^2 is
<math>\alpha_{1} \le \frac{a}{b+1}</math>, <math>\sqrt{x}</math> → α_1 ≤ a/(b+1), √x
A<math>\begin{matrix} a & b \end{matrix}</math>B <math>\hat{x}</math> → AB
<chem>H2O</chem>, <ce>CO2</ce>, <math>|x| = '''y</math> → H2O, CO2, |x| = '''y
# parser functions
{{#if: {{{a|}}} | yes | no }} {{#if:x|yes}} {{#ifeq:a|a|1|2}}{{#ifeq:a|b|1}} → no yes 1
{{#switch: b | a = 1 | b | c = 2 | 3 }} {{#switch:z|a=1|#default=3}} {{lc:ABC}} {{plural:2|cat|cats}} → 2 3 abc cats
# variants
-{zh-hans:计算机;zh-hant:電腦}-是-{A|zh-cn:软件; zh-tw:軟體}- → 计算机是软件
-{名}- -{R|abc}- -{H|zh-cn:a;zh-tw:b}--{T|zh:a}- -{zh-tw:[[甲]]}- → 名 abc 甲
-{a=>zh-cn:b;c=>zh-tw:d}- --{{x}}-- -{ → b ---- -{
-{zh-hans:{{lang|en|soft}}件;zh-hant:{{lang|en|soft}}體}- -{zh-hans:a-{b}-c;zh-hant:d}- → soft件 abc
-{zh-cn:A&amp;B;zh-tw:C}- -{A|zh-cn:{{x|y}};zh-tw:z}-{{lang|zh|-{zh-cn:a;zh-tw:b}-}} -{zh:{{lang|en|x}}}-
    → A&B ya x
{a}-{b}- and -{ a\n\nb }- c -{zh:[[甲]] → {a}-{b}- and a\n\nb c -{zh:甲
# templates of other languages
{{langue|fr|mot}} {{unité|5|km}} {{нп5|А|Б|en|C}} {{仮リンク|日本|en|Japan}} {{Cytat|słowo}} → mot 5 km Б 日本\nsłowo
# text
''[[Le Monde|''Le Monde'']]'' a → Le Monde a
__notoc__ a __INHALTSVERZEICHNIS__ __目录__ __ללא_תוכן_עניינים__ __init__ → a __init__
__NOTOC__\nA __FORCETOC__B → A B
'''''A''''' ''b'' '''c''' → A b c
L'''Iliade'' d'Homère et '''autres''' → L'Iliade d'Homère et autres
1&nbsp;km &ndash; &eacute;&#233;&#xE9; AT&T &amp;lt; &copy → 1 km – ééé AT&T &lt; &copy
&notanentity; &ampfoo; &AMP; &rarr;&CounterClockwiseContourIntegral; a&רלמ;b → &notanentity; &ampfoo; & →∳ ab
* a\n** b\n# c\n: d\n; e : f → a\nb\nc\nd\ne : f
# sections
A\n== B ==\n\n=== C ===\n\n== D ==\nd\n== References ==\n{{Reflist}}\n==See also==\n==External links== → A\n\nD\nd
== A ==\n=== B ===\nb\n== '''C''' <!-- x --> ==\n[[Category:D]] → A\nB\nb
# unclosed markup
A [[b|c\n\nD → A b|c\n\nD
A {{b|c\nD → A\nD
A\n{| class=x\n|-\n| a\n! b || c\nD → A\n\nD
A <ref>b\n\nC → A b\n\nC
A <!-- b\n\nC → A
A}} ]] b\n|}\nC → A b\nC
"""
ODD = [
    ("A [[\u200eFile:B|thumb|caption]][[Unknown:B.jpg\u200e|thumb]] [[\u200ede:Ziel]]B", "A B"),
    ("a\u00a0b  c\t d", "a b c d"),
    ("A\n\n\n\n----\n\n\nB\r\nC", "A\n\nB\nC"),
    ("", ""),
]


LINES = CONSTRUCTS.replace("\n    →", " →").strip().split("\n")
CASES = [line.replace("\\n", "\n").split(" → ") for line in LINES if not line.startswith("# ")]


@each("wikitext, text", [*CASES, *ODD])
def test_construct(wikitext, text):
    assert plain_text(wikitext, title="Ulm", timestamp="2013-03-24T03:38:10Z") == text


def test_templates_that_leave_a_hole_are_counted():
    """In the middle of a sentence, not in brackets that go with them; notes leave none."""
    wikitext = (
        "It is in {{Usc|26|2035}} and {{usc|26|2036}} (see {{oeis|id=A1}}) by {{#expr:1+1}} of {{lang|fr|}}, at "
        "{{CURRENTYEAR}}. {{box|x}} The {{fact}} end ({{x}}) is {{ref|1}} near{{y}} [[A|{{z}}]] {{nowrap|{{u}}}}.\n"
        "{{Box}}\n* {{flag2|x}}: text {{w|a}}\n{{v\n|a}} {{#if:|x}} b {{#if:|x}} c {{main|A}}"
    )
    holes = Counter()
    plain_text(wikitext, holes=holes)
    assert holes == {"usc": 2, "oeis": 1, "#expr": 1, "lang": 1, "currentyear": 1, "nowrap": 1}


@each(
    "wikitext, text",
    [
        ("He said: {{x|by=B}} and left.", "He said: and left."),
        ("He said:{{x|by=B}} and left.", "He said: and left."),
        ("He said: {{x\n|words=To be\n|by=B\n}} and left.", "He said: and left."),
        ("He said: {{x|by=" + "B" * 2000 + "}} and left.", "He said: and left."),
        ("He said: {{x|by=B}}", "He said:"),
        ("* He said:{{x|by=B}}\nand left.", "He said:\nand left."),
        ("他说：{{x|by=B}}和", "他说：和"),
        ("He said {{x|by=B}}… then", "He said … then"),
    ],
)
def test_a_hole_is_counted_where_a_clause_ends(wikitext, text):
    holes = Counter()
    assert plain_text(wikitext, holes=holes) == text
    assert holes == {"x": 1}


def test_boxes_and_notes_at_the_end_of_a_clause_leave_no_hole():
    holes = Counter()
    wikitext = (
        "A:{{ref|1}}\nB may be: {{wiktionary|b}}\n== C: ==\n{{Box\n|a=b}}\nd:\n"
        "{{cite web\n|url=a}} and {{cite web\n|url=a}} e {{citation|last=A|title=B}} f"
    )
    assert plain_text(wikitext, holes=holes) == "A:\nB may be:\nC:\n\nd:\nand e f"
    assert holes == {}


def test_pages_of_quotations_superscripts_and_variants():
    """Quotations and words in templates with named arguments; superscripts; variants with markup inside."""
    assert plain_text(QUOTATIONS) == (
        "The first sentence.\n\nKnowledge is power.\n\nHe said:\nTo be, or not.\n\nThird quotation.\n\n"
        "The Latin vici ends it."
    )
    assert plain_text(POWERS) == (
        "About 10^6 cells and 10^7 cells.\nThe square x1^2 and m^2 and 10^6.\nPlain 10^6 works."
    )
    assert plain_text(VARIANTS) == (
        "The game (Electronic games) is a 计算机 program.\nsoft件 has a template, and abc nests."
    )


QUOTATIONS = """The first sentence.
{{Quote
|text=Knowledge is power.
|author=A. Writer
|source=Essays
}}
He said: {{blockquote|text=To be, or not.|author=B}}
{{cquote|quote=Third quotation.}}
The Latin {{lang|code=la|text=vici}} ends it.
"""
POWERS = """About 10{{sup|6}} cells and 10<sup class="x">7</sup> cells.
The square x<sub>1</sub><sup>2</sup> and ''m''<sup>2</sup> and 10<small><sup>6</sup></small>.
Plain 10<sup>6</sup> works.
"""
VARIANTS = """The game (-{Electronic games}-) is a -{zh-hans:计算机;zh-hant:電腦}- program.
-{zh-hans:{{lang|en|soft}}件;zh-hant:{{lang|en|soft}}體}- has a template, and -{zh-hans:a-{b}-c;zh-hant:d}- nests.
"""


def test_files_are_in_the_namespaces_of_their_wiki():
    wikitext = "A [[Lakaw\u200e : B|thumb|caption]] [[:Lakaw:C]] and [[Lakaw]]"
    assert plain_text(wikitext, hidden_namespaces=frozenset({"lakaw"})) == "A Lakaw:C and Lakaw"


def test_paragraphs_agree_with_a_full_parser():
    """On long paragraphs, the result equals mwparserfromhell's.

    References are removed first, since mwparserfromhell keeps them. Its captions, lists and the gaps that templates
    leave are not compared.
    """
    ours, theirs = set(), []
    for record in read("wikipedia", DATA / "enwiki-20171220.xml")[0]:
        wikitext = re.sub(r"<ref[^<>]*/>|<ref.*?</ref>", "", record.text, flags=re.DOTALL)
        ours |= set(plain_text(wikitext).split("\n"))
        text = mwparserfromhell.parse(wikitext).strip_code().replace("\u00a0", " ")
        theirs += [re.sub(" +", " ", line).strip() for line in text.split("\n")]
    prose = [line for line in theirs if len(line) > 200 and not re.search(r"\||\( |^(thumb|left|right)", line)]
    assert len(prose) > 20
    assert [line for line in prose if line not in ours] == []


_MARKS = """
[[ ]] {{ }} {| |} { } ] ( ) | = == * : ; ''' '' <ref> </ref> <ref/> <!-- --> <nowiki> </nowiki> <table> </table> <br>
<sup>1 {{x| {{!}} {{nowrap| {{x|a{{!}}b}} [http://a &# &#1; &#xD800; &amp; File: de: convert| 1| to| lang| __A__ -{ }- a
é -{A|zh-cn: ;zh-tw: <sup>''n'' <sub>1 2 {{sup|n {{su|p=1|b= {{quote|text= {{as of|2010| alt=
{{x|label= : &notin; <math> </math> \\frac{ {{#if: {{#switch:a|
"""
_FRAGMENTS = [*_MARKS.split(), "\n", " ", "\x00"]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(_FRAGMENTS), max_size=40).map("".join) | st.text())
def test_any_markup_gives_tidy_text(wikitext):
    text = plain_text(wikitext)
    assert text == text.strip("\n")
    assert "\n\n\n" not in text
    assert not re.search("[\x01-\x06]", text)
    text.encode()


_UNCLOSED = """
{{ [[ }} ]] [[a| {{a| {{lang|fr| {{convert|1| [[File:a|[[b]] {{a|b}} <!-- <ref> <nowiki> <table> ( &#1 __A_ = * -{ -{a
-{A|zh: -{zh:{{a| -{;;a= ;;zh: <sup> <sup>n-1 ''<sub>'' {{quote|a=. {{quote|......=
a:{{b}} <math> <math>{ {{#if: {{#switch:a|b &a '''
"""
_LONG = ["{{" + "1" * 900 + "|1}}", "c {{a|" + "1" * 900 + "|b}} ", "c {{a|" + "1|" * 400 + "N}} "]
_SPACED = ["\n{|", "\n |}", "\n {", "c {{a|b}}", "<ref ", "[http://a ", "( ,", "\n=", "\t", "\n"]
_PAIRS = [("{{a|", "}}"), ("[[a|", "]]"), ("\n{|\n", "\n|}"), ("{{lang|fr|", "}}")]
_UNITS = [*_UNCLOSED.split(), *_LONG, *_SPACED]
_PAGES = [*(unit * (1_000_000 // len(unit)) for unit in _UNITS), *(a * 100_000 + b * 100_000 for a, b in _PAIRS)]
_ENDLESS = [  # a run of one character inside markup
    *(f"[http://{'a' * 1_000_000}", f"-{{{'a' * 1_000_000};b=>c}}-", f"[[a{' ' * 1_000_000}|]]"),
    "{{convert|5|to|" + "1" * 1_000_000 + "x|km}}",
]


@pytest.mark.timing
@each("wikitext", [*_PAGES, *_ENDLESS])
def test_time_is_linear_in_the_length_of_the_page_and_in_depth(wikitext):
    """A megabyte of unclosed markup takes well under a second; quadratic time would be minutes."""
    start = time.process_time()
    plain_text(wikitext)
    assert time.process_time() - start < 5
