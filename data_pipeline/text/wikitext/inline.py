"""Unknown templates: in the middle of a sentence, an argument that reads as prose replaces the template.

Otherwise the sentence would have a hole: "built in {{year|1900}} by" would become "built in by". Templates that aren't
part of the sentence (a note, a flag) are recognised by their position (after a word or a sentence), by the form of
their arguments and by their name. Templates that still leave a hole are counted by name.
"""

import re
from collections import Counter

from data_pipeline.text.wikitext.arguments import arguments_of
from data_pipeline.text.wikitext.namespaces import FILE_SUFFIXES, LANGUAGES
from data_pipeline.text.wikitext.superscripts import MARKS
from data_pipeline.text.wikitext.templates import coordinates, is_number, measure, with_unit

# Until its line is complete, these stand around a template's number on the page and its text. No page contains them.
_OPEN, _THEN, _CLOSE = "\x01", "\x03", "\x02"
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_THEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_PLACEHOLDER_AND_SPACE = re.compile(rf"{_PLACEHOLDER.pattern} *")
_PART_OF_A_PLACEHOLDER = re.compile(f"{_OPEN}\\d*{_THEN}?|[{_THEN}{_CLOSE}]")
_MARKUP = ("=", "*", "#", ":", ";", "|", "!")  # markup that a line can begin with
_LONGEST, _LONGEST_NAME = 1000, 60
_CONTEXT = 8  # characters of context on each side

# Names, in lower case, of templates whose arguments aren't text, by their purpose.
_NO_TEXT_NAMES = {
    "notes and references, by number or key": """
        ref, refn, ref harvard, ref label, note, notes, nb, fn, fnb, fnr, fn label, rn, rnb, an, anb, gr, hnote,
        inote, mn, mnb, mn2, mnb2, smref, cref, cref2, r, rp, rf, rfl, ran, ent, footnote, note label,
        harvard citation, scref, sup note, page, pages, pp, source, sources, full, ref-list, reflist,
        refbegin, refend, notelist, tag
    """,
    "requests to its authors, whose argument is a date or a remark": """
        fact, facts, citation needed, citeneeded, cite needed, who, whom, by whom, when, where, which, what, why,
        how, clarify, clarifyme, vague, dubious, disputed, disputed-inline, specify, verify, verify source,
        update after, page needed, or, original research, pov, pov-inline, weasel word, weasel-inline,
        failed verification, dead link, cleanup, cleanup-date, merge, mergeto, mergefrom, split, todo, sectstub,
        explain, elucidate, examples, citation style, citation broken, citation required, citationneeded
    """,
    "numbers of catalogues, which are in citations": """
        doi, pmid, pmc, issn, oclc, lccn, jstor, bibcode, arxiv, hdl, zbl, mr, rfc, webarchive, wayback, imdb,
        asin
    """,
    "pictures": """
        flagicon, flag icon, nft, nfb, icon, lang icon, language icon, image, gbmapping, pronunciation, audio2
    """,
    "German, French, Spanish, Italian, Portuguese, Dutch, Polish, Swedish, Russian": """
        anm, anm., anmerkung, beleg, belege, seite, fußnote, internetquelle, literatur, flagge, référence,
        références, réf, refsou, drapeau, ouvrage, lien web, nota, notas, cita requerida, demostrar, bandera,
        bandera2, enlace roto, nota a piè di pagina, senza fonte, bandiera, band, collegamento interrotto,
        carece de fontes, bandeira, bron, bron?, feit, noot, vlag, przypis, przypisy, uwaga, fakt, flaga,
        källa behövs, flagga, fotnot, примечание, прим., сноска, нет аи, источник, флаг
    """,
}
_NO_TEXT = frozenset(name.strip() for names in _NO_TEXT_NAMES.values() for name in names.split(","))
_NO_TEXT_BEGINNINGS = (
    *("cite", "citation needed", "cita ", "coor", "koord", "harv", "sfn", "efn", "ref-", "ref ", "note-"),
    *("flagicon", "icon", "ipac-"),
    *("wiktionary", "wikisource", "wikiquote", "wikibooks", "wikinews", "wikiversity", "wikivoyage"),
    *("commons", "sister"),
)
_IDENTIFIER = re.compile(r"\S*_\S*|[A-Za-z]+-?\d\S*|\S*://.*|\S+\.\S+/.*")
_LETTERS = re.compile(r"[A-Z]{2,4}")  # the code of a country, an airport
_CODE = re.compile(r"[A-Z\d]{1,4}|[a-z]|[\W\d]+")
_YEAR_OR_VERSE = re.compile(r"\d[\d:–-]{2,}")
_ACRONYM = re.compile(r"(?=.{2,12}$)(?:(?=.*[A-Z].*[A-Z])[A-Za-z]{2,6}|.*[^\W\d_]\.[^\W\d_].*)")
_WORD = re.compile(r"[^\W_]")

