"""The text of known templates that are part of a sentence, of parser functions, and of simple formulas."""

import html
import re
from collections.abc import Callable

from data_pipeline.text.wikitext.arguments import QUOTATION_NAMES, Arguments, arguments_of, normalised
from data_pipeline.text.wikitext.namespaces import LANGUAGES
from data_pipeline.text.wikitext.superscripts import LOWERED, RAISED, raised

Value = Callable[[Arguments], str]

_NUMBER = re.compile(r"[-−+]?[\d,.]*\d(?:[ +]\d+[/⁄]\d+|(?<=\d\d)[/⁄]\d+)?(?:e[-−+]?\d+)?")
_LONGEST_NUMBER = 40
_UNIT_ARGUMENT = re.compile(r"(?:^|\|) *ul? *=([^|]*)")
_EXPONENT_ARGUMENT = re.compile(r"\| *e *= *([-−+]?\d+) *(?:\||$)")
_COORDINATES = re.compile(r" *((?:[\d.]+\|){1,3})([NS])\|((?:[\d.]+\|){1,3})([EWO])(?:\||$)")
_END_OF_A_SENTENCE = re.compile(r"[.!?…。！？।؟][^\w\s]*$")
_SIDES = frozenset({"left", "right", "center"})
_SCRIPTS = frozenset({"c", "s", "t", "p", "tp", "w", "j", "cy", "poj", "hangul", "hanja", "rr", "mr"})
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"),
    "December",
)
_MONTH_OF = {str(number): month for number, month in enumerate(_MONTHS, 1)}

_RANGES = {
    **{"to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "+/-": " ± ", "±": " ± "},
    **{"+-": " ± ", "a": " a ", "à": " à ", "bis": " bis "},
    **{"-": "–", "–": "–", "to(-)": " to ", "and(-)": " and "},
}
_PREFIXES = frozenset({"da", *"yzafpnµμmcdhkMGTPEZY"})
_TAKE_PREFIXES = re.compile(
    "(?:m|g|s|A|K|mol|cd|Hz|N|Pa|J|W|C|V|F|Ω|S|Wb|T|H|lm|lx|Bq|Gy|Sv|kat|l|L|t|B|b|bit|byte|eV|pc|bar|Wh)(?:/.*|[²³⁰-⁹])?"
)
_SMALLER_UNITS = {"mi": ("yd", "ft", "ch"), "yd": ("ft", "in"), "ft": ("in",), "st": ("lb",), "lb": ("oz",)}
_UNITS = {
    **{"mm2": "mm²", "cm2": "cm²", "m2": "m²", "km2": "km²", "sqkm": "km²", "cm3": "cm³", "m3": "m³", "km3": "km³"},
    **{"sqmi": "sq mi", "sqft": "sq ft", "sqyd": "sq yd", "cuft": "cu ft", "cuin": "cu in", "cuyd": "cu yd"},
    **{"kph": "km/h", "kmh": "km/h", "km/hr": "km/h", "C": "°C", "F": "°F", "lbs": "lb", "foot": "ft", "inch": "in"},
    **{"USgal": "US gal", "impgal": "imp gal"},
}


def has_text(name: str) -> bool:
    """Whether a template with this normalised name has text. Cheap, since the template's parts needn't be joined."""
    return name in _VALUES or name.startswith(_FAMILIES) or name.partition(":")[0].rstrip() in _FUNCTIONS


def template_text(source: str) -> str:
    """The text of a template. Links and inner templates in `source`, its inside, are text already.

    "convert|5|km|mi"  ->  "5 km"        "lang|code=fr|text=mot"  ->  "mot"        "Infobox person|name=A"  ->  ""
    """
    name, _, rest = source.partition("|")
    function, colon, subject = name.partition(":")
    if colon and (call := _FUNCTIONS.get(normalised(function))):
        return call(subject.strip(), [argument.strip() for argument in rest.split("|")])
    name = normalised(name)
    value = _VALUES.get(name) or next((_VALUE_OF_FAMILY[one] for one in _FAMILIES if name.startswith(one)), None)
    return with_unit(value(arguments_of(rest)), rest) if value else ""


def with_unit(text: str, source: str) -> str:
    """ "5", "val|5|ul=km"  ->  "5 km"        "5", "val|5|e=6|u=m"  ->  "5×10^6 m" """
    if text and (exponent := _EXPONENT_ARGUMENT.search(source)):
        text += f"×10^{exponent[1]}"
    unit = _UNIT_ARGUMENT.search(source)
    return f"{text} {unit[1].strip()}".strip() if unit and text else text


def is_number(text: str) -> bool:
    return len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text) is not None


