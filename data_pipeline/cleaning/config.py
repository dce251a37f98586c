"""What a corpus file may say about cleaning."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from data_pipeline.cleaning import bad_words
from data_pipeline.cleaning.c4 import C4Rules
from data_pipeline.foundation.config_file import Section

Profile = Literal["c4", "wikipedia", "none"]


class LanguageConfig(Section):
    """Pages in other languages than `keep`, or less surely than `threshold`, are dropped."""

    detector: Literal["fast", "langdetect", "none"] = "fast"
    keep: list[str] = ["en"]
    threshold: float = Field(0.99, ge=0, le=1)


class CleaningConfig(Section):
    """Rules, in the order in which they are applied. `profile` sets the defaults of all that follows.

    `language` and `bad_words` look at what deduplication of lines and spans has left of a page, as in C4.

    c4: every rule of C4. wikipedia, none: no rule but those that are named here. `web_rules` are C4's on the content of
    lines: end marks, JavaScript, policies, lorem ipsum, curly brackets, citation marks. 0 or null leaves a rule out.
    `paragraphs`: multilingual C4's rule, that many lines of 200 characters. `bad_words`: languages whose pages are
    dropped for a word of their language's list, `bad_words_fraction` of them, chosen by URL (multilingual C4: 0.999).
    """

    profile: Profile = "c4"
    max_page_characters: PositiveInt | None = None
    web_rules: bool = False
    max_word_length: PositiveInt | None = None
    min_words_per_line: NonNegativeInt = 0
    min_sentences_per_page: NonNegativeInt = 0
    paragraphs: NonNegativeInt = 0
    language: LanguageConfig = LanguageConfig(detector="none")
    bad_words: list[str] = []
    bad_words_fraction: float = Field(1.0, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_profile(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("profile", "c4") != "c4":
            return given
        rules = C4Rules()
        defaults = {
            **rules.model_dump(),
            "web_rules": True,
            "language": {"detector": "fast"},
            "bad_words": ["en"],
        }
        return {**defaults, **given}

    @property
    def filters_pages(self) -> bool:
        """Whether a page may be dropped for its language or for bad words."""
        return self.language.detector != "none" or bool(self.bad_words)

    def without_page_filters(self) -> "CleaningConfig":
        return self.model_copy(update={"language": LanguageConfig(detector="none"), "bad_words": []})

    @model_validator(mode="after")
    def _word_lists_exist(self) -> "CleaningConfig":
        if unknown := sorted(set(self.bad_words) - bad_words.languages()):
            known = ", ".join(sorted(bad_words.languages()))
            raise ValueError(f"bad_words: no list for {', '.join(unknown)}; there are {known}")
        return self
