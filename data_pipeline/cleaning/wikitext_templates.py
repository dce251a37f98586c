"""Templates that stand for words of the sentence they are in; every other template is left out of the text."""

import re
from collections.abc import Callable

_NUMBER = re.compile(r"[-−+]?[\d,.]*\d(?:[ +]?\d+[/⁄]\d+)?(?:e[-−+]?\d+)?")
_ARGUMENT_NAME = re.compile(r"[\w .-]*")

_RANGES = {
    **{"to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "+/-": " ± ", "±": " ± "},
    **{"-": "–", "–": "–", "to(-)": " to ", "and(-)": " and "},
}
_SMALLER_UNITS = {"mi": ("yd", "ft", "ch"), "yd": ("ft", "in"), "ft": ("in",), "st": ("lb",), "lb": ("oz",)}
_UNITS = {
    **{"mm2": "mm²", "cm2": "cm²", "m2": "m²", "km2": "km²", "sqkm": "km²", "cm3": "cm³", "m3": "m³", "km3": "km³"},
    **{"sqmi": "sq mi", "sqft": "sq ft", "sqyd": "sq yd", "cuft": "cu ft", "cuin": "cu in", "cuyd": "cu yd"},
    **{"kph": "km/h", "kmh": "km/h", "km/hr": "km/h", "C": "°C", "F": "°F", "lbs": "lb", "foot": "ft", "inch": "in"},
    **{"USgal": "US gal", "impgal": "imp gal"},
}


def has_text(name: str) -> bool:
    """Whether a template of this name contributes anything: a cheap question, asked before its parts are joined."""
    name = _normalised(name)
    return name in _VALUES or name.startswith(("lang-", *_FUNCTIONS))


def template_text(source: str) -> str:
    """What a template contributes to the text; `source` is its inside, with links and inner templates already text.

    "convert|5|km|mi"  ->  "5 km"        "lang|fr|mot juste"  ->  "mot juste"        "Infobox person|name=A"  ->  ""
    """
    name, _, rest = source.partition("|")
    name = _normalised(name)
    if name.startswith(_FUNCTIONS):
        return name.partition(":")[2].strip()
    value = _first if name.startswith("lang-") else _VALUES.get(name)
    return value(_positional(rest)) if value else ""


def _normalised(name: str) -> str:
    return name.replace("_", " ").strip().lower()


def _positional(rest: str) -> list[str]:
    """Unnamed arguments in their order, and those that are numbered instead ("1=") in their places.

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


def _first(arguments: list[str]) -> str:
    return arguments[0] if arguments else ""


def _second(arguments: list[str]) -> str:
    return arguments[1] if len(arguments) > 1 else ""


def _last(arguments: list[str]) -> str:
    return arguments[-1] if arguments else ""


def _block(arguments: list[str]) -> str:
    return f"\n{arguments[0]}\n" if arguments else ""


def _constant(text: str) -> Callable[[list[str]], str]:
    return lambda arguments: text


def _prefix(text: str) -> Callable[[list[str]], str]:
    return lambda arguments: text + arguments[0] if arguments and arguments[0] else ""


def _ship(arguments: list[str]) -> str:
    return " ".join(filter(None, arguments[:2]))


def _fraction(arguments: list[str]) -> str:
    """["1", "2"]  ->  "1/2"        ["3", "1", "2"]  ->  "3 1/2"        ["8"]  ->  "1/8" """
    if len(arguments) == 3:
        return f"{arguments[0]} {arguments[1]}/{arguments[2]}"
    return "/".join(arguments if len(arguments) == 2 else ["1", *arguments])


def _convert(arguments: list[str]) -> str:
    """The measure as its author gave it, not the converted one (Template:Convert).

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


# Parser functions whose argument follows a colon: {{formatnum:1234}}.
_FUNCTIONS = ("formatnum:", "lc:", "uc:", "lcfirst:", "ucfirst:")

# Names of the same value, comma-separated, as they are on the English Wikipedia.
_NAMES: dict[str, Callable[[list[str]], str]] = {
    "convert, cvt": _convert,
    "nowrap, nobr, nobold, noitalic, small, smaller, big, larger, center, sup, sub, em, strong, sic, linktext": _first,
    "abbr, tooltip, ill, interlanguage link, flag, flagcountry, flagu, vanchor, visible anchor, script, mvar": _first,
    "math, var, samp, code, mono, key, kbd, smallcaps, sc, angbr, nihongo, val": _first,
    "polytonic, unicode, arabdin, ar, hayeren": _first,
    "lang, langx, transl, transliteration, audio, color, colour, font color, resize": _second,
    "ipa": _last,
    "quote, blockquote, cquote, bquote, quotation, rquote, poemquote": _block,
    "frac, sfrac, fraction": _fraction,
    "ship": _ship,
    "circa, c.": _prefix("c. "),
    "as of": _prefix("As of "),
    "us$, usd": _prefix("US$"),
    "gbp, £": _prefix("£"),
    "eur, euro, €": _prefix("€"),
    "isbn": _prefix("ISBN "),
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
}
_VALUES = {name: value for names, value in _NAMES.items() for name in names.split(", ")}
