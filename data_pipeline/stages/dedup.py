"""The stages of the steps on documents that aren't applied while inputs are read.

A unit of a step that compares documents reads its parts as the earlier steps left them (`dedup.reading`), and writes
the step's keys. Each bucket of hashes then decides which duplicates are dropped. For near-duplicates, buckets find
pairs, and one more unit clusters them. The last stage writes the documents that are left. Rules are applied by the
stage that reads next.

`plan` says what the next stage reads. It depends only on the steps, the parts, and what has been decided so far.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig, while_reading
from data_pipeline.corpus.documents import SCHEMA, read_documents
from data_pipeline.dedup.keys import NO_DOCUMENT, KeyBucket, Keys, merge_duplicates, merge_keys, merge_signatures
from data_pipeline.dedup.minhash import MEMORY_PER_DOCUMENT, ClustersSpec, find_clusters
from data_pipeline.dedup.places import Identities, Span
from data_pipeline.dedup.reading import Decision, Earlier, Reading, changes
from data_pipeline.dedup.step import KeyStep
from data_pipeline.dedup.substrings import EqualSubstrings
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names, to_read, write_names
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of
from data_pipeline.stages import documents as documents_stage
from data_pipeline.stages import dropped, evaluation_sets
from data_pipeline.stages.kinds import DOCUMENTS, DROPPED, DUPLICATES, KEYS, NGRAMS, PARTS
from data_pipeline.stages.parts import (
    Histograms,
    Part,
    PartsResult,
    PartsWritten,
    WrittenPart,
    grouped,
    part_file,
    parts_of,
)
from data_pipeline.stages.stage import AnyStage, Build, Stage, merged
from data_pipeline.text.document import Document, Listener, Tally
from data_pipeline.text.step import Step, memory_of

_CHANGES = ".changes.parquet"
_BYTES_OF_NGRAMS = 12  # for a byte of the evaluation sets: 60 for a word
_BYTES_OF_A_KEY = 120  # of a bucket, in any step
_CHARACTERS_OF_A_KEY = 40  # per line, as when parts are cut; only MinHash with very many bands has more keys


@dataclass(frozen=True)
class LeftSpec:
    """A group of neighbouring parts, whose remaining documents are written to `output`.

    Attributes:
        dropped: the table of the documents that the earlier steps drop now; "": none is written.
        listed: the file with the spans of all units (`dedup.places`).
    """

    parts: list[Part]
    earlier: Earlier
    output: str
    dropped: str
    listed: str


@dataclass(frozen=True)
class KeysSpec(LeftSpec):
    """A group of neighbouring parts, whose keys for `step` are written, with an index of `slots`.

    `new_changes`: where a table of the earlier steps' changes is written; "": `earlier.changes` has all of them.
    """

    step: KeyStep
    new_changes: str
    slots: int


@dataclass(frozen=True)
class KeysResult(Result):
    keys: int


@dataclass(frozen=True)
class BucketSpec:
    """One hash range of a step's keys.

    `files`: path of a JSON list of the key files. `units`: number of units whose keys these files hold.
    """

    files: str
    units: int
    output: str
    bucket: KeyBucket
    step: KeyStep


def gather_keys(context: Context, spec: KeysSpec) -> KeysResult:
    """Writes a step's keys of a unit's documents."""
    store, step, reading = context.store, spec.step, Reading(context, spec.earlier)
    keys = Keys(step.group, step.order)
    read = read_documents(store, (part.path for part in spec.parts), reading.columns(step.columns))
    with contextlib.ExitStack() as stack:
        tally = Tally(stack.enter_context(_dropped(store, spec)))
        rows = reading.rows(read, tally)
        if spec.new_changes:
            rows = stack.enter_context(reading.write_changes(spec.new_changes, rows, tally))
        documents: Iterator[tuple[int, Document]] = ((number, left) for number, _, left in rows if left is not None)
        if step.compares_dropped_pages:
            pages = read_documents(store, (part.urls for part in spec.parts), ["url", "timestamp"])
            documents = chain(documents, ((NO_DOCUMENT, page) for page in pages))
        step.gather(documents, keys, reading.repeated())
    with store.put(spec.output) as path:
        return KeysResult(keys.write(path, spec.slots))


def write_left(context: Context, spec: LeftSpec) -> PartsResult:
    """Writes the documents of a unit that are left after all steps; returns counts of what was dropped."""
    store, histograms, reading = context.store, Histograms(), Reading(context, spec.earlier)
    read = read_documents(store, (part.path for part in spec.parts), reading.columns(SCHEMA.names))
    with part_file(store, spec.output) as file, _dropped(store, spec) as listener:
        tally = Tally(listener)
        for _, _, left in reading.rows(read, tally):
            if left is not None:
                file.add(left)
                histograms.add(left)
    return PartsResult.of(tally, [file.describe(spec.output, spec.parts[0].source, spec.parts[0].first_id)], histograms)


def _dropped(store: Store, spec: LeftSpec) -> contextlib.AbstractContextManager[Listener | None]:
    return dropped.dropped_file(store, spec.dropped, Identities(store, spec.listed))


def decide_bucket(context: Context, spec: BucketSpec) -> Result:
    """Decides which documents, lines or spans with keys in one bucket are dropped."""
    store = context.store
    table, units = spec.bucket.read(store, read_names(store, spec.files))
    with store.put(spec.output) as path:
        spec.step.decide(table, units, path, spec.units)
    return Result()


def steps_after_reading(config: CorpusConfig, with_urls: bool = True) -> dict[str, list[Step]]:
    """The steps that aren't applied while inputs are read, by source.

    `with_urls`: whether a document has a URL. If none has, steps that compare URLs are left out.
    """
    return {
        source: [
            step
            for step in steps[len(while_reading(steps)) :]
            if with_urls or not isinstance(step, KeyStep) or not step.compares_dropped_pages
        ]
        for source, steps in config.all_steps.items()
    }


@dataclass(frozen=True)
class Decided:
    """What a step that compares documents has decided.

    Attributes:
        files: the key file of each group of parts, in the order of ids.
        duplicates: the file that lists the files of duplicates (`write_names`).
        checksums: a fingerprint of keys and duplicates.
    """

    files: list[str]
    duplicates: str
    checksums: str

    def about(self, step: KeyStep, unit: int) -> Decision:
        """What `step`, which has decided, says about a unit."""
        return Decision(step, self.files[unit], self.duplicates)


@dataclass(frozen=True)
class Work:
    """What the stages read, which is known before the first of them.

    Attributes:
        steps: the steps of each source that aren't applied yet. All have the same steps that compare documents.
        ngrams: the checksums of the evaluation sets' n-grams; []: no step looks for them.
        set_bytes: the size of the evaluation sets.
        listed: the file with the spans of all units, in the order of their numbers; "" if nothing needs it.
    """

    config: CorpusConfig
    parts: list[Part]
    steps: Mapping[str, list[Step]]
    ngrams: list[str]
    set_bytes: int = 0
    listed: str = ""

    @property
    def key_steps(self) -> list[KeyStep]:
        """The steps that compare documents, in order."""
        steps = next(iter(self.steps.values()))
        return [step for step in steps if isinstance(step, KeyStep)]

    @cached_property
    def groups(self) -> list[list[Part]]:
        """The parts, grouped by unit, in the order of sources and inputs."""
        return grouped(self.parts, self.config)

    @cached_property
    def in_order(self) -> list[list[Part]]:
        """The groups in the order of ids, in which their units are numbered."""
        return sorted(self.groups, key=lambda group: group[0].first_id)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each unit, by name."""
        return {group[0].name: number for number, group in enumerate(self.in_order)}

    @cached_property
    def slots(self) -> int:
        return slots_of(self.config, self.parts)

    def stretches(self, source: str) -> list[list[Step]]:
        """The steps of a source, cut before each step that compares documents.

        Each stage applies a stretch: the stage of the first such step the first stretch, the last stage the last one.
        """
        stretches: list[list[Step]] = [[]]
        for step in self.steps[source]:
            if isinstance(step, KeyStep):
                stretches.append([])
            stretches[-1].append(step)
        return stretches


