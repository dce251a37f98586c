"""Readers: what they keep, count and refuse. Expected numbers are counted in the files' own text by other means."""

import bz2
import gzip
import io
import json
import pickle
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from data_pipeline.errors import DamagedInput, UserError
from data_pipeline.sources import READERS, Record
from data_pipeline.sources.stream import open_stream
from data_pipeline.sources.wikipedia import url_title

SAMPLES = Path(str(files("data_pipeline"))) / "samples"
DATA = Path(__file__).parents[1] / "data" / "wikipedia"
ENWIKI = [SAMPLES / f"enwiki-20060303-pages-articles{part}.xml.bz2" for part in (1, 2)]
C4 = SAMPLES / "c4-train.00000-of-01024-first1000.json.gz"
CONTENT = b"".join(b"line %d of some text\n" % number for number in range(300))


def content(path: Path) -> bytes:
    with open_stream(str(path)) as stream:
        return stream.read()


def records(source: str, data: bytes) -> tuple[list[Record], Counter]:
    counters: Counter = Counter()
    return list(READERS[source](io.BytesIO(data), "a.xml", counters)), counters


# --- streams


@pytest.mark.parametrize("name", ["plain", "named.gz", "named.bz2", "x.xml"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress])
def test_compression_is_told_by_content_not_by_name(tmp_path, name, compress):
    path = tmp_path / name
    path.write_bytes(compress(CONTENT))
    assert content(path) == CONTENT


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_members_are_read_one_after_the_other(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(CONTENT) + compress(b"") + compress(CONTENT[::-1]))
    assert content(path) == CONTENT + CONTENT[::-1]


def test_gzip_may_be_padded_with_zeros(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(CONTENT) + bytes(512) + gzip.compress(CONTENT) + bytes(99))
    assert content(path) == CONTENT * 2


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
@pytest.mark.parametrize("members", [1, 2])
def test_a_cut_at_any_byte_is_never_silent(tmp_path, compress, members):
    """Every length short of the whole, except between members, where the compressed file is indeed a whole one."""
    path = tmp_path / "a"
    whole = compress(CONTENT) * members
    boundary = len(whole) // members
    for length in (n for n in range(3, len(whole)) if n % boundary):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedInput) as damage:
            content(path)
        assert damage.value.path == str(path)
        assert damage.value.position == f"byte {length} of {length}"
        assert "ends before its end marker" in damage.value.reason


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_what_precedes_a_cut_is_read_first(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(CONTENT) + compress(CONTENT)[:-1])
    with open_stream(str(path)) as stream:
        assert stream.read(len(CONTENT)) == CONTENT
        with pytest.raises(DamagedInput):
            stream.read()


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_a_changed_byte_is_damage(tmp_path, compress):
    path = tmp_path / "a"
    whole = bytearray(compress(CONTENT))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(DamagedInput, match=r"corrupt|ends before"):
        content(path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_foreign_bytes_after_the_end_are_damage(tmp_path, compress):
    path = tmp_path / "a"
    path.write_bytes(compress(CONTENT) + b"<html>")
    with pytest.raises(DamagedInput, match="after the end"):
        content(path)


def test_an_empty_file_is_damage(tmp_path):
    path = tmp_path / "a.gz"
    path.touch()
    with pytest.raises(DamagedInput, match="empty file"):
        content(path)


def test_what_cannot_be_opened_is_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match=r"a\.gz: no such file"):
        content(tmp_path / "a.gz")
    with pytest.raises(UserError, match="directory"):
        content(tmp_path)
    with pytest.raises(UserError, match="nosuchprotocol"), open_stream("nosuchprotocol://a"):
        pass


def test_paths_are_fsspec_paths():
    import fsspec

    with fsspec.open("memory://folder/a.bz2", "wb") as file:
        file.write(bz2.compress(CONTENT))
    with open_stream("memory://folder/a.bz2") as stream:
        assert stream.readline() == b"line 0 of some text\n"


def test_damage_survives_the_trip_between_processes():
    damage = pickle.loads(pickle.dumps(DamagedInput("a", "byte 1", "cut")))
    assert (damage.path, damage.position, damage.reason) == ("a", "byte 1", "cut")


# --- Wikipedia

SITEINFO = """<siteinfo><base>https://it.wikipedia.org/wiki/Pagina_principale</base><namespaces>
<namespace key="0" /><namespace key="1">Discussione</namespace><namespace key="14">Categoria</namespace>
<namespace key="5">Discussioni Wikipedia</namespace></namespaces></siteinfo>"""