def measure(arguments: list[str]) -> str:
    """A number, or several with words between them, and a unit; "" for numbers that no word joins.

    ["10", "k", "m"]  ->  "10 km"        ["4", "-", "6"]  ->  "4–6"        ["26", "2035"]  ->  ""
    """
    parts = [argument for argument in arguments if argument]
    if len(parts) > 2 and parts[1] in _PREFIXES and _TAKE_PREFIXES.fullmatch(parts[2]):
        parts[1:3] = ["".join(parts[1:3])]
    text = _convert(parts)
    return "" if len(parts) > 1 and html.unescape(parts[1]).lstrip("-−+")[:1].isdigit() else text


def coordinates(source: str) -> str:
    """ "53|00|S|73|30|E|type:isle"  ->  "53°00′S 73°30′E"        "40 N"  ->  "" """
    found = _COORDINATES.match(source)
    if not found:
        return ""
    north, east = ("".join(map("".join, zip(found[group].split("|")[:-1], "°′″", strict=False))) for group in (1, 3))
    return f"{north}{found[2]} {east}{found[4]}"


def _argument(number: int) -> Value:
    """The named text, or the argument `number`, counted as an index of Python; else ""."""
    return lambda arguments: arguments.text() or "".join(arguments[number:][:1])


_first, _second, _third, _fourth, _last = map(_argument, (0, 1, 2, 3, -1))


def _words(number: int) -> Value:
    """The first `number` arguments."""
    return lambda arguments: " ".join(filter(None, arguments[:number]))


def _constant(text: str) -> Value:
    return lambda arguments: text


def _between(opening: str, closing: str) -> Value:
    def value(arguments: Arguments) -> str:
        text = _first(arguments)
        return f"{opening}{text}{closing}" if text else ""

    return value


def _prefix(text: str) -> Value:
    return _between(text, "")


def _quoted(arguments: Arguments) -> str:
    """The named text, else the first argument, else the longest that ends like a sentence.

    ["left", "To be."]  ->  "To be."        author="B"  ->  ""        szó="To be.", költő="B"  ->  "To be."
    """
    text = arguments.text(QUOTATION_NAMES) or next((one for one in arguments if one and one not in _SIDES), "")
    sentences = (value for value in arguments.named.values() if _END_OF_A_SENTENCE.search(value[-9:]))
    return text or max(sentences, key=len, default="")


def _block(arguments: Arguments) -> str:
    text = _quoted(arguments)
    return f"\n{text}\n" if text else ""


def _link(arguments: Arguments) -> str:
    """["A", "de", "B"]  ->  "A"        ["de", "A"]  ->  "A"        ["A", "de", "B"], lt="C"  ->  "C" """
    return arguments.text() or next((one for one in arguments if one and one not in LANGUAGES), "")


def _in_scripts(arguments: Arguments) -> str:
    """["Wort"]  ->  "Wort"        s="汉语", t="漢語", p="hànyǔ", links="no"  ->  "汉语, 漢語, hànyǔ" """
    scripts = (value for name, value in arguments.named.items() if value and name in _SCRIPTS)
    return _first(arguments) or ", ".join(dict.fromkeys(scripts))


def _date(arguments: Arguments) -> str:
    """["2010", "5", "12"]  ->  "12 May 2010"; with df="US"  ->  "May 12, 2010" """
    year, month, day = [*arguments, "", "", ""][:3]
    month, day = _MONTH_OF.get(month.lstrip("0"), month), day.lstrip("0")
    if day and arguments.named.get("df", "").lower() in ("us", "mdy"):
        return f"{month} {day}, {year}"
    return " ".join(filter(None, (day, month, year)))


