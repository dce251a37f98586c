"""Wikitext to plain text.

A full parser builds a tree of the page and throws most of it away (mwparserfromhell: 4 MB/s, this module: 20 MB/s on
the same core). Here every construct is a token of one regular expression, and a stack pairs nested tokens. So the time
is linear in the length of any page, also of one whose markup is never closed.
"""

import functools
import html
import re
from collections import Counter
from html.entities import html5

from data_pipeline.text.wikitext.arguments import is_quotation, named_quotation, normalised
from data_pipeline.text.wikitext.inline import Placeholders, first_variant, without_edges
from data_pipeline.text.wikitext.namespaces import (
    CATEGORY_NAMESPACES,
    FILE_NAMESPACES,
    FILE_SUFFIXES,
    LANGUAGES,
    PAGE_NAMES,
    SISTER_PROJECTS,
    YEAR_NAMES,
    normalised_namespace,
)
from data_pipeline.text.wikitext.superscripts import MARKS, mark_tags, without_marks
from data_pipeline.text.wikitext.templates import FRACTIONS, has_text, math_text, template_text


def plain_text(
    wikitext: str,
    title: str = "",
    hidden_namespaces: frozenset[str] = frozenset(),
    timestamp: str = "",
    holes: Counter[str] | None = None,
) -> str:
    """The prose of a page: paragraphs, headings and list items, one to a line, at most one blank line between them.

    Dropped: tables, files, categories, language links, references, comments, galleries, code blocks, magic words,
    formulas that aren't a line of plain symbols, headings with nothing below them, and templates. Known templates with
    text, such as {{convert}}, stay; so do unknown ones in the middle of a sentence whose argument reads as prose.
    All links keep their labels. Never raises, whatever the markup.

    `title` replaces {{PAGENAME}}, and the year of `timestamp` {{CURRENTYEAR}}. `hidden_namespaces`: this wiki's
    normalised names for files and categories, in addition to the names known here. `holes` counts the templates that
    left a hole in a sentence, by name.

        "'''Ulm''' is a [[city]] on the [[Danube|river]]{{sfn|A|p=2}}.<ref>B</ref>\n== See also ==\n[[Category:Ulm]]"
        ->  "Ulm is a city on the river."
    """
    text = _CONTROL.sub("", wikitext.replace("\r\n", "\n").replace("\t", " "))
    if "<" in text:
        text = _drop_hidden(text)
        text = mark_tags(text)
        text = _LINE_TAG.sub("\n", text)
        text = _INLINE_TAG.sub("", text)
    placeholders = Placeholders(Counter() if holes is None else holes)
    text = _resolve_nested(text, _Nesting(title, timestamp[:4], _without_text(hidden_namespaces), placeholders))
    if "[" in text:
        text = _EXTERNAL_LINK.sub(r"\1", text)
    return _assemble(text.split("\n"), placeholders)


# --- what is never shown --------------------------------------------------------------------------

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")  # none is valid in XML 1.0
_HIDDEN_TAGS = (
    "ref|references|math|chem|ce|gallery|timeline|pre|source|syntaxhighlight|imagemap|score|hiero|graph|mapframe|maplink|"
    "templatedata|templatestyles|categorytree|inputbox|includeonly|indicator|dynamicpagelist|style|script|nowiki"
)
_HIDDEN = re.compile(rf"<(?:!--|({_HIDDEN_TAGS})\b[^<>]*>)", re.IGNORECASE)
_CLOSING = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in _HIDDEN_TAGS.split("|")}
_MARKUP = re.compile(r"(&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z]\w{1,31});)|[\[\]{}|'=*#:;<>_~\n-]")


def _drop_hidden(text: str) -> str:
    """Removes comments and elements without prose.

    The content of <nowiki> stays. Its markup characters become entities, which are decoded at the end.
    """
    kept = []
    position = 0
    never_closed: set[str] = set()  # a search to the end of the page per tag would be quadratic
    while opening := _HIDDEN.search(text, position):
        kept.append(text[position : opening.start()])
        position = opening.end()
        if opening[1] is None:
            end = text.find("-->", position)
            position = len(text) if end < 0 else end + len("-->")
            continue
        name = opening[1].lower()
        if opening[0].endswith("/>") or name in never_closed:
            continue
        closing = _CLOSING[name].search(text, position)
        if closing is None:
            never_closed.add(name)
            continue
        if name == "nowiki":
            kept.append(_literal(text[position : closing.start()]))
        elif name in _FORMULAS:
            kept.append(_literal(math_text(text[position : closing.start()])))
        position = closing.end()
    kept.append(text[position:])
    return "".join(kept)


_FORMULAS = ("math", "chem", "ce")


