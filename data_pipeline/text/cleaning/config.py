"""Settings of cleaning in a corpus file."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    SerializeAsAny,
    model_validator,
)

from data_pipeline.base import packages
from data_pipeline.base.config_file import Section, TrueIsTheDefaults
from data_pipeline.text.cleaning.bad_words import BadWords, ListNames
from data_pipeline.text.cleaning.classifier import Classifier, ClassifierConfig, content_of
from data_pipeline.text.cleaning.gopher import Gopher, GopherConfig
from data_pipeline.text.cleaning.language import Language, LanguageConfig
from data_pipeline.text.cleaning.page import CleanPage, PageConfig, Paragraphs
from data_pipeline.text.step import Rule, Step


def _rule(given: object) -> object:
    """The rule of an installed package that settings name under `step` or, as earlier, under `rule`. Raises ValueError
    if no package has a rule of this name."""
    if not isinstance(given, dict):
        return given
    settings = {"step" if key == "rule" else key: value for key, value in given.items()}
    found = packages.named(settings, "step", "steps", Step)
    if not issubclass(found, Rule):
        raise ValueError(f"step: {settings['step']} is no Rule; put it into the list `steps`")
    return found.model_validate(settings)


Profile = Literal["c4", "wikipedia", "none"]
_C4 = {
    "max_page_characters": 190_000,
    "web_rules": True,
    "max_word_length": 1000,
    "min_words_per_line": 5,
    "min_sentences_per_page": 3,
    "language": {"detector": "fast"},
    "bad_words": ["en"],
}


class _Profile(Section):
    profile: Profile = "c4"
    """Sets the defaults of the other keys. `c4`: every rule of C4 is on. `wikipedia`, `none`: only the rules named in
    the file are on."""


class CleaningConfig(PageConfig, _Profile):
    """Cleaning rules, in the order in which they are applied. A line or page exactly at a threshold is kept. As in C4,
    `language`, `bad_words` and `classifier` are applied after lines, spans and substrings have been deduplicated. The
    list `steps` is for another order."""

    gone = {"pii": ([[], None], "gone; rules: [{step: pii, kinds: [email, ip, phone]}] replaces it (examples/pii)")}

    paragraphs: NonNegativeInt = 0
    """Minimum number of lines of at least 200 characters. Pages with fewer are dropped. Multilingual C4: 3. 0: off."""
    gopher: Annotated[GopherConfig | None, TrueIsTheDefaults] = None
    """Apply Gopher's rules for quality and repetition. true: with the published thresholds. null or false: off."""
    rules: list[Annotated[SerializeAsAny[Rule], BeforeValidator(_rule)]] = []
    """Rules of installed packages: the name of each, with its own keys."""
    language: LanguageConfig = LanguageConfig(detector="none")
    """Which languages to keep."""
    bad_words: ListNames = []
    """Languages whose lists of bad words are used; a page with one of these words is dropped. If the language of a page
    is known, only that language's list counts. []: off."""
    bad_words_fraction: float = Field(1.0, ge=0, le=1)
    """The share of pages with a bad word that are dropped, chosen by URL or, without a URL, by id. Multilingual C4:
    0.999."""
    classifier: ClassifierConfig | None = None
    """A fastText classifier that decides which pages are kept. null: off."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_profile(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("profile", "c4") != "c4":
            return given
        return {**_C4, **given}

    @property
    def of_pages(self) -> Iterator[Rule]:
        """The rules that come before deduplication, in order."""
        page = {key: getattr(self, key) for key in PageConfig.model_fields}
        if any(page.values()):
            yield CleanPage(**page)
        if self.paragraphs:
            yield Paragraphs(minimum=self.paragraphs)
        if self.gopher:
            yield Gopher(**dict(self.gopher))
        yield from self.rules

    @property
    def of_what_is_left(self) -> Iterator[Rule]:
        """The rules that come after the steps of deduplication that shorten texts, in order."""
        if self.language.detector != "none":
            yield Language(**dict(self.language))
        if self.bad_words:
            yield BadWords(languages=self.bad_words, fraction=self.bad_words_fraction)
        if self.classifier:
            yield Classifier(**dict(self.classifier))

    def described(self) -> dict[str, object]:
        """The settings, with the checksum of the classifier's model in place of its path."""
        settings = self.model_dump()
        if self.classifier is not None:
            settings["classifier"] = {**settings["classifier"], "path": content_of(self.classifier)}
        return settings
