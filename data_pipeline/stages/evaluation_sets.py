"""The stage of evaluation sets: one unit writes the n-grams that no document of the corpus may have."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.base.store import Store
from data_pipeline.config import SourceConfig
from data_pipeline.dedup.decontamination import INDEX, DecontaminationConfig, Index, Ngrams, read_items
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Result, Unit, read_finished
from data_pipeline.stages.inputs import InputFile, list_inputs
from data_pipeline.stages.kinds import NGRAMS, SETS
from data_pipeline.stages.stage import Stage

_BYTES = 30  # for a byte of the sets: 150 for a word


@dataclass(frozen=True)
class EvaluationSetsSpec:
    """The evaluation sets, with the files of each."""

    config: DecontaminationConfig
    files: list[list[InputFile]]


@dataclass(frozen=True)
class ReadSet:
    """Counts of an evaluation set. `too_short`: items whose texts are too short to look for."""

    name: str
    bytes: int
    items: int
    too_short: int


@dataclass(frozen=True)
class EvaluationSetsResult(Result):
    sets: list[ReadSet]


def check(config: DecontaminationConfig, store: Store) -> None:
    """Reads all evaluation sets, unless an earlier build has done so. Raises UserError for one that is missing, empty,
    damaged or of another format."""
    (unit,) = plan(config)
    if STAGE.fingerprint(unit) in {finished.fingerprint for finished in read_finished(STAGE, store)}:
        return
    for number, files in enumerate(unit.spec.files):
        one_set = config.sets[number]
        if not sum(1 for file in files for _ in read_items(file.path, one_set)):
            paths = one_set.path if isinstance(one_set.path, str) else ", ".join(one_set.path)
            raise UserError(f"{paths}: no items; expected format {one_set.format} (evaluation set {one_set.name!r})")


def plan(config: DecontaminationConfig) -> list[Unit[EvaluationSetsSpec]]:
    """The only unit of this stage."""
    files = _files(config)
    spec = EvaluationSetsSpec(config, files)
    settings = config.model_copy(update={"sets": [one.model_copy(update={"path": ""}) for one in config.sets]})
    stamps = [[(file.name, file.bytes, file.stamp) for file in own] for own in files]
    size = sum(file.bytes for own in files for file in own)
    return [Unit("ngrams", spec, fingerprint([settings, stamps]), (INDEX,), bytes=size, memory=_BYTES * size)]


def write_ngrams(context: Context, spec: EvaluationSetsSpec) -> EvaluationSetsResult:
    """Writes the n-grams of all items; returns how many items each set has, and how many are too short."""
    where: list[tuple[int, int, int]] = []  # set, file and line of each item
    all_files = [(number, file) for number, files in enumerate(spec.files) for file in files]

    def texts() -> Iterator[tuple[int, str]]:
        for file_number, (set_number, file) in enumerate(all_files):
            for item in read_items(file.path, spec.config.sets[set_number]):
                yield from ((len(where), text) for text in item.texts)
                where.append((set_number, file_number, item.line))

    ngrams = Ngrams.of(texts(), spec.config)
    items = np.array(where, dtype=np.int64)
    names = [file.name for _, file in all_files]
    Index(ngrams, items, [one_set.name for one_set in spec.config.sets], names).write(context.store)
    long_enough = items[ngrams.known, 0]
    read = []
    for number, one_set in enumerate(spec.config.sets):
        count = int((items[:, 0] == number).sum())
        size = sum(file.bytes for file in spec.files[number])
        read.append(ReadSet(one_set.name, size, count, count - int((long_enough == number).sum())))
    return EvaluationSetsResult(read)


STAGE = Stage(
    "evaluation-sets",
    2,
    write_ngrams,
    "look for fewer evaluation sets",
    plan=lambda build: plan(searched) if (searched := build.config.searched_for) else [],
    unit="all sets",
    reads=(SETS,),
    writes=NGRAMS,
    memory=f"{_BYTES} bytes for each byte of the sets",
)


def _files(config: DecontaminationConfig) -> list[list[InputFile]]:
    """The files of each set."""
    sources = [SourceConfig.model_construct(format="text", path=one.path, name=one.name) for one in config.sets]
    return [list_inputs(source, "evaluation set").files for source in sources]
