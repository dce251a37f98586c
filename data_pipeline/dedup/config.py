"""Settings of deduplication in a corpus file."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import PositiveInt

from data_pipeline.base.config_file import Section, TrueIsTheDefaults
from data_pipeline.dedup.equal import EqualDocuments, EqualLines, EqualSpans
from data_pipeline.dedup.minhash import MinHashConfig, NearDuplicates
from data_pipeline.dedup.newest_url import NewestUrl
from data_pipeline.dedup.step import KeyStep
from data_pipeline.dedup.substrings import EqualSubstrings, SubstringsConfig


class DedupConfig(Section):
    """The kinds of duplicates to drop, in this order. The list `steps` is for another order, and for steps of installed
    packages."""

    gone = {"custom": ([[], None], "gone; list all steps under `steps`, also a package's")}

    urls: Literal["newest"] | None = "newest"
    """Which page of a URL is kept. null: all of them."""
    lines: bool = True
    """Drop all copies of a line but one, whatever their case and the white space around them."""
    spans: bool = False
    """Drop all copies but one of any three successive sentences, whatever their case and white space."""
    substrings: Annotated[SubstringsConfig | None, TrueIsTheDefaults] = None
    """Drop all copies but one of any text of 50 words or more, compared with case and punctuation. true: with the
    default below. null or false: off."""
    documents: bool = True
    """Drop all copies of a text but one."""
    minhash: Annotated[MinHashConfig | None, TrueIsTheDefaults] = None
    """Drop near-duplicates. true: with its defaults. null or false: off."""
    keys_per_bucket: PositiveInt = 2**24
    """Number of dedup keys that a task compares at once. It bounds the task's memory: 70 bytes for each line, 120 for
    each URL."""

    def steps(self, min_sentences: int) -> Iterator[KeyStep]:
        """The enabled steps, in order. Texts that a step shortens have at least `min_sentences` left."""
        if self.urls:
            yield NewestUrl()
        if self.lines:
            yield EqualLines(min_sentences=min_sentences)
        if self.spans:
            yield EqualSpans(min_sentences=min_sentences)
        if self.substrings:
            yield EqualSubstrings(min_sentences=min_sentences, **dict(self.substrings))
        if self.documents:
            yield EqualDocuments()
        if self.minhash:
            yield NearDuplicates(**dict(self.minhash))
