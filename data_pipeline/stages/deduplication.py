"""Deduplication: the order of its steps. Keys are gathered and decided step by step, and text is written once.

Each unit of a step reads its parts as the earlier steps left them: the parts, the table of what they have changed of
them, and what the last of them decided. It writes the new table and its own keys. Then each bucket of hashes decides
which duplicates are dropped, and the last stage writes the remaining documents. For near-duplicates the buckets find
pairs, and one more unit clusters them.

Language and bad words are checked between two steps, in the reading for the second of them: like C4, they are checked
on what is left of a page after duplicate lines are removed. Items of evaluation sets are looked for after all other
steps, in what will be the corpus.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.config import STEPS
from data_pipeline.dedup.keys import KeyBucket
from data_pipeline.execution.merging import write_names
from data_pipeline.execution.work_units import Finished, Result, Unit, outputs_of, read_finished, run
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import UserError
from data_pipeline.foundation.store import Store
from data_pipeline.stages import evaluation_sets
from data_pipeline.stages.duplicates import BucketSpec, ClustersSpec, buckets_of, clusters_of
from data_pipeline.stages.part_readings import CHECKS, LAST, Applied, LeftResult, PartSpec, keys_stage
from data_pipeline.stages.parts import Part, grouped
from data_pipeline.stages.stage import AnyStage

_CHANGES = ".changes.parquet"
_CHARACTERS_OF_A_KEY = 40  # as a line counts when parts are cut; only MinHash with very many bands has more keys


def deduplicate(
    config: CorpusConfig, corpus: Store, parts: list[Part], shown: Callable[[AnyStage], bool] = lambda stage: True
) -> tuple[dict[str, Sequence[Finished[Result]]], list[Finished[LeftResult]]]:
    """Runs the stages that `config.dedup` asks for. Returns the units of all but the last by stage, and of the last.

    `shown(stage)`: whether a stage has anything to tell.
    """
    order = _Order(config, corpus, parts, shown)
    for step in config.steps:
        order.take(step)
    return order.finished, run(LAST, order.units("", LAST.name), corpus, config.ray)


class _Order:
    """The steps that were taken, and where their decisions are."""

    def __init__(self, config: CorpusConfig, corpus: Store, parts: list[Part], shown: Callable[[AnyStage], bool]):
        self._config, self._corpus, self._shown = config, corpus, shown
        self._documents = sum(sum(part.documents.values()) for part in parts)
        self._groups = grouped(parts, config)
        in_order = in_order_of_ids(self._groups)
        self._number = {group[0].name: position for position, group in enumerate(in_order)}
        characters = sum(part.characters or 0 for part in parts)
        self._slots = KeyBucket.slots(characters // _CHARACTERS_OF_A_KEY, config.dedup.keys_per_bucket)
        self._cleaning = {source.name: config.cleaning_of(source) for source in config.sources}
        self._changes = ""  # the stage whose tables of changes are the newest
        self._last: Decided | None = None  # what the last step decided, which no table has yet
        self._checks: list[str] = []  # those that follow it
        self._depends = ""  # fingerprint of all that the earlier steps depend on
        self.finished: dict[str, Sequence[Finished[Result]]] = {}

    def take(self, step: str) -> None:
        if step in CHECKS:
            self._depends = fingerprint([self._depends, step, CHECKS[step]])
            if step == "decontamination":
                self._run(evaluation_sets.STAGE, evaluation_sets.plan(self._config.decontamination))
            self._checks.append(step)
            return
        settings = self._config.dedup.model_dump(include={STEPS[step].setting or step})
        if custom := [one for one in self._config.dedup.custom if one.step == step]:
            settings["custom"] = custom
        self._depends = fingerprint([self._depends, step, settings])
        stage = keys_stage(step)
        read = self._run(stage, sorted(self.units(step, stage.name), key=lambda unit: unit.spec.unit))
        if self._new_changes:
            self._changes = stage.name
        files = {name: sha256 for name, sha256 in outputs_of(read).items() if not name.endswith(_CHANGES)}
        self._last, self._checks = Decided(step, list(files), self._find_duplicates(step, files, read)), []

    @property
    def _new_changes(self) -> bool:
        """Whether the last step, which all checks follow, has changed what no table has yet."""
        return self._last is not None and STEPS[self._last.step].drops

    def units(self, step: str, stage: str) -> list[Unit[PartSpec]]:
        """The units of a stage that reads the parts; no `step` for the one that writes what is left."""
        last = self._last
        duplicates = write_names(self._corpus, last.duplicates) if last else ""
        filters = "filters" in self._checks
        units = []
        for group in self._groups:
            name, source = group[0].name, group[0].source
            number, rules = self._number[name], self._cleaning[source]
            checked = {"language", "bad_words", "bad_words_fraction", "classifier"} if filters else set()
            settings = rules.model_dump(include={"min_sentences_per_page", *checked})
            content: list[str | int] = [*rules.identity] if filters else []
            content = [*content, self._slots] if step and self._slots > KeyBucket.slots(0, 1) else content
            checksums = [checksum for part in group for checksum in part.checksums]
            inputs = fingerprint([checksums, number, settings, self._depends, *content])
            output = f".stages/{stage}/{name}.safetensors" if step else f"documents/{name}.parquet"
            spec = PartSpec(
                group,
                number,
                rules,
                self._config.dedup,
                changes=f".stages/{self._changes}/{name}{_CHANGES}" if self._changes else "",
                last=Applied(last.step, last.files[number], duplicates) if last else None,
                checks=self._checks,
                step=step,
                output=output,
                new_changes=f".stages/{stage}/{name}{_CHANGES}" if step and self._new_changes else "",
                slots=self._slots,
            )
            outputs = tuple(file for file in (output, spec.new_changes) if file)
            size = sum(part.text_bytes for part in group)
            units.append(Unit(name, spec, inputs, outputs if step else (), size))
        return units

    def _find_duplicates(self, step: str, files: dict[str, str], read: Sequence[Finished]) -> list[str]:
        """The files of the duplicates among the keys in `files`."""
        config, stage = self._config, buckets_of(step)
        keys = sum(unit.result.keys for unit in read)
        buckets = KeyBucket.enough(keys, config.dedup.keys_per_bucket)
        if buckets > self._slots:
            raise UserError(
                f"dedup.keys_per_bucket: {config.dedup.keys_per_bucket:,} of the {keys:,} keys of {step} can't be "
                f"compared at once in {self._slots:,} tasks, the most there may be; set it to "
                f"{-(-keys // self._slots):,} or more"
            )
        listed = write_names(self._corpus, self._merge(keys_stage(step), files, buckets))
        units = []
        for number in range(buckets):
            name = f".stages/{stage.name}/{number:04d}-of-{buckets:04d}.safetensors"
            spec = BucketSpec(listed, len(self._groups), KeyBucket(number, buckets), step, config.dedup, name)
            inputs = fingerprint([self._depends, number, buckets])
            units.append(Unit(Path(name).stem, spec, inputs, (name,), size=keys // buckets))
        decided = self._run(stage, units)
        if STEPS[step].clusters:
            name = f".stages/{clusters_of(step).name}/clusters.safetensors"
            joined = ClustersSpec(listed, len(self._groups), list(outputs_of(decided)), name)
            self._run(clusters_of(step), [Unit("clusters", joined, self._depends, (name,), size=self._documents)])
            return [name]
        return self._merge(stage, outputs_of(decided), len(self._groups))

    def _merge(self, stage: AnyStage, files: dict[str, str], readers: int) -> list[str]:
        """What `readers` read of a stage's files: themselves or, where they are too many, merged ones."""
        found, merged = stage.merged(files, readers, self._corpus, self._config, self._shown(stage))
        self.finished |= merged
        return found

    def _run(self, stage: AnyStage, units: list[Unit]) -> Sequence[Finished]:
        """Runs a stage, on which all later ones depend."""
        self.finished[stage.name] = done = run(stage, units, self._corpus, self._config.ray, self._shown(stage))
        self._depends = fingerprint([self._depends, [unit.checksums for unit in done]])
        return done


@dataclass(frozen=True)
class Decided:
    """A finished step: its files by group of parts in the order of ids, which have keys, and the files of its
    duplicates. A check of single documents has neither."""

    step: str
    files: list[str]
    duplicates: list[str]


def in_order_of_ids(groups: list[list[Part]]) -> list[list[Part]]:
    """Groups of parts in the order that numbers their units."""
    return sorted(groups, key=lambda group: group[0].first_id)


def decided(corpus: Store, config: CorpusConfig, in_order: list[list[Part]]) -> list[Decided]:
    """The finished steps of a corpus that drop anything; its groups of parts are `in_order_of_ids`."""
    steps = []
    for step in config.steps:
        if step in CHECKS:
            steps.append(Decided(step, [], []))
        elif STEPS[step].drops:
            own = [f".stages/{keys_stage(step).name}/{group[0].name}.safetensors" for group in in_order]
            stage: AnyStage = clusters_of(step) if STEPS[step].clusters else buckets_of(step)
            found = read_finished(stage, corpus)
            steps.append(Decided(step, own, [name for unit in found for name in unit.outputs]))
    return steps