def _as_of(arguments: Arguments) -> str:
    """["2010", "5"], lc="y"  ->  "as of May 2010"        ["2010"], since="y"  ->  "Since 2010" (Template:As of)"""
    named, date = arguments.named, _date(arguments)
    if named.get("alt") or not date:
        return named.get("alt", "")
    words = "" if named.get("bare") else "Since" if named.get("since") else "As of"
    words = words.lower() if named.get("lc") else words
    return " ".join(filter(None, (words, named.get("pre"), date))) + named.get("post", "")


def _formula(arguments: Arguments) -> str:
    """["SO", "4", "2-"]  ->  "SO4^2-" """
    return "".join(RAISED + one if one.endswith(("+", "-", "−")) else one for one in arguments)


def _power(arguments: list[str]) -> str:
    """["3"]  ->  "^3"        ["4.2", "5"]  ->  "4.2×10^5" """
    return f"^{arguments[0]}" if len(arguments) == 1 else "×10^".join(arguments[:2])


def _fraction(arguments: list[str]) -> str:
    """["1", "2"]  ->  "1/2"        ["3", "1", "2"]  ->  "3 1/2"        ["8"]  ->  "1/8" """
    if len(arguments) == 3:
        return f"{arguments[0]} {arguments[1]}/{arguments[2]}"
    return "/".join(arguments if len(arguments) == 2 else ["1", *arguments])


def _convert(arguments: list[str]) -> str:
    """The measure as the author wrote it, not the converted one (Template:Convert).

    ["5", "km", "mi"]  ->  "5 km"            ["2", "to", "3", "m2"]  ->  "2 to 3 m²"
    ["6", "ft", "2", "in", "m"]  ->  "6 ft 2 in"
    """
    if not arguments:
        return ""
    text, rest = arguments[0], arguments[1:]
    while len(rest) > 1 and rest[0] in _RANGES and _NUMBER.fullmatch(rest[1]):
        text, rest = text + _RANGES[rest[0]] + rest[1], rest[2:]
    if rest:
        unit, rest = rest[0], rest[1:]
        text = f"{text} {_UNITS.get(unit, unit)}".rstrip()
        while len(rest) > 1 and _NUMBER.fullmatch(rest[0]) and rest[1] in _SMALLER_UNITS.get(unit, ()):
            unit = rest[1]
            text, rest = f"{text} {rest[0]} {unit}", rest[2:]
    return text


def _choose(condition: bool, arguments: list[str]) -> str:
    return arguments[0] if condition else "".join(arguments[1:2])


def _switch(subject: str, cases: list[str]) -> str:
    """ "a", ["a", "b=1", "2"]  ->  "1"        "c", ["a", "b=1", "2"]  ->  "2" """
    matched, default = False, ""
    for case in cases:
        value, equals, result = case.partition("=")
        value = value.strip()
        matched = matched or value == subject
        if equals and matched:
            return result.strip()
        if not equals or value == "#default":
            default = (result if equals else case).strip()
    return default


# Parser functions: {{formatnum:1234}}, {{#if: text | then | else}}.
_FUNCTIONS: dict[str, Callable[[str, list[str]], str]] = {
    "formatnum": lambda subject, rest: subject,
    "lc": lambda subject, rest: subject.lower(),
    "uc": lambda subject, rest: subject.upper(),
    "lcfirst": lambda subject, rest: subject[:1].lower() + subject[1:],
    "ucfirst": lambda subject, rest: subject[:1].upper() + subject[1:],
    "plural": lambda subject, forms: forms[0 if subject == "1" else -1],
    "#if": lambda subject, rest: _choose(bool(subject), rest),
    "#ifeq": lambda subject, rest: _choose(subject == rest[0], rest[1:] or [""]),
    "#ifexist": lambda subject, rest: rest[0],
    "#switch": _switch,
    "#tag": lambda subject, rest: "" if subject.lower() == "ref" else rest[0],
}

