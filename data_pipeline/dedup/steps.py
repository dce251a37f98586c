"""The steps of deduplication by name."""

from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.documents import EqualDocuments
from data_pipeline.dedup.lines import EqualLines
from data_pipeline.dedup.minhash import NearDuplicates
from data_pipeline.dedup.newest_url import NewestUrl
from data_pipeline.dedup.spans import EqualSpans
from data_pipeline.dedup.step import Step
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings

STEPS: dict[str, type[Step]] = {
    step.name: step
    for step in (NewestUrl, EqualLines, EqualSpans, Anchors, EqualSubstrings, EqualDocuments, NearDuplicates)
}


def step_of(name: str, config: DedupConfig) -> Step:
    """The step `name` with its settings."""
    return STEPS[name](getattr(config, STEPS[name].setting or name))
