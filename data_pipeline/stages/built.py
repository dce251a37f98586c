"""What a build has finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from data_pipeline.execution.parts import PartsResult
from data_pipeline.execution.work_units import Finished, Result
from data_pipeline.stages.documents import DocumentsResult
from data_pipeline.stages.part_readings import LeftResult
from data_pipeline.stages.shards import RowsResult, ShardResult
from data_pipeline.stages.tokenizer import Candidates, TokenizerResult
from data_pipeline.stages.tokens import TokensResult


@dataclass
class Built:
    """The finished units of each stage, in order; [] for a stage that hasn't run.

    `steps` has those of deduplication by stage, except the last, `deduplicated`; `merged` those that merge tokens.
    """

    documents: list[Finished[DocumentsResult]]
    steps: Mapping[str, Sequence[Finished[Result]]] = field(default_factory=dict)
    deduplicated: list[Finished[LeftResult]] = field(default_factory=list)
    sampled: list[Finished[Candidates]] = field(default_factory=list)
    tokenizer: list[Finished[TokenizerResult]] = field(default_factory=list)
    tokens: list[Finished[TokensResult]] = field(default_factory=list)
    merged: Mapping[str, Sequence[Finished[Result]]] = field(default_factory=dict)
    rows: list[Finished[RowsResult]] = field(default_factory=list)
    shards: list[Finished[ShardResult]] = field(default_factory=list)

    @property
    def left(self) -> Sequence[Finished[PartsResult]]:
        """The units that wrote the documents of the corpus."""
        return self.deduplicated or self.documents

    @property
    def by_stage(self) -> dict[str, Sequence[Finished[Result]]]:
        """The units of each stage that has run, in order."""
        stages: dict[str, Sequence[Finished[Result]]] = {
            "documents": self.documents,
            **self.steps,
            "deduplicated": self.deduplicated,
            "tokenizer-sample": self.sampled,
            "tokenizer": self.tokenizer,
            "tokens": self.tokens,
            **self.merged,
            "rows": self.rows,
            "shards": self.shards,
        }
        return {name: units for name, units in stages.items() if units}
