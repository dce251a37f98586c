"""Settings of deduplication in a corpus file, and its steps by name."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, PositiveInt, SerializeAsAny

from data_pipeline.base.config_file import Section, TrueIsTheDefaults
from data_pipeline.base.packages import offered
from data_pipeline.dedup.equal import EqualDocuments, EqualLines, EqualSpans
from data_pipeline.dedup.minhash import MinHashConfig, NearDuplicates
from data_pipeline.dedup.newest_url import NewestUrl
from data_pipeline.dedup.step import Step, StepConfig, custom_step
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings, SubstringsConfig

_SHIPPED = (NewestUrl, EqualLines, EqualSpans, Anchors, EqualSubstrings, EqualDocuments, NearDuplicates)
STEPS: dict[str, type[Step]] = {step.name: step for step in _SHIPPED}
STEPS |= offered("dedup_steps", Step, STEPS)
"""All steps by name: those that ship, in their order, and those of installed packages."""


class DedupConfig(Section):
    """The kinds of duplicates to drop, in this order."""

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
    """Drop near-duplicates. true: with the defaults below. null or false: off."""
    custom: list[Annotated[SerializeAsAny[StepConfig], BeforeValidator(custom_step)]] = []
    """Steps of installed packages, which run after all others: the name of each, with its own keys."""
    keys_per_bucket: PositiveInt = 2**24
    """Number of dedup keys that a task compares at once. It bounds the task's memory: 70 bytes for each line, 120 for
    each URL."""

    @property
    def steps(self) -> list[str]:
        """The names of the enabled steps, in their order. "anchors" finds candidates for "substrings"."""
        steps = [step.name for step in _SHIPPED if getattr(self, step.setting or step.name)]
        return [*steps, *(one.step for one in self.custom)]


def step_of(name: str, config: DedupConfig) -> Step:
    """The step `name` with its settings."""
    custom = {one.step: one for one in config.custom}
    return STEPS[name](custom.get(name) or getattr(config, STEPS[name].setting or name))