def page(title: str, text: str, extra: str = "", revision: str = "") -> str:
    return f"<page><title>{title}</title>{extra}<revision>{revision}<text>{text}</text></revision></page>"


def export(*pages: str, siteinfo: str = SITEINFO) -> bytes:
    return f"<mediawiki>{siteinfo}{''.join(pages)}</mediawiki>".encode()


def test_namespace_element_decides_where_there_is_one():
    pages = [page("Categoria: a title", "A", "<ns>0</ns>"), page("B", "B", "<ns>1</ns>")]
    kept, counters = records("wikipedia", export(*pages))
    assert [record.title for record in kept] == ["Categoria: a title"]
    assert counters == {"read": 2, "not_article": 1}


def test_without_namespace_elements_the_titles_prefix_decides():
    """A prefix counts if <siteinfo> lists it, in any case, with underscores or spaces; else it belongs to the title."""
    titles = ["Categoria:A", "discussioni_wikipedia:B", "DISCUSSIONE:C", "Alien: Covenant", "Categorie:D", "E"]
    kept, counters = records("wikipedia", export(*(page(title, "text") for title in titles)))
    assert [(record.ordinal, record.title) for record in kept] == [(3, "Alien: Covenant"), (4, "Categorie:D"), (5, "E")]
    assert counters == {"read": 6, "not_article": 3}


def test_redirects_by_element_in_any_language_and_by_prefix():
    pages = [
        page("A", "#RINVIA [[B]]", '<ns>0</ns><redirect title="B" />'),
        page("B", "\n#redirect [[C]]"),
        page("C", "#REDIRECT[[D]]"),
        page("D", "The #REDIRECT of a page"),
    ]
    kept, counters = records("wikipedia", export(*pages))
    assert [record.title for record in kept] == ["D"]
    assert counters == {"read": 4, "redirect": 3}


def test_the_last_revision_counts_and_only_its_main_slot():
    revisions = (
        "<page><title>A</title><ns>0</ns><revision><id>1</id><text>old</text></revision><revision><text>new</text>"
        "<content><role>other</role><model>json</model><text>{}</text></content></revision></page>"
    )
    kept, _ = records("wikipedia", export(revisions))
    assert [record.text for record in kept] == ["new"]


def test_pages_that_are_not_wikitext_or_empty_are_dropped():
    pages = [
        page("A", "a = 1", "<ns>0</ns>", "<model>Scribunto</model>"),
        page("B", "b", "<ns>0</ns>", "<model>wikitext</model>"),
        page("C", " \n ", "<ns>0</ns>"),
        "<page><title>D</title><ns>0</ns><revision><text deleted='deleted' /></revision></page>",
    ]
    kept, counters = records("wikipedia", export(*pages))
    assert [record.title for record in kept] == ["B"]
    assert counters == {"read": 4, "not_article": 1, "empty": 2}


def test_addresses_are_written_as_wikipedia_writes_them():
    kept, _ = records("wikipedia", export(page("Cos'è l'&quot;IA&quot; (2?) A/B &amp; C", "text")))
    assert kept[0].url == "https://it.wikipedia.org/wiki/Cos%27%C3%A8_l%27%22IA%22_(2%3F)_A/B_%26_C"
    assert url_title("Who's (on) A/B: 1,2!") == "Who%27s_(on)_A/B:_1,2!"


def test_without_siteinfo_there_is_no_address_and_english_namespaces_hold():
    kept, _ = records("wikipedia", export(page("Category:A", "a"), page("B", "b"), siteinfo=""))
    assert [(record.title, record.url) for record in kept] == [("B", "")]


@pytest.mark.parametrize("at_end", ["<page><ti", "<page><title>C</title><revision><text>cut &am", "<!-- ", "<page", ""])
def test_a_dump_cut_off_in_its_xml_yields_whole_pages_and_says_so(at_end):
    data = export(page("A", "a"), page("B", "b")).removesuffix(b"</mediawiki>") + at_end.encode()
    kept, counters = records("wikipedia", data)
    assert [record.title for record in kept] == ["A", "B"]
    assert counters == {"read": 2, "truncated_xml": 1}


def test_a_cut_at_any_byte_of_the_xml_is_never_silent():
    data = export(page("À", "à &amp; b", "<ns>0</ns>"))
    for length in range(data.index(b">") + 1, len(data)):
        kept, counters = records("wikipedia", data[:length])
        assert counters["truncated_xml"] == 1
        assert len(kept) == (b"</page>" in data[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"<html><body></body></html>",
        b"not XML",
        b"<mediawiki><page></mediawiki>",
        b"<mediawiki/><mediawiki/>",
        b"",
        b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><mediawiki>&b;</mediawiki>',
        b"<mediawiki>\xff</mediawiki>",
    ],
)
def test_anything_but_a_mediawiki_export_is_damage(data):
    with pytest.raises(DamagedInput, match="XML"):
        records("wikipedia", data)