FRACTIONS = ("frac", "sfrac", "fraction")
# Names of the same value, comma-separated: first those of the English Wikipedia, then other languages'.
_NAMES: dict[str, Value] = {
    "convert, cvt": _convert,
    "nowrap, nobr, nobold, noitalic, small, smaller, big, larger, center, em, strong, sic, linktext": _first,
    "abbr, tooltip, vanchor, visible anchor, script, mvar": _first,
    "flag, flagcountry, flagu": lambda arguments: arguments.named.get("name") or _first(arguments),
    "ill, ill2, interlanguage link, interlanguage link multi": _link,
    "sup, superscript, smallsup, exposant, hoch": lambda arguments: raised(_first(arguments)),
    "sub, subscript": _prefix(LOWERED),
    "su": lambda arguments: f"{LOWERED}{arguments.named.get('b', '')}{RAISED}{arguments.named.get('p', '')}",
    "math, var, samp, code, mono, key, kbd, smallcaps, sc, angbr, val": _first,
    "nihongo": lambda arguments: next(filter(None, [*arguments[:1], *arguments[2:3], *arguments[1:2]]), ""),
    "exp": _power,
    "polytonic, unicode, arabdin, ar, hayeren": _first,
    "lang, langx, audio, color, colour, colore, font color, resize, sort": _second,
    "ipa, transl, transliteration": _last,
    "zh, korean": _in_scripts,
    "quote, blockquote, block quote, cquote, bquote, quotation, rquote, poemquote, poem quote": _block,
    "quote box, quotebox, quote frame, pull quote, centered pull quote": _block,
    "citation needed span, cns, clarify span, dubious span, failed verification span": _first,  # around a passage
    **dict.fromkeys(FRACTIONS, _fraction),
    "ship, sortname": _words(2),
    "circa, c.": _prefix("c. "),
    "as of": _as_of,
    "start date, end date, birth date, death date, birth date and age, start date and age, dts": _date,
    "height": lambda arguments: " ".join(
        f"{value} {unit}" for unit in ("m", "cm", "ft", "in") if (value := arguments.named.get(unit))
    ),
    "us$, usd": _prefix("US$"),
    "gbp, £": _prefix("£"),
    "eur, euro, €": _prefix("€"),
    "isbn": _prefix("ISBN "),
    **{name: _prefix(f"{name.upper()}: ") for name in ("nyse", "nasdaq", "amex", "lse", "tsx", "asx", "sehk", "tyo")},
    "e, esp": _prefix("×10^"),
    **{name: _prefix(f"{name.upper()} ") for name in ("hms", "uss", "hmas", "hmcs", "ss", "rms", "usns", "jds")},
    "ndash, en dash, –": _constant("–"),
    "mdash, em dash, —": _constant("—"),
    "spaced ndash, spnd, sndash, snd, spaced en dash, dash": _constant(" – "),
    "spaced mdash, spmd, spaced em dash": _constant(" — "),
    "nbsp, space, spaces, thinspace, thinsp, nnbsp": _constant(" "),
    "·, middot, dot, •, bull": _constant(" · "),
    "', apostrophe": _constant("'"),
    "'s": _constant("'s"),
    "okina": _constant("ʻ"),
    "=": _constant("&#61;"),  # decoded once arguments are divided: in one, it is no sign between name and value
    "!": _constant("|"),
    "×, times": _constant("×"),
    "chem, chem2": _formula,
    "ruby, ruby-ja, furigana": _first,
    # French, German, Spanish, Italian, Portuguese, Dutch, Polish, Swedish, Catalan
    "langue, lang1, lengua, lingua, język, språk, taal": _second,
    "citation bloc, bloc citation, zitat, cita, citazione, citação, citaat, cytat, citat, citació, sitat": _block,
    "citát, sitaatti, lainaus, idézet, alıntı": _block,
    "citation, citation étrangère": _between("« ", " »"),
    '"': lambda arguments: f'"{_quoted(arguments)}"',
    "souligner, petites capitales, formatnombre": _first,
    "lien": lambda arguments: _link(arguments) or arguments.named.get("fr") or arguments.named.get("trad", ""),
    "unité, unidad, unità, nombre": _words(2),
    "date, date-": _words(3),
    # Russian, Ukrainian, Bulgarian
    "нп, нп1, нп2, нп3, нп4, нп5, не переведено, не переведено 3, не переведено 5": lambda arguments: (
        _second(arguments) or _first(arguments)
    ),
    "нобр, число, начало цитаты": _first,
    "цитата, цитат, цытата": _block,
    # Greek, Arabic, Persian, Hebrew, Chinese, Japanese, Korean
    "παράθεση, اقتباس, نقل قول, ציטוט, 引用, 引用文, 引文, 引言, 인용, 인용문": _block,
    "仮リンク, 読み仮名, 임시링크": _first,
    "le": lambda arguments: _third(arguments) or _first(arguments),
    "tsl": lambda arguments: _fourth(arguments) or _third(arguments),
}
_VALUES = {name: value for names, value in _NAMES.items() for name in names.split(", ")}
# By the beginnings of names, such as lang-de, Zitat-en and link-ja.
_VALUE_OF_FAMILY: dict[str, Value] = {
    "lang-": _in_scripts,
    "zitat-": _block,
    '"-': _VALUES['"'],
    "link-": _VALUES["le"],
}
_FAMILIES = tuple(_VALUE_OF_FAMILY)