def plan(work: Work, decided: Sequence[Decided]) -> list[Unit[Any]]:
    """The units of the next stage: those for the keys of the first step that isn't decided or, if all are, the last."""
    names = [f"{step.step}-keys" for step in work.key_steps]
    now = len(decided)
    step = work.key_steps[now] if now < len(work.key_steps) else None
    units: list[Unit[Any]] = []
    stretches = {source: work.stretches(source) for source in work.steps}
    identities = {
        source: fingerprint([step.identity for one in own[: now + 1] for step in one])
        for source, own in stretches.items()
    }
    applied = [one for own in stretches.values() for one in own[now]]  # a worker may do units of all sources
    held = memory_of(applied) + (_BYTES_OF_NGRAMS * work.set_bytes if any(one.prepared for one in applied) else 0)
    for group in work.groups:
        name, source = group[0].name, group[0].source
        number, own = work.numbers[name], stretches[source]
        writes = [any(map(changes, stretch)) for stretch in own]  # whether a stage writes a table of changes
        tables = [f".stages/{of}/{name}{_CHANGES}" for of, has in zip(names[:now], writes, strict=False) if has]
        since = [decided[now - 1].about(one, number) if isinstance(one, KeyStep) else Decision(one) for one in own[now]]
        earlier = Earlier(number, _spans(group), tables[-1] if tables else "", since)
        stage = names[now] if step else LAST.name
        table = dropped.name_of(stage, name) if writes[now] and work.config.keep_dropped else ""
        spec = LeftSpec(group, earlier, f"{DOCUMENTS.folder}/{name}.parquet", table, work.listed)
        outputs = [table]
        depends = [
            [checksum for part in group for checksum in part.checksums],
            number,
            identities[source],
            [one.checksums for one in decided],
            work.ngrams if any(one.prepared for stretch in own[: now + 1] for one in stretch) else [],
            table,
        ]
        if step is not None:
            new = f".stages/{stage}/{name}{_CHANGES}" if writes[now] else ""
            keys = f".stages/{stage}/{name}.safetensors"
            spec = KeysSpec(group, earlier, keys, table, work.listed, step, new, work.slots)
            outputs = [keys, new, table]
            depends += [step.identity, work.slots]
        size = sum(part.text_bytes for part in group)
        of_text = sum(one.bytes_of_duplicates for one in own[now] if isinstance(one, KeyStep))
        of_text += step.bytes_of_keys if step else 0
        memory = held + int(of_text * size)
        units.append(Unit(name, spec, fingerprint(depends), tuple(filter(None, outputs)), size, memory))
    return units