def test_schema_0_10_export():
    kept, counters = records("wikipedia", (DATA / "enwiki-20171220.xml").read_bytes())
    assert counters == {"read": 5, "not_article": 1}
    assert [record.url for record in kept if "Ville" in record.title] == [
        "https://en.wikipedia.org/wiki/Ville-d%27Avray_(1865_painting)"
    ]


def test_schema_0_9_export_that_begins_with_a_comment():
    kept, counters = records("wikipedia", (DATA / "nlwiki-20140927.xml").read_bytes())
    assert {record.title for record in kept} == {"Anthony Fokker", "Alan Turing"}
    assert counters == {"read": 3, "redirect": 1}


# --- C4


def test_c4_lines_become_records():
    line = '{"text":"Größe\\n2","timestamp":"2019-04-25T12:57:54Z","url":"https://a.org/"}\n'
    kept, counters = records("c4", (line * 2).encode())
    assert kept == [Record(0, "Größe\n2", "https://a.org/"), Record(1, "Größe\n2", "https://a.org/")]
    assert counters == {"read": 2}


@pytest.mark.parametrize(
    "line",
    [
        *('{"text": "cut o', '{"url": "https://a.org/"}', '{"text": null}', "[]", "", '{"text": "\\ud800"}'),
        *("[" * 100_000, '{"text": "a", "url": 3}'),
    ],
)
def test_a_line_that_is_no_record_is_damage_at_its_number(line):
    data = b'{"text": "a"}\n' + line.encode() + b"\n"
    with pytest.raises(DamagedInput) as damage:
        records("c4", data)
    assert damage.value.position == "line 2"
    assert "expected a JSON object with a text" in damage.value.reason


# --- the samples


@pytest.mark.parametrize(("path", "pages"), zip(ENWIKI, [728, 767], strict=True))
def test_wikipedia_samples_hold_the_pages_their_licence_note_says(path, pages):
    xml = content(path).decode()
    counters: Counter = Counter()
    with open_stream(str(path)) as stream:
        kept = list(READERS["wikipedia"](stream, str(path), counters))
    titles = re.findall("<title>(.*?)</title>", xml)
    namespaces = re.findall('<namespace key="(?!0")[^"]*">(.*?)</namespace>', xml)
    articles = [not title.startswith(tuple(f"{namespace}:" for namespace in namespaces)) for title in titles]
    redirects = [bool(re.match("(?i)#redirect", text)) for text in re.findall('<text xml:space="preserve">(.*)', xml)]
    assert counters["read"] == len(titles) == len(redirects) == pages
    assert counters["not_article"] == articles.count(False)
    assert counters["redirect"] == sum(
        article and redirect for article, redirect in zip(articles, redirects, strict=True)
    )
    assert len(kept) == counters["read"] - counters["not_article"] - counters["redirect"]
    assert not counters["truncated_xml"]


def test_wikipedia_samples_are_contiguous():
    first, second = (content(path).decode() for path in ENWIKI)
    assert first.split("  <page>")[0] == second.split("  <page>")[0]
    assert re.findall("<title>(.*?)</title>", first)[-1] == "Alexander Mackenzie"
    assert re.findall("<title>(.*?)</title>", second)[0] == "Annexation"


def test_c4_sample_has_the_published_layout():
    lines = content(C4).decode().splitlines(keepends=True)
    assert len(lines) == 1000
    for line in lines:
        record = json.loads(line)
        assert list(record) == ["text", "timestamp", "url"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["timestamp"])
        assert line == json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
    # as allenai/c4 has its first record
    assert lines[0].startswith('{"text":"Beginners BBQ Class Taking Place in Missoula!\\nDo you want to get better')
    assert lines[0].endswith(
        '"timestamp":"2019-04-25T12:57:54Z","url":"https://klyq.com/beginners-bbq-class-taking-place-in-missoula/"}\n'
    )
    assert C4.read_bytes()[4:8] == bytes(4)  # no time in the gzip header


def test_samples_are_small_and_have_their_licences():
    assert sum(path.stat().st_size for path in SAMPLES.iterdir()) < 4.6e6
    licences = (SAMPLES / "LICENSES.md").read_text()
    assert all(path.name in licences for path in SAMPLES.iterdir() if path.name != "LICENSES.md")