_SYMBOLS = {
    name: symbol
    for pairs in (
        "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ",
        "lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω",
        "Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω times × cdot ·",
        "div ÷ pm ± mp ∓ ast * star ⋆ circ ∘ bullet • le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ equiv ≡ approx ≈ sim ∼",
        "simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪",
        "cap ∩ setminus ∖ emptyset ∅ varnothing ∅ forall ∀ exists ∃ neg ¬ land ∧ wedge ∧ lor ∨ vee ∨ oplus ⊕",
        "otimes ⊗ to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ mapsto ↦ leftrightarrow ↔",
        "Leftrightarrow ⇔ iff ⇔ implies ⇒ infty ∞ partial ∂ nabla ∇ sum ∑ prod ∏ int ∫ angle ∠ perp ⊥",
        "parallel ∥ mid | ldots … cdots ⋯ dots … prime ′ hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ degree ° R ℝ N ℕ Z ℤ",
        "Q ℚ C ℂ sin sin cos cos tan tan log log ln ln exp exp lim lim max max min min det det gcd gcd",
        "arg arg dim dim ker ker",
    )
    for name, symbol in zip(pairs.split()[::2], pairs.split()[1::2], strict=True)
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_FONT = re.compile(
    r"\\(?:math(?:rm|bf|it|sf|cal|bb|frak)|boldsymbol|text|textrm|operatorname|mbox|vec) *\{([^{}\\]*)\}"
)
_FRACTION = re.compile(r"\\[dt]?frac *\{([^{}\\]*)\} *\{([^{}\\]*)\}")
_ROOT = re.compile(r"\\sqrt *\{([^{}\\]*)\}")
_INDEX = re.compile(r"([\^_]) *\{([^{}\\]*)\}")
_DELIMITER = re.compile(r"\\(?:left|right|big|Big)\b(?=[^\w\s])")
_SPACING = re.compile(r"\\[,;:!> ]|\\q?quad\b|~")
_LEFT_OVER = re.compile(r"[\\{}&\n]")
_ONE_TERM = re.compile(r"[\w.∞′]*")
_LONGEST = 200


def math_text(tex: str) -> str:
    """A formula as text; "" if it needs more than letters, symbols, indices and simple fractions.

    "E=mc^2"  ->  "E=mc^2"        "\\alpha_{1} \\leq \\frac{a}{b+1}"  ->  "α_1 ≤ a/(b+1)"
    "\\begin{matrix}…"  ->  ""
    """
    text = tex.strip()
    if len(text) > _LONGEST:
        return ""
    if "\\" in text or "{" in text:
        text = _DELIMITER.sub("", _SPACING.sub(" ", text))
        text = _FONT.sub(r"\1", text)
        text = _COMMAND.sub(lambda command: _SYMBOLS.get(command[1], command[0]), text)
        text = _INDEX.sub(lambda index: index[1] + _term(index[2]), text)
        text = _ROOT.sub(lambda root: "√" + _term(root[1]), text)
        text = _FRACTION.sub(lambda fraction: f"{_term(fraction[1])}/{_term(fraction[2])}", text)
        text = _INDEX.sub(lambda index: index[1] + _term(index[2]), text)
    return "" if _LEFT_OVER.search(text) else " ".join(text.split()).rstrip(" ,.;")


def _term(text: str) -> str:
    """`text` in brackets, unless it is a single number or name."""
    text = text.strip()
    return text if _ONE_TERM.fullmatch(text) else f"({text})"
