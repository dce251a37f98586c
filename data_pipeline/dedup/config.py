"""Settings of deduplication in a corpus file."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from data_pipeline.foundation.config_file import Section


class MinHashConfig(Section):
    """Near-duplicates: the Jaccard similarity of their sets of `ngram` successive words is near `threshold` or more."""

    threshold: float = Field(0.8, gt=0, lt=1)
    permutations: PositiveInt = 128
    ngram: PositiveInt = 5


class DedupConfig(Section):
    """The kinds of duplicates to drop, in this order. `minhash: true` means its defaults.

    `keys_per_bucket` bounds the memory that a task needs to compare keys: 70 bytes for each line, 120 for each URL.
    """

    urls: Literal["newest"] | None = "newest"
    lines: bool = True
    spans: bool = False
    documents: bool = True
    minhash: MinHashConfig | None = None
    keys_per_bucket: PositiveInt = 2**24

    @field_validator("minhash", mode="before")
    @classmethod
    def _true_is_the_defaults(cls, given: Any) -> Any:
        return ({} if given else None) if isinstance(given, bool) else given

    @property
    def steps(self) -> list[str]:
        """The names of the enabled steps, in their order."""
        return [name for name in ("urls", "lines", "spans", "documents", "minhash") if getattr(self, name)]
