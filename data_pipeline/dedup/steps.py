"""The steps of deduplication by name, and those of installed packages."""

from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.documents import EqualDocuments
from data_pipeline.dedup.lines import EqualLines
from data_pipeline.dedup.minhash import NearDuplicates
from data_pipeline.dedup.newest_url import NewestUrl
from data_pipeline.dedup.spans import EqualSpans
from data_pipeline.dedup.step import Step
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings
from data_pipeline.foundation.plugins import offered

_SHIPPED = (NewestUrl, EqualLines, EqualSpans, Anchors, EqualSubstrings, EqualDocuments, NearDuplicates)
STEPS: dict[str, type[Step]] = {step.name: step for step in _SHIPPED} | offered("dedup step", Step)


def step_of(name: str, config: DedupConfig) -> Step:
    """The step `name` with its settings."""
    custom = {one.step: one for one in config.custom}
    return STEPS[name](custom.get(name) or getattr(config, STEPS[name].setting or name))
