"""What a corpus file may say about deduplication."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from data_pipeline.foundation.config_file import Section


class MinHashConfig(Section):
    """Near-duplicates: Jaccard similarity of the sets of `ngram` successive words, of about `threshold` or more."""

    threshold: float = Field(0.8, gt=0, lt=1)
    permutations: PositiveInt = 128
    ngram: PositiveInt = 5


class DedupConfig(Section):
    """Which duplicates are dropped, in this order. `minhash: true` stands for its defaults.

    `keys_per_bucket` bounds the memory of one decision: 70 bytes for each key of a line, 120 of a URL.
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
        """Names of the steps asked for, in their order."""
        return [name for name in ("urls", "lines", "spans", "documents", "minhash") if getattr(self, name)]