_AMID = re.compile(
    r"[^\s.!?…] {1,3}[\"'“„«‘(\[–-]*$"  # a word or a comma, and a space
    r"|[(\[“„«‘]$|(?:^|[ (])[\"']$"  # opening brackets and quotes
    r"|[^\W\d_]['’/–-]$"  # l'{{…}}, base-{{…}}
    r"|[^\W_][:：]$"
)
_BEFORE_A_CLAUSE = re.compile(r"[^\W_] ?[:：]'* *$")  # a colon promises more even at the end of a line
_GOES_ON = re.compile(rf"[.,;:!?)\]”»\"'’…。，、；：！？）」』{MARKS}]|-?[^\W_]|{_OPEN}| +\S")
_SENTENCE_GOES_ON = re.compile(r",? +[\"“„«(]*([^\W\d_])")


class Placeholders:
    """Placeholders for the templates of a page that may leave a hole, until their lines are complete.

    `holes` counts the templates that left a hole, by their names in lower case.
    """

    def __init__(self, holes: Counter[str]) -> None:
        self._holes = holes
        self._names: list[str] = []

    def replace(self, name: str, written: str, source: str, begins_line: bool) -> str | None:
        """The placeholder of an unknown template; "" if it has no words, None if it isn't part of a sentence.

        `name` is `written` in lower case; `source` is the inside of the template. A long template, or one of several
        lines, is a box if it `begins_line`, else a hole.
        """
        rest = source.partition("|")[2]
        if name in _NO_TEXT or (name.startswith(_NO_TEXT_BEGINNINGS) and not coordinates(rest)):
            return None
        box = len(source) > _LONGEST or "\n" in written
        text = None if box else "" if ":" in name else _text(written, source)
        if text is None and not begins_line:
            text = ""
        return self.around(name, text) if text else text

    def around(self, name: str, text: str = "") -> str:
        """The placeholder of the template `name` around its text."""
        self._names.append(name)
        return f"{_OPEN}{len(self._names) - 1}{_THEN}{text}{_CLOSE}"

    def fill_in(self, line: str) -> str:
        r"""A line in which each placeholder has become its text or been removed.

        "built in \x010\x031900\x02 by"  ->  "built in 1900 by"        "by them. \x010\x03A 7\x02"  ->  "by them. "
        """
        if _OPEN not in line and _CLOSE not in line:  # {{#switch}} may have split an argument, and left one of the two
            return line
        pieces, position, before = list[str](), 0, ""
        for placeholder in _PLACEHOLDER.finditer(line):
            between = line[position : placeholder.start()]
            before = (before + between)[-_CONTEXT:]
            amid = _amid_a_sentence(before, line[placeholder.end() : placeholder.end() + _CONTEXT])
            text = placeholder[2] if amid else ""
            if amid and not text and not before.rstrip().endswith(("(", "[")):  # emptied brackets are removed
                self._holes[self._names[int(placeholder[1])].partition(":")[0][:_LONGEST_NAME]] += 1
            pieces += [between, text]
            before = (before + text)[-_CONTEXT:]
            position = placeholder.end()
        return _without_placeholders("".join([*pieces, line[position:]]))


