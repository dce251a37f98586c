"""Wikitext to plain text: each construct, whole pages, and absurd markup."""

import re
import time
from collections import Counter
from pathlib import Path

import mwparserfromhell
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.cleaning.wikitext.markup import plain_text
from tests.data_pipeline.reading import read
from tests.tables import each

DATA = Path(__file__).parents[1] / "data" / "wikipedia"


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
# the page's own name
'''{{PAGENAME}}''' is {{NOMEPAGINA}}, {{lc:{{PAGENAME}}}} → Ulm is Ulm, ulm
# tables and tags
A\n{| class=x\n|-\n| a || {{b|c|}}\n{|\n| nested\n|}\n|}\nB → A\n\nB
A\n:{|\n! a\n|}\nB → A\n\nB
A<table border=1><tr><td>x<table><tr><td>y</table></table>B → A\nB
A<br/>B<BR>C → A\nB\nC
H<sub>2</sub>O, 10<sup>6</sup>, 1<sup>st</sup> → H2O, 10^6, 1st
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
# templates of other languages
{{langue|fr|mot}} {{unité|5|km}} {{нп5|А|Б|en|C}} {{仮リンク|日本|en|Japan}} {{Cytat|słowo}} → mot 5 km Б 日本\nsłowo
# text
''[[Le Monde|''Le Monde'']]'' a → Le Monde a
__notoc__ a __INHALTSVERZEICHNIS__ __目录__ __ללא_תוכן_עניינים__ __init__ → a __init__
__NOTOC__\nA __FORCETOC__B → A B
'''''A''''' ''b'' '''c''' → A b c
L'''Iliade'' d'Homère et '''autres''' → L'Iliade d'Homère et autres
1&nbsp;km &ndash; &eacute;&#233;&#xE9; AT&T &amp;lt; &copy → 1 km – ééé AT&T &lt; &copy
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
é -{A|zh-cn: <math> </math> \\frac{ {{#if: {{#switch:a|
"""
_FRAGMENTS = [*_MARKS.split(), "\n", " ", "\x00"]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(_FRAGMENTS), max_size=40).map("".join) | st.text())
def test_any_markup_gives_tidy_text(wikitext):
    text = plain_text(wikitext)
    assert text == text.strip("\n")
    assert "\n\n\n" not in text
    assert not re.search("[\x01\x02]", text)
    text.encode()


_UNCLOSED = """
{{ [[ }} ]] [[a| {{a| {{lang|fr| {{convert|1| [[File:a|[[b]] {{a|b}} <!-- <ref> <nowiki> <table> ( &#1 __A_ = * -{ -{a
-{A|zh: <math> <math>{ {{#if: {{#switch:a|b &a '''
"""
_LONG = ["{{" + "1" * 900 + "|1}}", "c {{a|" + "1" * 900 + "|b}} ", "c {{a|" + "1|" * 400 + "N}} "]
_SPACED = ["\n{|", "\n |}", "\n {", "c {{a|b}}", "<ref ", "[http://a ", "( ,", "\n=", "\t", "\n"]
_PAIRS = [("{{a|", "}}"), ("[[a|", "]]"), ("\n{|\n", "\n|}"), ("{{lang|fr|", "}}")]
_UNITS = [*_UNCLOSED.split(), *_LONG, *_SPACED]
_PAGES = [*(unit * (1_000_000 // len(unit)) for unit in _UNITS), *(a * 100_000 + b * 100_000 for a, b in _PAIRS)]


@pytest.mark.timing
@each("wikitext", _PAGES)
def test_time_is_linear_in_the_length_of_the_page_and_in_depth(wikitext):
    """A megabyte of unclosed markup takes well under a second; quadratic time would be minutes."""
    start = time.process_time()
    plain_text(wikitext)
    assert time.process_time() - start < 5
