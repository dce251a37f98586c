"""A stage of a build: how its units are planned from what is known, and what it declares. `table` lists all stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from data_pipeline.base.formatting import human_size
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.engine import merging, work_units
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import MERGE_BYTES, MergeSpec
from data_pipeline.engine.work_units import Finished, Result, ResultType, Spec, Unit
from data_pipeline.stages.inputs import InputFile
from data_pipeline.stages.kinds import Kind

Made = TypeVar("Made")


@dataclass
class Build:
    """What is known of a build: all that the plan of a stage depends on. In a forecast, results are expected ones.

    Attributes:
        inputs: the files of all sources, in order.
        strict: True: the build ends if an input is damaged.
        units: the finished units of each stage so far, by the stage's name.
    """

    config: CorpusConfig
    store: Store
    inputs: Sequence[InputFile]
    strict: bool = False
    units: dict[str, Sequence[Finished[Result]]] = field(default_factory=dict)
    _made: dict[str, Any] = field(default_factory=dict)

    def of(self, stage: work_units.Stage[Any, ResultType]) -> Sequence[Finished[ResultType]]:
        """The units of a stage; none if it has none or hasn't run."""
        return cast(Sequence[Finished[ResultType]], self.units.get(stage.name, ()))

    def recorded(self, stage: work_units.Stage[Any, Any], kind: type[Made]) -> Iterator[Made]:
        """The whole results of the units of a stage, which are of `kind`, from its records: one at a time, in no order.

        Reports read them, so that the driver doesn't hold all counts of all units.
        """
        if self.of(stage):
            yield from (unit.result for unit in work_units.recorded(stage, cast(Any, kind), self.store))

    def cached(self, key: str, make: Callable[[], Made]) -> Made:
        """The result of `make`, which plans share under `key`."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])


@dataclass(frozen=True, kw_only=True)
class Stage(work_units.Stage[Spec, ResultType]):
    """A stage, with what drives a build, and what plans, reports and pages need to know.

    Attributes:
        plan: `plan(build)` gives the units, in order; none if the build doesn't need the stage.
        unit: what a unit works on.
        memory: how much memory a unit asks for, in words.
        completes: the kinds of files that are complete after this stage. Other files of these kinds are removed.
    """

    plan: Callable[[Build], list[Unit[Spec]]]
    unit: str
    reads: tuple[Kind, ...]
    writes: Kind
    memory: str = ""
    completes: tuple[Kind, ...] = ()

    def run(self, build: Build) -> None:
        """Brings the stage up to date. Adds its units to `build`, or removes the files of a stage without units."""
        if units := self.plan(build):
            build.units[self.name] = work_units.run(self, units, build.store, build.config.ray)
        elif self.name in build.store.folders(".stages"):
            build.store.delete_folder(f".stages/{self.name}")


AnyStage = Stage[Any, Any]


def merged(
    stage: AnyStage,
    work: Callable[[Context, MergeSpec], Result],
    to_merge: Callable[[Build], tuple[Mapping[str, str], int]],
) -> Stage[MergeSpec, Result]:
    """The stage that merges files of `stage`, a group by `work`, if there are too many for their readers.

    `to_merge(build)`: the sha256 of each file by its name, and the number of units that read every file.
    """
    name = f"{stage.name}-merged"
    return Stage(
        name,
        1,
        work,
        "lower ray.num_cpus",
        plan=lambda build: merging.plan(name, *to_merge(build), build.store.most_opens),
        unit="a group of files, if there are too many for their readers",
        reads=(stage.writes,),
        writes=stage.writes,
        memory=human_size(MERGE_BYTES),
    )
