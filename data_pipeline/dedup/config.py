"""Settings of deduplication in a corpus file."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, SerializeAsAny, field_validator, model_validator

from data_pipeline.dedup.step import StepConfig, custom_step
from data_pipeline.foundation.config_file import Section


class MinHashConfig(Section):
    """Near-duplicates, by the estimated Jaccard similarity of their sets of successive words."""

    bands: PositiveInt = 14
    """Parts of a signature; documents that agree in one are near-duplicates. datatrove: 14, as for FineWeb."""
    rows: PositiveInt = 8
    """Hash values of a band; more find fewer pairs. 14 bands of 8 find 92 % of the pairs of similarity 0.8."""
    threshold: float | None = Field(None, gt=0, lt=1)
    """Instead of `bands` and `rows`: the similarity around which those are chosen that miss and mistake the fewest
    pairs. About half of the pairs there are found. null: `bands` and `rows`."""
    permutations: PositiveInt = 128
    """The most hash values of a document, for `threshold`; more make it sharper and take longer."""
    ngram: PositiveInt = 5
    """Successive words in an element of a document's set."""

    @model_validator(mode="after")
    def _one_way_to_set_the_bands(self) -> "MinHashConfig":
        default = MinHashConfig.model_fields
        if self.threshold is None and self.permutations != default["permutations"].default:
            raise ValueError("permutations goes with threshold; without it, set bands and rows")
        if self.threshold is not None and (self.bands, self.rows) != (
            default["bands"].default,
            default["rows"].default,
        ):
            raise ValueError("threshold chooses bands and rows; set it or them")
        return self


class SubstringsConfig(Section):
    """Text that occurs several times, whatever stands around it."""

    words: int = Field(50, ge=2)
    """The shortest repeat to look for, in words between white space; one is about 1.3 tokens of English."""


class DedupConfig(Section):
    """The kinds of duplicates to drop, in this order."""

    urls: Literal["newest"] | None = "newest"
    """Which page of a URL is kept. null: all of them."""
    lines: bool = True
    """Drop all copies of a line but one, whatever their case and the white space around them."""
    spans: bool = False
    """Drop all copies but one of any three successive sentences, whatever their case and white space."""
    substrings: SubstringsConfig | None = None
    """Drop all copies but one of any text of 50 words or more that occurs several times, case and punctuation
    included. true: with the default below. null or false turns it off."""
    documents: bool = True
    """Drop all copies of a text but one."""
    minhash: MinHashConfig | None = None
    """Drop near-duplicates. true: with the defaults below. null or false turns it off."""
    custom: list[SerializeAsAny[StepConfig]] = []
    """Steps of installed packages, after all others: the name of each, with its own keys."""
    keys_per_bucket: PositiveInt = 2**24
    """Keys that a task compares at once, which bounds its memory: 70 bytes for each line, 120 for each URL."""

    @field_validator("substrings", "minhash", mode="before")
    @classmethod
    def _true_is_the_defaults(cls, given: Any) -> Any:
        return ({} if given else None) if isinstance(given, bool) else given

    @field_validator("custom", mode="before")
    @classmethod
    def _steps_are_offered(cls, given: Any) -> Any:
        return [custom_step(one) for one in given] if isinstance(given, list) else given

    @property
    def steps(self) -> list[str]:
        """The names of the enabled steps, in their order. "anchors" finds where equal substrings may be."""
        names = ("urls", "lines", "spans", "substrings", "documents", "minhash")
        steps = [name for name in names if getattr(self, name)]
        if self.substrings:
            steps.insert(steps.index("substrings"), "anchors")
        return [*steps, *(one.step for one in self.custom)]
