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
from itertools import chain
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
from data_pipeline.dedup.registry import key_steps
from data_pipeline.dedup.step import KeyStep
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names, write_names
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of, run
from data_pipeline.stages import dropped, evaluation_sets
from data_pipeline.stages.parts import Histograms, Part, PartsResult, grouped, part_file
from data_pipeline.stages.stage import DOCUMENTS, DUPLICATES, KEYS, NGRAMS, PARTS, Amounts, AnyStage, Stage, largest
from data_pipeline.text.document import Document, Listener, Tally
from data_pipeline.text.step import Step

_CHANGES = ".changes.parquet"
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
    corpus, step, reading = context.store, spec.step, Reading(context, spec.earlier)
    keys = Keys(step.group, step.order)
    read = read_documents(corpus, (part.path for part in spec.parts), reading.columns(step.columns))
    with contextlib.ExitStack() as stack:
        tally = Tally(stack.enter_context(_dropped(corpus, spec)))
        rows = reading.rows(read, tally)
        if spec.new_changes:
            rows = stack.enter_context(reading.write_changes(spec.new_changes, rows, tally))
        documents: Iterator[tuple[int, Document]] = ((number, left) for number, _, left in rows if left is not None)
        if step.compares_dropped_pages:
            pages = read_documents(corpus, (part.urls for part in spec.parts), ["url", "timestamp"])
            documents = chain(documents, ((NO_DOCUMENT, page) for page in pages))
        step.gather(documents, keys, reading.repeated())
    with corpus.put(spec.output) as path:
        return KeysResult(keys.write(path, spec.slots))


def write_left(context: Context, spec: LeftSpec) -> PartsResult:
    """Writes the documents of a unit that are left after all steps; returns counts of what was dropped."""
    corpus, histograms, reading = context.store, Histograms(), Reading(context, spec.earlier)
    read = read_documents(corpus, (part.path for part in spec.parts), reading.columns(SCHEMA.names))
    with part_file(corpus, spec.output) as file, _dropped(corpus, spec) as listener:
        tally = Tally(listener)
        for _, _, left in reading.rows(read, tally):
            if left is not None:
                file.add(left)
                histograms.add(left)
    return PartsResult.of(tally, [file.describe(spec.output, spec.parts[0].source, spec.parts[0].first_id)], histograms)


def _dropped(corpus: Store, spec: LeftSpec) -> contextlib.AbstractContextManager[Listener | None]:
    return dropped.dropped_file(corpus, spec.dropped, Identities(corpus, spec.listed))


def decide_bucket(context: Context, spec: BucketSpec) -> Result:
    """Decides which documents, lines or spans with keys in one bucket are dropped."""
    corpus = context.store
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    with corpus.put(spec.output) as path:
        spec.step.decide(table, units, path, spec.units)
    return Result()


def keys_of(step: type[KeyStep], name: str) -> Stage[KeysSpec, KeysResult]:
    return Stage(
        f"{name}-keys",
        4,  # the version of the keys' and the table's form; a step has a version of its own
        gather_keys,
        "lower characters_per_part",
        memory=2.5,  # a line counts as 40 characters; its key has 24 bytes and is held four times
        unit="a part, or a group of small ones",
        reads=(PARTS, DUPLICATES),
        writes=KEYS,
        units=lambda amounts: len(amounts.groups),
        most=lambda amounts: largest(amounts.groups),
        step=name,
        merge=merge_signatures if step.clusters else merge_keys,
        readers=lambda amounts: _buckets(amounts, name),
    )


def buckets_of(step: type[KeyStep], name: str) -> Stage[BucketSpec, Result]:
    return Stage(
        f"{name}-duplicates",
        3,
        decide_bucket,
        "lower dedup.keys_per_bucket",
        memory=120,  # of any step
        unit="a bucket of hashes",
        reads=(KEYS,),
        writes=DUPLICATES,
        units=lambda amounts: _buckets(amounts, name),
        most=lambda amounts: amounts.keys[name] // _buckets(amounts, name),
        sized_by="key of a bucket",
        step=name,
        merge=None if step.clusters else merge_duplicates,
        readers=lambda amounts: len(amounts.groups),
    )


def clusters_of(name: str) -> Stage[ClustersSpec, Result]:
    return Stage(
        f"{name}-clusters",
        4,
        find_clusters,
        "raise dedup.minhash.rows",
        memory=MEMORY_PER_DOCUMENT,
        unit="all pairs",
        reads=(KEYS, DUPLICATES),
        writes=DUPLICATES,
        units=lambda amounts: 1,
        most=lambda amounts: amounts.documents,
        sized_by="document, if each has near-duplicates",
        step=name,
    )


LAST = Stage(
    "deduplicated",
    5,
    write_left,
    "lower characters_per_part, or look for fewer evaluation sets",
    unit="a part, or a group of small ones",
    reads=(PARTS, DUPLICATES, NGRAMS),
    writes=DOCUMENTS,
    units=lambda amounts: len(amounts.groups),
    applies=lambda config: any(steps_after_reading(config).values()),
    ends="documents",
)