def _literal(text: str) -> str:
    """Replaces markup characters by entities, so that they aren't markup. Entities stay as they are."""
    return _MARKUP.sub(lambda markup: markup[1] or f"&#{ord(markup[0])};", text)


# --- tags -----------------------------------------------------------------------------------------

_LINE_TAG = re.compile(
    r"</?(?:br|p|div|li|ul|ol|dl|dt|dd|hr|center|blockquote|poem|h[1-6]|tr|td|th|caption|tbody|thead)\b[^<>]*> *\n?",
    re.IGNORECASE,
)
_INLINE_TAG = re.compile(
    r"</?(?:abbr|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|i|ins|kbd|mark|noinclude|nowiki|onlyinclude|q|rb|rp|rt|rtc|"
    rf"ruby|s|samp|section|small|span|strike|strong|time|tt|u|var|wbr|langconvert|{_HIDDEN_TAGS})\b[^<>]*>",
    re.IGNORECASE,
)


# --- templates, tables and links, which nest ------------------------------------------------------

# Every alternative begins with a literal character: the search for the next token then skips ahead fast.
_TOKENS = (
    r"\[\[[^\[\]{}\n]*\]\]|\[\[|\]\](?!\](?!\]))|"  # in "]]]" the last two close the link
    r"\{\{+|\}\}+|"
    r"\n[ :]*\{\||\n *\|\}(?!\}(?!\}))|"  # "|}}" ends a template, "|}}}" a table and then a template
    r"<[Tt][Aa][Bb][Ll][Ee]\b[^<>]*>|</[Tt][Aa][Bb][Ll][Ee] *>"
)
_TOKEN = re.compile(f"({_TOKENS})")
# "-{{" begins a template, and "}}}-" ends a template and then conversion markup.
_TOKEN_OR_VARIANT = re.compile(rf"(-\{{(?!\{{)|(?:\}}\}})+(?=\}}-)|\}}-|{_TOKENS})")
_MAX_DEPTH = 50  # each level copies what is inside it; MediaWiki's own limit is 40


