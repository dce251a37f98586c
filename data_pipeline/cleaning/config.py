"""Settings of cleaning in a corpus file."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from data_pipeline.cleaning import bad_words
from data_pipeline.cleaning.c4 import C4Rules
from data_pipeline.foundation.config_file import Section

Profile = Literal["c4", "wikipedia", "none"]


class LanguageConfig(Section):
    """Drops pages whose language isn't in `keep` or is detected with a probability below `threshold`."""

    detector: Literal["fast", "langdetect", "none"] = "fast"
    keep: list[str] = ["en"]
    threshold: float = Field(0.99, ge=0, le=1)


class CleaningConfig(Section):
    """Cleaning rules, in the order in which they are applied. 0 or null turns a rule off.

    `profile` sets the defaults of the other keys: with "c4", every rule of C4 is on; with "wikipedia" or "none", only
    the rules named in the file are. As in C4, `language` and `bad_words` are applied after lines and spans have been
    deduplicated.

    `web_rules`: C4's rules on content (end marks, JavaScript, policies, lorem ipsum, curly brackets, citation marks).
    `paragraphs`: multilingual C4's rule, the least number of lines with at least 200 characters. `bad_words`: languages
    whose lists of bad words are used. `bad_words_fraction`: the share of pages with a bad word that are dropped, chosen
    by URL (multilingual C4: 0.999).
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
