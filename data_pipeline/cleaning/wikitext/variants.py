"""Chinese (and Serbian, Kazakh …) conversion markup, -{…}-, which writes one word in several scripts."""

import re

_VARIANTS = re.compile(r"-\{(?!\{)([^{}]*)\}-")
_FLAGS = re.compile(r" *(?:[A-Za-z+-]|zh[a-z-]*)(?: *; *(?:[A-Za-z+-]|zh[a-z-]*))* *\|")
_RULE = re.compile(r"[^:;]*?=>")
_CODE = re.compile(r" *([a-z]{2,3}(?:-[a-z]+)*) *:")
_HIDDEN_FLAGS = frozenset("HT-")


def one_variant(text: str) -> str:
    """Replaces each conversion markup by its first variant.

    "-{zh-hans:计算机;zh-hant:電腦}-"  ->  "计算机"        "-{A|zh-cn:软件; zh-tw:軟體}-"  ->  "软件"
    "-{名}-"  ->  "名"        "-{H|zh-cn:a;zh-tw:b}-"  ->  ""
    """
    return _VARIANTS.sub(lambda markup: _shown(markup[1]), text)


def _shown(inside: str) -> str:
    flags = _FLAGS.match(inside)
    if flags:
        if _HIDDEN_FLAGS & {flag.strip() for flag in flags[0][:-1].split(";")}:
            return ""
        inside = inside[flags.end() :]
    inside = _RULE.sub("", inside, count=1) if "=>" in inside else inside
    code = _CODE.match(inside)
    if code is None:
        return inside
    return inside[code.end() :].split(";")[0].strip()