def _resolve_nested(text: str, nesting: "_Nesting") -> str:
    """Replaces templates, tables and links by their text."""
    pieces = (_TOKEN_OR_VARIANT if "-{" in text else _TOKEN).split("\n" + text)
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            nesting.out.append(piece)
        elif piece.startswith("[["):
            if len(piece) > 2:
                nesting.add_link(piece[2:-2])
            else:
                nesting.open("link")
        elif piece == "]]":
            nesting.close("link")
        elif piece.startswith("{{"):
            for _ in range(len(piece) // 2):
                nesting.open("template")
        elif piece.startswith("}}"):
            for _ in range(len(piece) // 2):
                nesting.close("template")
        elif piece == "-{":
            nesting.open("variant")
        elif piece == "}-":
            nesting.close("variant")
        elif piece.endswith("{|") or piece[1] in "Tt":
            nesting.out.append("\n")
            nesting.open("table")
        else:
            nesting.close("table")
    return nesting.finish()


class _Nesting:
    """The open constructs at a position in the page, each with its pieces of text."""

    def __init__(self, title: str, year: str, hidden: frozenset[str], placeholders: Placeholders) -> None:
        """`title` and `year` are the page's; `hidden` are the namespaces and prefixes whose links show no text."""
        self.out: list[str] = []  # the pieces of the innermost construct
        self._title, self._year, self._hidden, self._placeholders = title, year, hidden, placeholders
        self._outer: list[tuple[str, list[str]]] = []
        self._open = {"link": 0, "template": 0, "table": 0, "variant": 0}

    def open(self, kind: str) -> None:
        if len(self._outer) < _MAX_DEPTH:
            self._outer.append((kind, self.out))
            self._open[kind] += 1
            self.out = []

    def add_link(self, inside: str) -> None:
        self.out.append(_link_text(inside, self._hidden))

    def close(self, kind: str) -> None:
        """Closes the innermost open construct of this kind, if any. Constructs opened inside it were never closed.

        A link that begins outside a template, table or variant can't end inside.
        """
        if not self._open[kind] or (kind == "link" and self._outer[-1][0] != "link"):
            self.out.append("}-" if kind == "variant" else "")
            return
        while self._outer[-1][0] != kind:
            self._abandon()
        inside = self.out
        self.out = self._pop()
        if kind == "link":
            self.add_link("".join(inside))
        elif kind == "template" and inside:
            self._add_template(inside)
        elif kind == "variant":
            self.out.append(first_variant("".join(inside)))

    def _add_template(self, inside: list[str]) -> None:
        written = inside[0].partition("|")[0]
        name = normalised(written)
        before = "".join(self.out[-1:])  # of {{{{a}}}}, nothing is before the inner template
        text: str | None = None  # of a box, or a parser function that yields nothing
        if has_text(name):
            # {{citation}} with names only is an English reference, with a text a French quotation
            text = template_text("".join(inside)) or (None if ":" in name or name == "citation" else "")
        elif is_quotation(name) and (quotation := named_quotation("".join(inside))):
            text = quotation
        elif name in PAGE_NAMES:
            text = self._title
        elif name in YEAR_NAMES:
            text = self._year
        else:
            begins_line = before.rstrip(" ").endswith("\n")
            text = self._placeholders.replace(name, written, "".join(inside), begins_line)
        if text:
            is_mixed_number = name in FRACTIONS and before[-1:].isdecimal()
            self.out.append(f" {text}" if is_mixed_number else text)
        elif text is not None and not self._outer:
            self.out.append(self._placeholders.around(name))

    def finish(self) -> str:
        while self._outer:
            self._abandon()
        return "".join(self.out)

    def _pop(self) -> list[str]:
        kind, outer = self._outer.pop()
        self._open[kind] -= 1
        return outer

    def _abandon(self) -> None:
        """Gives up on the innermost construct, which was never closed. Its text goes to the construct around it.

        The first line of a template (its name) or a table (its attributes) is dropped; table cells are dropped later.
        """
        kind, inside = self._outer[-1][0], self.out
        self.out = self._pop()
        if kind == "link":
            self.out.extend(inside)
        elif kind == "variant":
            self.out.extend(["-{", *inside])
        else:
            self.out.append("".join("".join(inside).partition("\n")[1:]))


_NOT_TEXT = FILE_NAMESPACES | CATEGORY_NAMESPACES | LANGUAGES


@functools.lru_cache(maxsize=16)  # one wiki's pages follow each other
def _without_text(hidden_namespaces: frozenset[str]) -> frozenset[str]:
    return _NOT_TEXT | hidden_namespaces


_TITLE_QUALIFIER = re.compile(r"(?<! ) *[(（][^()（）]*[)）]$")


def _link_text(inside: str, hidden: frozenset[str]) -> str:
    """The text that a wikilink shows.

    "Target"  ->  "Target"        "Target|label"  ->  "label"        "Ulm (city)|"  ->  "Ulm"
    "Category:A"  ->  ""          ":Category:A"  ->  "Category:A"    "wikt:word"  ->  "word"
    "de:Ziel"  ->  ""             "Datei:A.jpg|thumb|A caption"  ->  ""
    """
    target, bar, label = inside.partition("|")
    prefix, colon, rest = target.partition(":")
    if colon:
        namespace = normalised_namespace(prefix)
        if not namespace:
            target = rest
        elif namespace in hidden or normalised_namespace(rest).endswith(FILE_SUFFIXES):
            return ""
        elif namespace in SISTER_PROJECTS:
            target = rest
    if bar and label.strip():
        return _QUOTES.sub("", label) if "''" in label else label  # quotes pair up within a label
    target = target.replace("_", " ").lstrip("#")
    if bar:
        return _TITLE_QUALIFIER.sub("", target.rpartition(":")[2])
    return target


_EXTERNAL_LINK = re.compile(
    r"\[(?:(?:https?|ftps?|news|irc|gopher|telnet):|mailto:|//)[^\s\[\]<>\"]*+ *+"
    r"([^\[\]\n]*+(?:\[[^\[\]\n]*+\][^\[\]\n]*+)*+)\]",
    re.IGNORECASE,
)


# --- lines ----------------------------------------------------------------------------------------

_MAGIC_WORD = re.compile(
    r"__(?:[^\W\d_a-z]+(?:_[^\W\d_a-z]+)*|(?:no|force)?toc|no(?:edit|new)section(?:link)?|nogallery|(?:no)?index)__"
)
_WORD = re.compile(r"[^\W_]")
_QUOTES = re.compile("''+")
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31}|רלמ|رلم);")
_MEDIAWIKI_ENTITIES = {"&רלמ;": "\u200f", "&رلم;": "\u200f"}
_SPACE = re.compile("[\u00a0\u2000-\u200a\u202f\u205f]")
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\ufeff]")
_SPACES = re.compile("  +")
_EMPTY_BRACKETS = re.compile(r"\([ ,;:/–—-]*\)|\[[ ,;]*\]")
_AFTER_BRACKET = re.compile(r"\([ ,;]+")
_BEFORE_BRACKET = re.compile(r"[ ,;]{1,8}\)")
_BEFORE_STOP = re.compile(r" (?=[,.](?: |$))")
_LIST = "*#:; " + MARKS
_BODY = 9  # below every heading


