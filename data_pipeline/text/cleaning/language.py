"""Language detection, and the rule that keeps the configured languages.

- `langdetect` is the detector that C4 used. It takes longer than all other rules together.
- `fast` is CLD2, which is 40 times as fast and has its model inside the package. For a page of several languages, CLD2
  reports the share of each, so the page falls below the threshold; langdetect reports one language as certain.
"""

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import resources
from typing import Literal, NamedTuple

import pycld2
from pydantic import Field, model_validator

from data_pipeline.base.config_file import Section
from data_pipeline.text.document import Document, Dropped, Tally
from data_pipeline.text.languages import shortest_tag
from data_pipeline.text.step import Rule


class LanguageConfig(Section):
    """Drops pages whose language isn't in `keep` or is detected with a probability below `threshold`."""

    detector: Literal["fast", "langdetect", "none"] = "fast"
    """What detects the language of a page. `fast`: CLD2. `langdetect`: C4's own, 40 times slower. `none`: no page is
    dropped for its language."""
    keep: list[str] = ["en"]
    """Language codes of the pages to keep, as the detector spells them."""
    threshold: float = Field(0.99, ge=0, le=1)
    """Minimum probability of the detected language."""

    @model_validator(mode="after")
    def _codes_are_known(self) -> "LanguageConfig":
        if self.detector != "none":
            problems = [problem for code in self.keep if (problem := unknown_code(code, self.detector))]
            if problems:
                raise ValueError(f"keep: {'; '.join(problems)}")
        return self


class Detection(NamedTuple):
    """The most probable language, as a BCP 47 code ("en", "zh-cn"), and its probability, 0 to 1."""

    language: str
    probability: float


DetectorName = Literal["fast", "langdetect"]
Detector = Callable[[str], Detection | None]


def detector(name: DetectorName) -> Detector:
    """A deterministic function from a text to its `Detection`, or to None if no language is detected.

    detector("fast")("Ulm liegt an der Donau und ist eine alte Stadt.")  ->  Detection("de", 1.0)
    """
    return {"fast": _cld2, "langdetect": _langdetect}[name]


@functools.cache
def codes(name: DetectorName) -> dict[str, str]:
    """The codes of the languages that a detector knows, each with the English name, or "" without one.

    codes("fast")["de"]  ->  "german"
    """
    renamed = {language: _RENAMED.get(code, code) for language, code in pycld2.LANGUAGES}
    names = {code: language.lower() for language, code in reversed(renamed.items())}
    if name == "fast":
        return {code: names[code] for code in (renamed[language] for language in pycld2.DETECTED_LANGUAGES)}
    profiles = resources.files("langdetect") / "profiles"
    return {profile.name: names.get(profile.name, "") for profile in profiles.iterdir()}


def unknown_code(code: str, name: DetectorName) -> str:
    """Why the detector `name` never returns `code`, and which code is probably meant; "" if it does."""
    known = codes(name)
    if any(code in (one, one.partition("-")[0]) for one in known):
        return ""
    meant = [one for one, language in known.items() if language == code.lower()]
    meant += [_RENAMED[code]] if _RENAMED.get(code) in known else []
    meant += [one for one in known if one == shortest_tag(code).partition("-")[0]]
    advice = f"did you mean {' or '.join(meant)}?" if meant else "codes are such as en, de and zh-cn"
    return f"{code!r} is no language code of detector {name}; {advice}"


class Language(LanguageConfig, Rule):
    """Drops pages in other languages, and sets the language of the others."""

    step: Literal["language"] = "language"

    def apply(self, document: Document, tally: Tally) -> Document | Dropped:
        if self.detector == "none":
            return document
        found = kept_language(document.text, detector(self.detector), self.keep, self.threshold)
        if isinstance(found, Dropped):
            return found
        return document if found == document.language else replace(document, language=found)


def kept_language(text: str, detect: Detector, keep: Collection[str], threshold: float) -> str | Dropped:
    """The language of `text` if it is in `keep` ("zh" keeps "zh-cn" too), with a probability of `threshold` or more.

    As in C4, only the most probable language counts, and its probability is checked before its name. Other texts are
    dropped as `language_undetected`, `language_low_confidence` or `language_other`.
    """
    detection = detect(text)
    if detection is None:
        return Dropped("language_undetected", text)
    if detection.probability < threshold:
        return Dropped("language_low_confidence", text)
    if detection.language not in keep and detection.language.partition("-")[0] not in keep:
        return Dropped("language_other", text)
    return detection.language


def _langdetect(text: str) -> Detection | None:
    """langdetect (Nakatani 2010) with seed 0, as TFDS `c4_utils` uses it."""
    import langdetect  # 120 ms, and few configs use it

    langdetect.DetectorFactory.seed = 0  # each text is sampled with its own generator
    try:
        predictions = langdetect.detect_langs(text)
    except langdetect.LangDetectException:
        return None
    return Detection(predictions[0].lang, predictions[0].prob) if predictions else None


# Characters that CLD2 refuses: control characters and noncharacters.
_REFUSED = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | last) for plane in range(17) for last in (0xFFFE, 0xFFFF))
    + "]"
)
_RENAMED = {"iw": "he", "jw": "jv", "zh-Hant": "zh-tw"}  # outdated codes of CLD2


def _cld2(text: str) -> Detection | None:
    """CLD2 (Sites 2013). `probability`: the top language's share of the text whose language is known; 0 if CLD2 says
    that its answer is unreliable."""
    try:
        reliable, _, found = pycld2.detect(text.encode(), isPlainText=True)
    except pycld2.error:  # rare, so this is cheaper than checking every character first
        reliable, _, found = pycld2.detect(_REFUSED.sub(" ", text).encode(), isPlainText=True)
    known = {code: percent for _, code, percent, _ in found if code != "un" and percent}
    if not known:
        return None
    language = max(known, key=lambda code: known[code])
    share = known[language] / sum(known.values()) if reliable else 0.0
    return Detection(_RENAMED.get(language, language), share)