def _text(written: str, source: str) -> str | None:
    """The words of an unknown template: "" if no argument reads as prose, None for a box.

    "chiarire|la prima|quale?"  ->  "la prima"        "M|10|k|m"  ->  "10 km"        "NazNB|CA|ITA"  ->  "ITA"
    "TeX"  ->  "TeX"                                  "link|de|text=Ziel"  ->  "Ziel"     "OEIS|id=A1"  ->  ""
    """
    rest = source.partition("|")[2]
    if text := coordinates(rest):
        return text
    arguments = arguments_of(_without_placeholders(rest) if _OPEN in rest or _CLOSE in rest else rest)
    named = arguments.text()
    if "\n" in rest and any("\n" in argument for argument in (named, *arguments)):
        return None
    if _is_prose(named):
        return with_unit(named, source)
    if not any(arguments):
        return written.strip() if not rest and _ACRONYM.fullmatch(written.strip()) else ""
    if len(arguments) > 1 and is_number(next(filter(None, arguments))):
        return with_unit(measure(arguments), source)
    if len(arguments) == 1:
        return with_unit(arguments[0], source) if _is_prose(arguments[0]) else ""
    for position, words in enumerate(arguments):
        if words not in LANGUAGES and not _CODE.fullmatch(words) and _is_prose(words):
            following = next(filter(None, arguments[position + 1 :]), "")
            return f"{words} {following}" if _YEAR_OR_VERSE.fullmatch(following) else with_unit(words, source)
    return max(filter(_LETTERS.fullmatch, arguments), key=len, default="")  # a country rather than its sport


def _is_prose(argument: str) -> bool:
    is_name = argument.lower().endswith(FILE_SUFFIXES) or _IDENTIFIER.fullmatch(argument)
    return _WORD.search(argument) is not None and not is_name


def without_edges(line: str) -> str:
    r"""A line without placeholders before its markup, which they would hide, and at its end, except after a colon.

    "== A ==\x010\x03b\x02"  ->  "== A =="        "\x010\x03b\x02* c"  ->  "* c"        "a: \x010\x03b\x02"  as it is
    """
    if _OPEN not in line and _CLOSE not in line:
        return line
    start, end = 0, len(line)
    while end and line[end - 1] in f"{_CLOSE} ":
        opening = line.rfind(_OPEN, 0, end) if line[end - 1] == _CLOSE else -1
        if opening > 0 and _BEFORE_A_CLAUSE.search(line, max(0, opening - _CONTEXT), opening):
            break
        end = opening if opening >= 0 else end - 1
    while start < end and (placeholder := _PLACEHOLDER_AND_SPACE.match(line, start)):
        start = placeholder.end()
    return line[start if line[start : start + 1] in _MARKUP else 0 : end]


def _without_placeholders(text: str) -> str:
    return _PART_OF_A_PLACEHOLDER.sub("", text)


def _amid_a_sentence(before: str, after: str) -> bool:
    if _AMID.search(before):
        return _GOES_ON.match(after) is not None or (not after and _BEFORE_A_CLAUSE.search(before) is not None)
    following = _SENTENCE_GOES_ON.match(after)  # at the start of a sentence
    return (not before.strip() or before.endswith(" ")) and following is not None and following[1].islower()


# Conversion markup -{…}- writes one word in several scripts (Chinese, Serbian, Kazakh …).
_VARIANT_FLAGS = re.compile(r" *(?:[A-Za-z+-]|zh[a-z-]*)(?: *; *(?:[A-Za-z+-]|zh[a-z-]*))* *\|")
_VARIANT_RULE = re.compile(r"(?<![^:;])[^:;]*?=>")
_VARIANT_CODE = re.compile(r" *[a-z]{2,3}(?:-[a-z]+)* *:")
_NEXT_VARIANT = re.compile(r";(?=(?:[^:;]*=>)?\s*[a-z]{2,3}(?:-[a-z]+)*\s*:|\s*$)")  # not that of an entity
_HIDDEN_FLAGS = frozenset("HT-")


def first_variant(inside: str) -> str:
    """The first variant of a conversion markup. Templates, links and inner markup in `inside` are text already.

    "zh-hans:计算机;zh-hant:電腦"  ->  "计算机"        "A|zh-cn:软件; zh-tw:軟體"  ->  "软件"
    "名"  ->  "名"        "H|zh-cn:a;zh-tw:b"  ->  ""
    """
    flags = _VARIANT_FLAGS.match(inside)
    if flags:
        if _HIDDEN_FLAGS & {flag.strip() for flag in flags[0][:-1].split(";")}:
            return ""
        inside = inside[flags.end() :]
    inside = _VARIANT_RULE.sub("", inside, count=1) if "=>" in inside else inside
    code = _VARIANT_CODE.match(inside)
    return inside if code is None else _NEXT_VARIANT.split(inside[code.end() :], maxsplit=1)[0].strip()