def _assemble(lines: list[str], placeholders: Placeholders) -> str:
    """Joins the cleaned lines, without empty sections.

    Lines are visited from the last to the first: a heading stays if text or a deeper heading remains below it.
    """
    kept: list[str] = []
    below = 0
    for raw in reversed(lines):
        level, line = _line_text(raw, placeholders)
        if not line:
            if kept and kept[-1]:
                kept.append("")
        elif level < below or level == _BODY:
            kept.append(line)
            below = level
    kept.reverse()
    return "\n".join(kept).strip("\n")


def _line_text(line: str, placeholders: Placeholders) -> tuple[int, str]:
    """The level (1 to 6 for a heading, else `_BODY`) and text of a line; "" for a line without a letter or digit.

    "== '''A''' =="  ->  (2, "A")        "* b  c"  ->  (9, "b c")        "| a cell"  ->  (9, "")
    """
    line = without_edges(line.strip())
    level = _BODY
    if not line:
        return level, ""
    first = line[0]
    if first in "*#:;":
        line = without_edges(line.lstrip(_LIST)).lstrip(_LIST)
    elif first == "=":
        level, line = _heading(line)
    elif first == "|" or (first == "!" and "|" in line):  # a cell of a table whose beginning is missing
        return level, ""
    if "''" in line:
        line = _without_quotes(line)
    if "__" in line:
        line = _MAGIC_WORD.sub("", line)
    if "&" in line:
        line = _ENTITY.sub(_character, line).replace("\n", " ")
    if not line.isascii():
        line = _INVISIBLE.sub("", _SPACE.sub(" ", line))
    line = without_marks(placeholders.fill_in(line))
    if "  " in line:
        line = _SPACES.sub(" ", line)
    if "(" in line or "[" in line:
        line = _tidy_brackets(line)
    if " ," in line or " ." in line:
        line = _BEFORE_STOP.sub("", line)
    return level, line.strip() if _WORD.search(line) else ""


def _character(entity: re.Match[str]) -> str:
    """The character of an entity of HTML 5 or MediaWiki. An unknown entity stays as it is.

    "&eacute;"  ->  "é"        "&#65;"  ->  "A"        "&notanentity;"  as it is
    """
    written = entity[0]
    if written[1] == "#":
        return html.unescape(written)
    return html5.get(written[1:]) or _MEDIAWIKI_ENTITIES.get(written, written)


def _heading(line: str) -> tuple[int, str]:
    """ "== A =="  ->  (2, "A")        "= no heading"  ->  (9, "= no heading")"""
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6, len(line) // 2)
    return (level, line[level:-level]) if level else (_BODY, line)


def _tidy_brackets(line: str) -> str:
    """Removes spaces and marks that a removed template has left in brackets.

    "Ulm ( ) is"  ->  "Ulm is"        "Rome (; born 1900 )"  ->  "Rome (born 1900)"
    """
    emptied = _EMPTY_BRACKETS.sub("", line)
    if "( " in emptied or "(," in emptied or "(;" in emptied:
        emptied = _AFTER_BRACKET.sub("(", emptied)
    if " )" in emptied or ",)" in emptied or ";)" in emptied:
        emptied = _BEFORE_BRACKET.sub(")", emptied)
    return line if emptied == line else _SPACES.sub(" ", emptied)


def _without_quotes(line: str) -> str:
    """Removes the apostrophes of bold and italics, counted as in MediaWiki.

    "'''Bold''' and ''italic''"  ->  "Bold and italic"        "L'''Iliade'' d'Homère"  ->  "L'Iliade d'Homère"
    """
    runs = [len(run) for run in _QUOTES.findall(line)]
    bold = sum(length != 2 for length in runs)
    italic = sum(length == 2 or length >= 5 for length in runs)
    elided = _elided(line) if bold % 2 and italic % 2 else -1
    pieces, position = [], 0
    for run in _QUOTES.finditer(line):
        # More than five in a row are quotes around text that was removed.
        literal = "'" if len(run[0]) == 4 or run.start() == elided else ""
        pieces += [line[position : run.start()], literal]
        position = run.end()
    return "".join([*pieces, line[position:]])


def _elided(line: str) -> int:
    """The position where ''' means an apostrophe, then italics: preferably after a word of one letter; −1 for none."""
    candidates = [run.start() for run in _QUOTES.finditer(line) if len(run[0]) == 3]

    def rank(start: int) -> int:
        before = line[max(0, start - 2) : start].rjust(2)
        return 2 if before[1] == " " else 0 if before[0] == " " else 1

    return min(candidates, key=rank, default=-1)
