"""Unknown templates: one with a single argument, in the middle of a sentence, is replaced by that argument.

Otherwise the sentence would have a gap: "built in {{year|1900}} by" would become "built in by". Templates that aren't
words of the sentence (a note, a flag) are recognised by their name, by their position (after a word or a sentence) and
by the form of their argument.
"""

import re

from data_pipeline.cleaning.wikitext.names import FILE_SUFFIXES
from data_pipeline.cleaning.wikitext.templates import positional, with_unit

_OPEN, _CLOSE = "\x01", "\x02"  # around an argument until its line is complete; no page contains them
_MARKED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_MARKED_AND_SPACE = re.compile(rf"{_MARKED.pattern} *")
_MARKUP = ("=", "*", "#", ":", ";", "|", "!")  # markup that a line can begin with
_LONGEST = 1000
_LOOKED_AT = 8  # characters looked at on each side

# Names, in lower case, of templates whose argument is no text, by their purpose.
_NO_TEXT_NAMES = {
    "notes and references, by number or key": """
        ref, refn, ref harvard, ref label, note, notes, nb, fn, fnb, fnr, fn label, rn, rnb, an, anb, gr, hnote,
        inote, mn, mnb, mn2, mnb2, smref, cref, cref2, r, rp, rf, rfl, ran, ent, footnote, note label,
        harvard citation, scref, sup note, page, pages, pp, citation, source, sources, full, ref-list, reflist,
        refbegin, refend, notelist, tag
    """,
    "requests to its authors, whose argument is a date or a remark": """
        fact, facts, citation needed, citeneeded, cite needed, who, whom, by whom, when, where, which, what, why,
        how, clarify, clarifyme, vague, dubious, disputed, disputed-inline, specify, verify, verify source,
        update after, page needed, or, original research, pov, pov-inline, weasel word, weasel-inline,
        failed verification, dead link, cleanup, cleanup-date, merge, mergeto, mergefrom, split, todo, sectstub,
        explain, elucidate, examples
    """,
    "numbers of catalogues, which are in citations": """
        doi, pmid, pmc, issn, oclc, lccn, jstor, bibcode, arxiv, hdl, zbl, mr, rfc, webarchive, wayback, imdb,
        asin
    """,
    "pictures": """
        flagicon, flag icon, nft, nfb, icon, lang icon, language icon, image, gbmapping, pronunciation, audio2
    """,
    "boxes that lead elsewhere": """
        main, mainarticle, main article, see, seealso, see also, further, redirect, commons, wikisource,
        wiktionary, wikiquote, otheruses, about, for, distinguish
    """,
    "German, French, Spanish, Italian, Portuguese, Dutch, Polish, Swedish, Russian": """
        anm, anm., anmerkung, beleg, belege, seite, fußnote, internetquelle, literatur, flagge, hauptartikel,
        siehe auch, référence, références, réf, refsou, article détaillé, voir, drapeau, ouvrage, lien web, nota,
        notas, cita requerida, demostrar, bandera, bandera2, véase, ap, enlace roto, nota a piè di pagina,
        senza fonte, bandiera, band, vedi, vedi anche, vedi categoria, nota disambigua, collegamento interrotto,
        carece de fontes, bandeira, artigo principal, bron, bron?, feit, noot, vlag, zie hoofdartikel, przypis,
        przypisy, uwaga, fakt, flaga, källa behövs, flagga, huvudartikel, fotnot, примечание, прим., сноска,
        нет аи, источник, флаг, основная статья
    """,
}
_NO_TEXT = frozenset(name.strip() for names in _NO_TEXT_NAMES.values() for name in names.split(","))
_NO_TEXT_BEGINNINGS = (
    *("cite", "citation ", "cita ", "coor", "koord", "harv", "sfn", "efn", "ref-", "ref ", "note-", "flagicon", "icon"),
    *("infobox", "navbox", "portal", "stub", "pp-", "r from", "user ", "ipac-"),
)
_IDENTIFIER = re.compile(r"\S*_\S*|[A-Za-z]+-?\d\S*|\S*://.*|\S+\.\S+/.*")
_WORD = re.compile(r"[^\W_]")

_AMID = re.compile(
    r"[^\s.!?…] {1,3}[\"'“„«‘(\[–-]*$"  # a word or a comma, and a space
    r"|[(\[“„«‘]$|(?:^|[ (])[\"']$"  # opening brackets and quotes
    r"|[^\W\d_]['’/–-]$"  # l'{{…}}, base-{{…}}
)
_GOES_ON = re.compile(rf"[.,;:!?)\]”»\"'’]|-?[^\W_]|{_OPEN}| +\S")
_SENTENCE_GOES_ON = re.compile(r",? +[\"“„«(]*([^\W\d_])")


def marked(name: str, source: str) -> str:
    """The argument of an unknown template, marked so that `fill_in` can decide on it; "" if it is certainly no text.

    `name` is in lower case; `source` is the inside of the template.
    """
    if len(source) > _LONGEST or name in _NO_TEXT or name.startswith(_NO_TEXT_BEGINNINGS) or ":" in name:
        return ""
    arguments = positional(source.partition("|")[2])
    if len(arguments) != 1:
        return ""
    text = _unmarked(arguments[0])
    if "\n" in text or not _WORD.search(text) or text.lower().endswith(FILE_SUFFIXES) or _IDENTIFIER.fullmatch(text):
        return ""
    return f"{_OPEN}{with_unit(text, source)}{_CLOSE}"


def without_edges(line: str) -> str:
    r"""A line without marked arguments at its end, which can't be text, or before its markup, which they would hide.

    "== A ==\x01b\x02"  ->  "== A =="        "\x01b\x02* c"  ->  "* c"        "\x01b\x02 c"  ->  "\x01b\x02 c"
    """
    start, end = 0, len(line)
    while end and line[end - 1] in f"{_CLOSE} ":
        opening = line.rfind(_OPEN, 0, end) if line[end - 1] == _CLOSE else -1
        end = opening if opening >= 0 else end - 1
    while start < end and (mark := _MARKED_AND_SPACE.match(line, start)):
        start = mark.end()
    return line[start if line[start : start + 1] in _MARKUP else 0 : end]


def fill_in(line: str) -> str:
    r"""A line in which each marked argument has become text or been removed.

    "built in \x011900\x02 by"  ->  "built in 1900 by"        "by them. \x01A 7\x02"  ->  "by them. "
    """
    if _OPEN not in line and _CLOSE not in line:  # only one of them if {{#switch}} has split an argument
        return line
    pieces, position, before = list[str](), 0, ""
    for mark in _MARKED.finditer(line):
        between = line[position : mark.start()]
        before = (before + between)[-_LOOKED_AT:]
        after = line[mark.end() : mark.end() + _LOOKED_AT]
        text = mark[1] if _amid_a_sentence(before, after) else ""
        pieces += [between, text]
        before = (before + text)[-_LOOKED_AT:]
        position = mark.end()
    return _unmarked("".join([*pieces, line[position:]]))


def _unmarked(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def _amid_a_sentence(before: str, after: str) -> bool:
    if _AMID.search(before):
        return _GOES_ON.match(after) is not None
    following = _SENTENCE_GOES_ON.match(after)  # at the start of a sentence
    return (not before.strip() or before.endswith(" ")) and following is not None and following[1].islower()
