"""The list of all stages of a build, in order: builds, forecasts and pages go through it.

    python -c "from data_pipeline.stages.table import as_markdown; print(as_markdown())"

prints the table of docs/reference/stages.md.
"""

import re
from collections.abc import Mapping

from data_pipeline.base.formatting import markdown
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.registry import key_steps
from data_pipeline.dedup.step import KeyStep
from data_pipeline.stages import documents, evaluation_sets, shards, tokenizer, tokens
from data_pipeline.stages.dedup import LAST, Comparing
from data_pipeline.stages.stage import AnyStage

_SETTING = re.compile(r"[a-z_]+[._][a-z_.]+")


def stages(steps: Mapping[str, type[KeyStep]]) -> list[AnyStage]:
    """The stages of a build with these `steps` that compare documents, in order. A build may not need all of them."""
    return [
        documents.STAGE,
        evaluation_sets.STAGE,
        *(stage for name, step in steps.items() for stage in Comparing(name, step).stages),
        LAST,
        tokenizer.SAMPLING,
        tokenizer.STAGE,
        tokens.STAGE,
        tokens.MERGED,
        shards.COUNT,
        shards.STAGE,
    ]


def stages_of(config: CorpusConfig) -> list[AnyStage]:
    """The stages of a build, in order."""
    return stages({step.step: type(step) for step in config.key_steps})


def forget(store: Store, config: CorpusConfig) -> None:
    """Removes the results of steps that the config no longer asks for."""
    others = {stage.name for stage in stages(key_steps())} - {stage.name for stage in stages_of(config)}
    for folder in others.intersection(store.folders(".stages")):
        store.delete_folder(f".stages/{folder}")


def as_markdown() -> str:
    """The table of docs/reference/stages.md. `…` stands for the name of a step."""
    rows = []
    for stage in stages({"…": KeyStep}):
        writes = stage.writes
        place = "" if writes.folder == ".stages" else f", in `{writes.folder}/`"
        written = f"{writes.name}: {writes.holds}{place}"
        way_out = _SETTING.sub(r"`\g<0>`", stage.way_out)
        reads = ", ".join(kind.name for kind in stage.reads)
        rows.append([f"`{stage.name}`", stage.unit, reads, written, stage.memory, str(stage.cpus), way_out])
    headings = ["stage", "a unit of work", "reads", "writes", "memory", "CPUs", "if memory runs out"]
    return "\n".join(markdown(headings, rows, numbers=False))