def _spans(group: list[Part]) -> list[Span]:
    return [span for part in group for span in part.spans]


def slots_of(config: CorpusConfig, parts: Sequence[WrittenPart]) -> int:
    """The number of slots of a file of keys."""
    characters = sum(part.characters for part in parts)
    return KeyBucket.slots(characters // _CHARACTERS_OF_A_KEY, config.dedup.keys_per_bucket)


def _for_text(bytes_of: str) -> str:
    lines, substrings = (getattr(step, bytes_of) for step in (KeyStep, EqualSubstrings))
    return f"{lines:g} bytes for each byte of text, {substrings:g} with `substrings`"


class Comparing:
    """The stages of a step that compares documents. `name`: the step's name; `step`: its class."""

    def __init__(self, name: str, step: type[KeyStep]):
        self.name, self.step = name, step
        self.keys = Stage(
            f"{name}-keys",
            5,  # the version of the keys' and the table's form; a step has a version of its own
            gather_keys,
            "lower characters_per_part",
            plan=self._plan_keys,
            unit="a part, or a group of small ones",
            reads=(PARTS, DUPLICATES),
            writes=KEYS,
            memory=f"{_for_text('bytes_of_keys')}; and as `deduplicated`, for the steps before",
        )
        self.merged_keys = merged(
            self.keys,
            merge_signatures if step.clusters else merge_keys,
            lambda build: (self._files(build), self._buckets(build)),
        )
        self.duplicates = Stage(
            f"{name}-duplicates",
            3,
            decide_bucket,
            "lower dedup.keys_per_bucket",
            plan=self._plan_duplicates,
            unit="a bucket of hashes",
            reads=(KEYS,),
            writes=DUPLICATES,
            memory=f"{_BYTES_OF_A_KEY} bytes for each key of a bucket",
        )
        self.merged_duplicates = merged(
            self.duplicates,
            merge_duplicates,
            lambda build: ({} if step.clusters else outputs_of(build.of(self.duplicates)), len(build.of(self.keys))),
        )
        self.clusters = Stage(
            f"{name}-clusters",
            4,
            find_clusters,
            "raise dedup.minhash.rows",
            plan=self._plan_clusters,
            unit="all pairs",
            reads=(KEYS, DUPLICATES),
            writes=DUPLICATES,
            memory=f"{MEMORY_PER_DOCUMENT} bytes for each document, if each has near-duplicates",
        )

    @property
    def stages(self) -> list[AnyStage]:
        """The stages in order."""
        return [self.keys, self.merged_keys, self.duplicates, self.merged_duplicates, self.clusters]

    def decided(self, build: Build) -> Decided:
        """What the step has decided, after its stages."""
        gathered = build.of(self.keys)
        last = build.of(self.clusters) or build.of(self.duplicates)
        found_in = to_read(outputs_of(last), build.of(self.merged_duplicates), len(gathered), build.store.most_opens)
        checksums = fingerprint([[unit.checksums for unit in gathered], [unit.checksums for unit in last]])
        return Decided([*self._files(build)], write_names(build.store, found_in), checksums)

    def _plan_keys(self, build: Build) -> list[Unit[KeysSpec]]:
        work = work_of(build)
        before = [*takewhile(lambda step: step.step != self.name, work.key_steps)]
        if len(before) == len(work.key_steps):
            return []  # nothing to compare: no document has a URL
        units = plan(work, [Comparing(step.step, type(step)).decided(build) for step in before])
        return sorted(units, key=lambda unit: work.numbers[unit.name])

    def _plan_duplicates(self, build: Build) -> list[Unit[BucketSpec]]:
        if not (gathered := build.of(self.keys)):
            return []
        buckets, listed, depends = self._buckets(build), self._listed(build), self._depends(build)
        memory = _BYTES_OF_A_KEY * (_number_of_keys(gathered) // buckets)
        units = []
        for number in range(buckets):
            name = f".stages/{self.duplicates.name}/{number:04d}-of-{buckets:04d}.safetensors"
            spec = BucketSpec(listed, len(gathered), name, KeyBucket(number, buckets), self._settings(build))
            inputs = fingerprint([depends, number, buckets])
            units.append(Unit(Path(name).stem, spec, inputs, (name,), memory=memory))
        return units

    def _plan_clusters(self, build: Build) -> list[Unit[ClustersSpec]]:
        paired = build.of(self.duplicates)
        if not (self.step.clusters and paired):
            return []
        name = f".stages/{self.clusters.name}/clusters.safetensors"
        spec = ClustersSpec(self._listed(build), len(build.of(self.keys)), [*outputs_of(paired)], name)
        depends = fingerprint([self._depends(build), [unit.checksums for unit in paired]])
        documents = documents_stage.total(build.of(documents_stage.STAGE))
        return [Unit("clusters", spec, depends, (name,), memory=MEMORY_PER_DOCUMENT * documents)]

    def _settings(self, build: Build) -> KeyStep:
        return next(step for step in build.config.key_steps if step.step == self.name)

    def _depends(self, build: Build) -> str:
        """A fingerprint of all that the duplicates depend on."""
        return fingerprint([self._settings(build).identity, [unit.checksums for unit in build.of(self.keys)]])

    def _files(self, build: Build) -> dict[str, str]:
        """The sha256 of each file of keys, by name."""
        outputs = outputs_of(build.of(self.keys))
        return {name: sha256 for name, sha256 in outputs.items() if name.endswith(".safetensors")}

    def _listed(self, build: Build) -> str:
        """The list of the files of keys, merged or not (`write_names`)."""
        files, merged, opens = self._files(build), build.of(self.merged_keys), build.store.most_opens
        return write_names(build.store, to_read(files, merged, self._buckets(build), opens))

    def _buckets(self, build: Build) -> int:
        """The number of buckets of the keys. Raises UserError if there can't be so many."""
        keys, per_bucket = _number_of_keys(build.of(self.keys)), build.config.dedup.keys_per_bucket
        parts = [part for unit in build.of(documents_stage.STAGE) for part in unit.result.parts]
        buckets, slots = KeyBucket.enough(keys, per_bucket), slots_of(build.config, parts)
        if buckets > slots:
            found = f"{per_bucket:,} of the {keys:,} keys of {self.name} can't be compared at once"
            most = f"in {slots:,} tasks, the most there may be; set it to {-(-keys // slots):,} or more"
            raise UserError(f"dedup.keys_per_bucket: {found} {most}")
        return buckets


def _number_of_keys(units: Sequence[Finished[KeysResult]]) -> int:
    return sum(unit.result.keys for unit in units)


def work_of(build: Build) -> Work:
    """What is known after the stages `documents` and `evaluation-sets`."""
    return build.cached("dedup", lambda: _work_of(build))


def _work_of(build: Build) -> Work:
    read = build.of(documents_stage.STAGE)
    steps = steps_after_reading(build.config, any(unit.result.with_urls for unit in read))
    sets = build.of(evaluation_sets.STAGE)
    ngrams = [checksum for unit in sets for checksum in unit.checksums]
    work = Work(
        build.config, parts_of(read), steps, ngrams, sum(one.bytes for unit in sets for one in unit.result.sets)
    )
    if not build.config.keep_dropped:
        return work
    return replace(work, listed=write_names(build.store, [to_json(_spans(group)).decode() for group in work.in_order]))


def _plan_left(build: Build) -> list[Unit[LeftSpec]]:
    if not any(steps_after_reading(build.config).values()):
        return []
    work = work_of(build)
    return plan(work, [Comparing(step.step, type(step)).decided(build) for step in work.key_steps])


LAST: Stage[LeftSpec, PartsWritten] = Stage(
    "deduplicated",
    6,
    write_left,
    "lower characters_per_part, or look for fewer evaluation sets",
    plan=_plan_left,
    unit="a part, or a group of small ones",
    reads=(PARTS, DUPLICATES, NGRAMS),
    writes=DOCUMENTS,
    memory=f"{_for_text('bytes_of_duplicates')}; {_BYTES_OF_NGRAMS} for each byte of the sets; twice the file of "
    "each classifier",
    completes=(PARTS, DOCUMENTS, DROPPED),
    keeps=PartsWritten,
)


def left(build: Build) -> Sequence[Finished[PartsWritten]]:
    """The units that wrote the documents of the corpus."""
    return build.of(LAST) or build.of(documents_stage.STAGE)


def counts_of_left(build: Build) -> Iterator[PartsResult]:
    """The whole results of the units that wrote the documents of the corpus, from their records."""
    return build.recorded(LAST if build.of(LAST) else documents_stage.STAGE, PartsResult)
