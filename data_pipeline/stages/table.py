"""The list of all stages of a build, in order, and what follows from their declarations.

    python -c "from data_pipeline.stages.table import as_markdown; print(as_markdown())"

prints the table of docs/reference/stages.md.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from data_pipeline.base.formatting import human_size, markdown
from data_pipeline.base.open_store import open_store
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.engine.merging import MERGE_BYTES, merged_name, merging_units, unmerged_name
from data_pipeline.engine.work_units import Finished, Result, ResultType
from data_pipeline.stages import dedup, documents, evaluation_sets, shards, tokenizer, tokens
from data_pipeline.stages.dedup import LAST
from data_pipeline.stages.parts import PartsResult
from data_pipeline.stages.stage import PARTS, Amounts, AnyStage, Stage

_SETTING = re.compile(r"[a-z_]+[._][a-z_.]+")


def all_stages() -> list[AnyStage]:
    """All stages that a build may have, in order."""
    return [
        documents.STAGE,
        evaluation_sets.STAGE,
        *dedup.all_stages(),
        LAST,
        tokenizer.SAMPLING,
        tokenizer.STAGE,
        tokens.STAGE,
        shards.COUNT,
        shards.STAGE,
    ]


def stages_of(config: CorpusConfig, with_urls: bool = True) -> dict[str, AnyStage]:
    """The stages of a build, by name; `with_urls`: whether documents have URLs."""
    steps = {step.step for step in config.key_steps if with_urls or not step.compares_dropped_pages}
    return {
        stage.name: stage for stage in all_stages() if stage.applies(config) and (not stage.step or stage.step in steps)
    }


def stage_named(name: str) -> AnyStage | None:
    """The stage of this name, or the stage whose files a stage of this name merges."""
    return {stage.name: stage for stage in all_stages()}.get(unmerged_name(name))


def measure_of(name: str) -> str:
    """The `Kind.of` of what the stage of this name reads."""
    stage = stage_named(name)
    if stage is None:
        return PARTS.of
    return stage.reads[0].of if stage.name == name else stage.writes.of


def units_of(amounts: Amounts, with_urls: bool) -> dict[str, int]:
    """How many units each stage has, and the stage that merges its files."""
    found, opens = {}, open_store(amounts.config.output).most_opens
    for stage in stages_of(amounts.config, with_urls).values():
        found[stage.name] = number = stage.units(amounts)
        if stage.merge and (units := merging_units(number, stage.readers(amounts), opens)):
            found[merged_name(stage.name)] = units
    return found


def forget(corpus: Store, config: CorpusConfig) -> None:
    """Removes the results of stages that the config no longer asks for."""
    needed = stages_of(config)
    for folder in corpus.folders(".stages"):
        stage = stage_named(folder)
        if stage is not None and stage.name not in needed:
            corpus.delete_folder(f".stages/{folder}")
    if not any(step.compares_dropped_pages for step in config.key_steps):
        end = ".urls.parquet" if LAST.applies(config) else ".parquet"
        corpus.delete(name for name in corpus.names(PARTS.folder) if name.endswith(end))


@dataclass
class Built:
    """The finished units of each stage that has run, by stage and in order."""

    units: dict[str, Sequence[Finished[Result]]] = field(default_factory=dict)

    def of(self, stage: Stage[Any, ResultType]) -> Sequence[Finished[ResultType]]:
        """The units of a stage; none if it hasn't run."""
        return cast(Sequence[Finished[ResultType]], self.units.get(stage.name, ()))

    @property
    def left(self) -> Sequence[Finished[PartsResult]]:
        """The units that wrote the documents of the corpus."""
        return self.of(LAST) or self.of(documents.STAGE)


def as_markdown() -> str:
    """The table of docs/reference/stages.md; the steps of deduplication share the rows of their stages."""
    rows: dict[str, list[str]] = {}
    for stage in all_stages():
        name = f"…{stage.name.removeprefix(stage.step)}" if stage.step else stage.name
        reads, writes = ", ".join(kind.name for kind in stage.reads), stage.writes
        place = "" if writes.folder == ".stages" else f", in `{writes.folder}/`"
        memory = f"{stage.memory:g} bytes for each {stage.sized_by}" if stage.memory else ""
        way_out = _SETTING.sub(r"`\g<0>`", stage.way_out)
        written = f"{writes.name}: {writes.holds}{place}"
        rows[name] = [f"`{name}`", stage.unit, reads, written, memory, str(stage.cpus), way_out]
    merged = ["`…-merged`", "a group of files of a stage that has too many", "keys, duplicates, tokens", "the same"]
    rows["merged"] = [*merged, human_size(MERGE_BYTES), "1", "lower `ray.num_cpus`"]
    headings = ["stage", "a unit of work", "reads", "writes", "memory", "CPUs", "if memory runs out"]
    return "\n".join(markdown(headings, list(rows.values()), numbers=False))