def _buckets(amounts: Amounts, step: str) -> int:
    return KeyBucket.enough(amounts.keys[step], amounts.config.dedup.keys_per_bucket)


def stages_of(name: str, step: type[KeyStep]) -> list[AnyStage]:
    """The stages of a step that compares documents."""
    return [keys_of(step, name), buckets_of(step, name), *([clusters_of(name)] if step.clusters else [])]


def all_stages() -> list[AnyStage]:
    """The stages of all steps that compare documents."""
    return [stage for name, step in key_steps().items() for stage in stages_of(name, step)]


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
        listed: the file with the spans of all units, in the order of their numbers; "" if nothing needs it.
    """

    config: CorpusConfig
    parts: list[Part]
    steps: Mapping[str, list[Step]]
    ngrams: list[str]
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
        """The number of slots of a file of keys."""
        characters = sum(part.characters for part in self.parts)
        return KeyBucket.slots(characters // _CHARACTERS_OF_A_KEY, self.config.dedup.keys_per_bucket)

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
        units.append(Unit(name, spec, fingerprint(depends), tuple(filter(None, outputs)), size))
    return units


def _spans(group: list[Part]) -> list[Span]:
    return [span for part in group for span in part.spans]


def deduplicate(
    config: CorpusConfig, corpus: Store, parts: list[Part], steps: Mapping[str, list[Step]]
) -> dict[str, Sequence[Finished[Result]]]:
    """Runs the stages of `steps`, by source, and the last stage. Returns the units by stage."""
    finished: dict[str, Sequence[Finished[Result]]] = {}
    if searched := config.searched_for:
        finished[evaluation_sets.STAGE.name] = run(
            evaluation_sets.STAGE, evaluation_sets.plan(searched), corpus, config.ray
        )
    work = Work(config, parts, steps, [one for units in finished.values() for unit in units for one in unit.checksums])
    if config.keep_dropped:
        work = replace(work, listed=write_names(corpus, [to_json(_spans(group)).decode() for group in work.in_order]))
    decided: list[Decided] = []
    for step in work.key_steps:
        decided.append(_decide(step, work, plan(work, decided), corpus, finished))
    finished[LAST.name] = run(LAST, plan(work, decided), corpus, config.ray)
    return finished


def _decide(
    step: KeyStep,
    work: Work,
    units: list[Unit[KeysSpec]],
    corpus: Store,
    finished: dict[str, Sequence[Finished[Result]]],
) -> Decided:
    """Runs the stages of `step`, whose keys `units` write. Adds the units of all stages to `finished`."""
    config = work.config
    gathering, deciding, *clustering = stages_of(step.step, type(step))
    finished[gathering.name] = gathered = run(
        gathering, sorted(units, key=lambda unit: work.numbers[unit.name]), corpus, config.ray
    )
    keys = sum(unit.result.keys for unit in gathered)
    buckets = _number_of_buckets(step, keys, work)
    files = {name: sha256 for name, sha256 in outputs_of(gathered).items() if name.endswith(".safetensors")}
    to_read, merged = gathering.merged(files, buckets, corpus, config)
    finished |= merged
    listed, depends = write_names(corpus, to_read), fingerprint([step.identity, [unit.checksums for unit in gathered]])
    bucket_units = []
    for number in range(buckets):
        name = f".stages/{deciding.name}/{number:04d}-of-{buckets:04d}.safetensors"
        spec = BucketSpec(listed, len(units), name, KeyBucket(number, buckets), step)
        inputs = fingerprint([depends, number, buckets])
        bucket_units.append(Unit(Path(name).stem, spec, inputs, (name,), size=keys // buckets))
    finished[deciding.name] = last = run(deciding, bucket_units, corpus, config.ray)
    duplicates = outputs_of(last)
    if clustering:
        name = f".stages/{clustering[0].name}/clusters.safetensors"
        joined = ClustersSpec(listed, len(units), list(duplicates), name)
        documents = sum(sum(part.documents.values()) for part in work.parts)
        depends = fingerprint([depends, [unit.checksums for unit in last]])
        unit = Unit("clusters", joined, depends, (name,), size=documents)
        finished[clustering[0].name] = last = run(clustering[0], [unit], corpus, config.ray)
        duplicates = outputs_of(last)
    else:
        found_in, merged = deciding.merged(duplicates, len(units), corpus, config)
        finished |= merged
        duplicates = dict.fromkeys(found_in, "")
    checksums = fingerprint([[unit.checksums for unit in gathered], [unit.checksums for unit in last]])
    return Decided(list(files), write_names(corpus, list(duplicates)), checksums)


def _number_of_buckets(step: KeyStep, keys: int, work: Work) -> int:
    """The number of buckets for the `keys` of a step. Raises UserError if there can't be so many."""
    per_bucket = work.config.dedup.keys_per_bucket
    buckets = KeyBucket.enough(keys, per_bucket)
    if buckets > work.slots:
        found = f"{per_bucket:,} of the {keys:,} keys of {step.step} can't be compared at once"
        most = f"in {work.slots:,} tasks, the most there may be; set it to {-(-keys // work.slots):,} or more"
        raise UserError(f"dedup.keys_per_bucket: {found} {most}")
    return buckets
