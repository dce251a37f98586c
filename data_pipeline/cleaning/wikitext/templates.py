"""Known templates that are words of their sentence, parser functions, and formulas that are a line of text."""

import html
import re
from collections.abc import Callable

_NUMBER = re.compile(r"[-−+]?[\d,.]*\d(?:[ +]?\d+[/⁄]\d+)?(?:e[-−+]?\d+)?")
_LONGEST_NUMBER = 40
_UNIT_ARGUMENT = re.compile(r"(?:^|\|) *ul? *=([^|]*)")
_EXPONENT_ARGUMENT = re.compile(r"\| *e *= *([-−+]?\d+) *(?:\||$)")
_COORDINATES = re.compile(r" *((?:[\d.]+\|){1,3})([NS])\|((?:[\d.]+\|){1,3})([EWO])(?:\||$)")
_ARGUMENT_NAME = re.compile(r"[\w .-]*")

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
    """Whether a template of this normalised name has text. A cheap check, before the template's parts are joined."""
    return name in _VALUES or name.startswith("lang-") or name.partition(":")[0].rstrip() in _FUNCTIONS


def template_text(source: str) -> str:
    """The text of a template. `source` is its inside, in which links and inner templates are text already.

    "convert|5|km|mi"  ->  "5 km"        "lang|fr|mot juste"  ->  "mot juste"        "Infobox person|name=A"  ->  ""
    """
    name, _, rest = source.partition("|")
    function, colon, subject = name.partition(":")
    if colon and (call := _FUNCTIONS.get(normalised(function))):
        return call(subject.strip(), [argument.strip() for argument in rest.split("|")])
    name = normalised(name)
    value = _first if name.startswith("lang-") else _VALUES.get(name)
    return with_unit(value(positional(rest)), rest) if value else ""


def normalised(name: str) -> str:
    """ "Lang_Fr "  ->  "lang fr" """
    return name.replace("_", " ").strip().lower()


def positional(rest: str) -> list[str]:
    """The positional arguments: unnamed ones in order, and numbered ones ("1=") at their positions.

    "a|x=1|b"  ->  ["a", "b"]        "2=b|1=a"  ->  ["a", "b"]
    """
    arguments: list[str] = []
    numbered: dict[str, str] = {}
    for argument in rest.split("|"):
        name, equals, value = argument.partition("=")
        if not equals or not _ARGUMENT_NAME.fullmatch(name):  # "x > 1 = true" has an equals sign but no name
            arguments.append(argument.strip())
        elif name.strip() in "123456789":
            numbered[name.strip()] = value.strip()
    for position, value in sorted(numbered.items()):
        arguments[int(position or 1) - 1 : int(position or 1)] = [value]
    return arguments


def with_unit(text: str, source: str) -> str:
    """ "5", "val|5|ul=km"  ->  "5 km"        "5", "val|5|e=6|u=m"  ->  "5×10^6 m" """
    if text and (exponent := _EXPONENT_ARGUMENT.search(source)):
        text += f"×10^{exponent[1]}"
    unit = _UNIT_ARGUMENT.search(source)
    return f"{text} {unit[1].strip()}".strip() if unit and text else text


def is_number(text: str) -> bool:
    return len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text) is not None


def measure(arguments: list[str]) -> str:
    """A number, or several with words between them, and a unit; "" for numbers that nothing joins.

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


def _argument(number: int) -> Callable[[list[str]], str]:
    """The argument `number`, from 0, or from -1 counted from the end; "" if there is none."""
    return lambda arguments: "".join(arguments[number:][:1])


_first, _second, _last = map(_argument, (0, 1, -1))


def _block(arguments: list[str]) -> str:
    return f"\n{arguments[0]}\n" if arguments else ""


def _constant(text: str) -> Callable[[list[str]], str]:
    return lambda arguments: text


def _prefix(text: str) -> Callable[[list[str]], str]:
    return lambda arguments: text + arguments[0] if arguments and arguments[0] else ""


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
    return arguments[0] if condition else _second(arguments)


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

# Names of the same value, comma-separated: first those of the English Wikipedia, then other languages'.
_NAMES: dict[str, Callable[[list[str]], str]] = {
    "convert, cvt": _convert,
    "nowrap, nobr, nobold, noitalic, small, smaller, big, larger, center, sup, sub, em, strong, sic, linktext": _first,
    "abbr, tooltip, ill, interlanguage link, flag, flagcountry, flagu, vanchor, visible anchor, script, mvar": _first,
    "math, var, samp, code, mono, key, kbd, smallcaps, sc, angbr, val": _first,
    "nihongo": lambda arguments: next(filter(None, [*arguments[:1], *arguments[2:3], *arguments[1:2]]), ""),
    "exp": _power,
    "polytonic, unicode, arabdin, ar, hayeren": _first,
    "lang, langx, transl, transliteration, audio, color, colour, colore, font color, resize": _second,
    "ipa": _last,
    "quote, blockquote, cquote, bquote, quotation, rquote, poemquote": _block,
    "frac, sfrac, fraction": _fraction,
    "ship": lambda arguments: " ".join(filter(None, arguments[:2])),
    "circa, c.": _prefix("c. "),
    "as of": _prefix("As of "),
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
    "=": _constant("="),
    "!": _constant("|"),
    "×, times": _constant("×"),
    "chem, chem2": "".join,
    "ruby, ruby-ja, furigana": _first,
    # French, German, Spanish, Italian, Portuguese, Dutch, Polish, Swedish, Catalan
    "langue, lang1, lengua, lingua, język, språk, taal": _second,
    "citation bloc, bloc citation, zitat, cita, citazione, citação, citaat, cytat, citat, citació, sitat": _block,
    "souligner, petites capitales, nombre, formatnombre": _first,
    "unité, unidad, unità": lambda arguments: " ".join(filter(None, arguments[:2])),
    "date, date-": lambda arguments: " ".join(filter(None, arguments[:3])),
    # Russian, Ukrainian, Bulgarian
    "нп, нп1, нп2, нп3, нп4, нп5, не переведено, не переведено 3, не переведено 5": lambda arguments: (
        _second(arguments) or _first(arguments)
    ),
    "нобр, число, цитата, начало цитаты": _first,
    # Chinese, Japanese, Korean
    "link-en, link-ja, le, 仮リンク, 読み仮名, 임시링크": _first,
}
_VALUES = {name: value for names, value in _NAMES.items() for name in names.split(", ")}


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
