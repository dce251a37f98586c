"""Cleans one page: C4's rules for its length, lines, sentences and paragraphs, then Gopher's for the whole page,
then those of installed packages.

Personal data is masked in what is left. The language, bad words and the classifier come last, as in C4.
"""

from data_pipeline.cleaning.bad_words import drops_page
from data_pipeline.cleaning.c4_rules import clean_page, has_paragraphs, is_too_long
from data_pipeline.cleaning.classifier import scorer
from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.gopher import keep_page
from data_pipeline.cleaning.language import detector, keep_language
from data_pipeline.cleaning.pii import mask
from data_pipeline.text.document import Tally


class Cleaner:
    """The rules of a CleaningConfig as a function of one page."""

    def __init__(self, config: CleaningConfig):
        self._config = config
        self._filters = PageFilters(config)

    def __call__(self, text: str, url: str, language: str, tally: Tally) -> tuple[str, str] | None:
        """(cleaned text, language) of the page, or None if it is dropped. Counts what each rule drops.

        `language` is the one given by the source, or "".
        """
        config = self._config
        if config.web_rules or config.max_word_length or config.min_words_per_line or config.min_sentences_per_page:
            cleaned = clean_page(text, config, tally)
            if cleaned is None:
                return None
            text = cleaned
        elif is_too_long(text, config, tally):
            return None
        if config.paragraphs and not has_paragraphs(text, config.paragraphs):
            tally.drop("too_few_paragraphs", text)
            return None
        if config.gopher and not keep_page(text, config.gopher, tally):
            return None
        for rule in config.rules:
            left = rule.clean(text, url, tally)
            if left is None:
                return None
            text = left
        text = self.masked(text, tally)
        kept = self._filters(text, url, language, tally)
        return None if kept is None else (text, kept)

    def masked(self, text: str, tally: Tally) -> str:
        """`text` without the personal data that the config names."""
        return mask(text, self._config.pii, tally) if self._config.pii else text


class PageFilters:
    """The language and bad word rules and the classifier, which see a page after lines have been deduplicated."""

    def __init__(self, config: CleaningConfig):
        self._config = config
        self._detect = detector(config.language.detector) if config.language.detector != "none" else None
        self._score = scorer(config.classifier) if config.classifier else None

    def __call__(self, text: str, url: str, language: str, tally: Tally) -> str | None:
        """The language of the page, or None if the page is dropped, which is counted.

        It is the detected language if there is a detector, else `language`, the one given by the source. In a page of
        unknown language, the words of all enabled lists are searched for.
        """
        config = self._config
        if self._detect is not None:
            found = keep_language(text, self._detect, config.language.keep, config.language.threshold, tally)
            if found is None:
                return None
            language = found.language
        lists = [listed for listed in config.bad_words if language.partition("-")[0] in ("", listed)]
        if any(drops_page(text, listed, url, config.bad_words_fraction) for listed in lists):
            tally.drop("bad_words", url)  # the URL, not the text: the report shows examples
            return None
        if config.classifier and self._score and self._score(text) < config.classifier.threshold:
            tally.drop("classifier", text)
            return None
        return language
