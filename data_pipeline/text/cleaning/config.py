"""Settings of cleaning in a corpus file."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from data_pipeline.base.config_file import Section, TrueIsTheDefaults
from data_pipeline.text.cleaning import bad_words
from data_pipeline.text.cleaning.classifier import ClassifierConfig, content_of
from data_pipeline.text.cleaning.gopher import GopherConfig
from data_pipeline.text.cleaning.language import LanguageConfig
from data_pipeline.text.cleaning.rule import Rule, offered_rule

PAGE_FILTERS = ("language", "bad_words", "bad_words_fraction", "classifier")
"""The keys of the rules that drop a page after its lines were deduplicated."""
Profile = Literal["c4", "wikipedia", "none"]
_NameOfList = Annotated[str, AfterValidator(bad_words.list_of)]
_C4 = {
    "max_page_characters": 190_000,
    "web_rules": True,
    "max_word_length": 1000,
    "min_words_per_line": 5,
    "min_sentences_per_page": 3,
    "language": {"detector": "fast"},
    "bad_words": ["en"],
}


class CleaningConfig(Section):
    """Cleaning rules, in the order in which they are applied. A line or page exactly at a threshold is kept. As in C4,
    `language`, `bad_words` and `classifier` are applied after lines, spans and substrings have been deduplicated."""

    gone = {"pii": ([[], None], "gone; rules: [{rule: pii, kinds: [email, ip, phone]}] replaces it (examples/pii)")}

    profile: Profile = "c4"
    """Sets the defaults of the other keys. `c4`: every rule of C4 is on. `wikipedia`, `none`: only the rules named in
    the file are on."""
    max_page_characters: PositiveInt | None = None
    """Maximum number of characters of a page. Longer pages are dropped. null: no limit."""
    web_rules: bool = False
    """Apply C4's rules on content: terminal punctuation, JavaScript, policies, lorem ipsum, braces, citation marks."""
    max_word_length: PositiveInt | None = None
    """Maximum length of a word, in characters between white space. Lines with a longer word are dropped. null: no
    limit."""
    min_words_per_line: NonNegativeInt = 0
    """Minimum number of words of a line. Lines with fewer are dropped. 0: off."""
    min_sentences_per_page: NonNegativeInt = 0
    """Minimum number of sentences of a page. Pages with fewer are dropped. 0: off."""
    paragraphs: NonNegativeInt = 0
    """Minimum number of lines of at least 200 characters. Pages with fewer are dropped. Multilingual C4: 3. 0: off."""
    gopher: Annotated[GopherConfig | None, TrueIsTheDefaults] = None
    """Apply Gopher's rules for quality and repetition. true: with the published thresholds. null or false: off."""
    rules: list[Annotated[SerializeAsAny[Rule], BeforeValidator(offered_rule)]] = []
    """Rules of installed packages: the name of each, with its own keys."""
    language: LanguageConfig = LanguageConfig(detector="none")
    """Which languages to keep."""
    bad_words: list[_NameOfList] = []
    """Languages whose lists of bad words are used; a page with one of these words is dropped. If the language of a page
    is known, only that language's list counts. []: off."""
    bad_words_fraction: float = Field(1.0, ge=0, le=1)
    """The share of pages with a bad word that are dropped, chosen by URL. Multilingual C4: 0.999."""
    classifier: ClassifierConfig | None = None
    """A fastText classifier that decides which pages are kept. null: off."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_profile(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("profile", "c4") != "c4":
            return given
        return {**_C4, **given}

    @property
    def filters_pages(self) -> bool:
        """Whether a page may be dropped for its language, for bad words or by the classifier."""
        return self.language.detector != "none" or bool(self.bad_words) or self.classifier is not None

    def without_page_filters(self) -> "CleaningConfig":
        return self.model_copy(update={key: type(self).model_fields[key].default for key in PAGE_FILTERS})

    @property
    def identity(self) -> list[str]:
        """The checksum of the classifier's model, on which cleaned text depends besides these settings."""
        return [] if self.classifier is None else [content_of(self.classifier)]

    def described(self) -> dict[str, object]:
        """The settings, with the checksum of the classifier's model in place of its path."""
        settings = self.model_dump()
        if self.classifier is not None:
            settings["classifier"] = {**settings["classifier"], "path": content_of(self.classifier)}
        return settings

    @model_validator(mode="after")
    def _word_lists_exist(self) -> "CleaningConfig":
        if unknown := sorted(set(self.bad_words) - bad_words.languages()):
            known = ", ".join(sorted(bad_words.languages()))
            raise ValueError(f"bad_words: no list for {', '.join(unknown)}; there are {known}")
        return self
