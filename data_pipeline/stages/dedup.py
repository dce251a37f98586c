"""The stages of deduplication: each step writes keys and decides which duplicates go; the last stage writes the text.

A unit of a step reads its parts as the earlier steps left them (`dedup.reading`), and writes the step's keys. Each
bucket of hashes then decides which duplicates are dropped. For near-duplicates, buckets find pairs, and one more unit
clusters them. The last stage writes the documents that are left.

Language and bad words are checked between two steps, when the second step reads: like C4, on what is left of a page
without its duplicate lines. Items of evaluation sets are searched last, in what will be the corpus.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import UserError
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.documents import SCHEMA, read_documents
from data_pipeline.dedup.config import STEPS, DedupConfig, step_of
from data_pipeline.dedup.decontamination import Decontamination
from data_pipeline.dedup.keys import NO_DOCUMENT, KeyBucket, Keys, merge_duplicates, merge_keys, merge_signatures
from data_pipeline.dedup.minhash import MEMORY_PER_DOCUMENT, ClustersSpec, find_clusters
from data_pipeline.dedup.reading import WITHOUT_KEYS, Decision, Earlier, Filters, Reading
from data_pipeline.engine.context import Context
from data_pipeline.engine.merging import read_names, write_names
from data_pipeline.engine.work_units import Finished, Result, Unit, outputs_of, read_finished, run
from data_pipeline.stages import evaluation_sets
from data_pipeline.stages.parts import Histograms, Part, PartsResult, grouped, part_file
from data_pipeline.stages.stage import DOCUMENTS, DUPLICATES, KEYS, NGRAMS, PARTS, Amounts, AnyStage, Stage, largest
from data_pipeline.text.cleaning.config import PAGE_FILTERS
from data_pipeline.text.document import Document, Tally

_CHANGES = ".changes.parquet"
_CHARACTERS_OF_A_KEY = 40  # per line, as when parts are cut; only MinHash with very many bands has more keys


@dataclass(frozen=True)
class LeftSpec:
    """A group of neighbouring parts, whose remaining documents are written to `output`."""

    parts: list[Part]
    earlier: Earlier
    output: str


@dataclass(frozen=True)
class KeysSpec(LeftSpec):
    """A group of neighbouring parts, whose keys for `step` are written, with an index of `slots`.

    `new_changes`: where a table of the earlier steps' changes is written; "": `earlier.changes` has all of them.
    """

    step: str
    new_changes: str
    slots: int


@dataclass(frozen=True)
class KeysResult(Result):
    keys: int


@dataclass(frozen=True, kw_only=True)
class LeftResult(PartsResult):
    """By evaluation set, how many documents contain an item (`contaminated`), and the numbers of the items found."""

    contaminated: dict[str, int]
    items: dict[str, list[int]]


@dataclass(frozen=True)
class BucketSpec:
    """One hash range of a step's keys.

    `files`: path of a JSON list of the key files. `units`: number of units whose keys these files hold.
    """

    files: str
    units: int
    output: str
    bucket: KeyBucket
    step: str
    dedup: DedupConfig


def gather_keys(context: Context, spec: KeysSpec) -> KeysResult:
    """Writes a step's keys of a unit's documents."""
    corpus = context.store
    step, reading, tally = step_of(spec.step, spec.earlier.dedup), Reading(context, spec.earlier), Tally()
    keys = Keys(step.group, step.order)
    read = read_documents(corpus, (part.path for part in spec.parts), reading.columns(step.columns))
    rows = reading.rows(read, tally)
    with contextlib.ExitStack() as stack:
        if spec.new_changes:
            rows = stack.enter_context(reading.write_changes(spec.new_changes, rows, tally))
        documents: Iterator[tuple[int, Document]] = ((number, left) for number, _, left in rows if left is not None)
        if step.compares_dropped_pages:
            pages = read_documents(corpus, (part.urls for part in spec.parts), ["url", "timestamp"])
            documents = chain(documents, ((NO_DOCUMENT, page) for page in pages))
        step.gather(documents, keys, reading.repeated())
    with corpus.put(spec.output) as path:
        return KeysResult(keys.write(path, spec.slots))


def write_left(context: Context, spec: LeftSpec) -> LeftResult:
    """Writes the documents of a unit that are left after all steps; returns counts of what was dropped."""
    corpus, reading = context.store, Reading(context, spec.earlier)
    tally, histograms = Tally(), Histograms()
    read = read_documents(corpus, (part.path for part in spec.parts), reading.columns(SCHEMA.names))
    with part_file(corpus, spec.output) as file:
        for _, _, left in reading.rows(read, tally):
            if left is not None:
                file.add(left)
                histograms.add(left)
    parts = [file.describe(spec.output, spec.parts[0].source, spec.parts[0].first_id)]
    searched = [step for step in reading.steps if isinstance(step, Decontamination)]
    return LeftResult(
        **vars(PartsResult.of(tally, parts, histograms)),
        contaminated={name: count for step in searched for name, count in sorted(step.contaminated.items())},
        items={name: sorted(items) for step in searched for name, items in sorted(step.items.items())},
    )


def decide_bucket(context: Context, spec: BucketSpec) -> Result:
    """Decides which documents, lines or spans with keys in one bucket are dropped."""
    corpus = context.store
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    with corpus.put(spec.output) as path:
        step_of(spec.step, spec.dedup).decide(table, units, path, spec.units)
    return Result()


def keys_of(step: str) -> Stage[KeysSpec, KeysResult]:
    return Stage(
        f"{step}-keys",
        STEPS[step].version + 1,  # 1: the version of the table of changes; raise it when the table's bytes change
        gather_keys,
        "lower characters_per_part",
        memory=2.5,  # a line counts as 40 characters; its key has 24 bytes and is held four times
        unit="a part, or a group of small ones",
        reads=(PARTS, DUPLICATES),
        writes=KEYS,
        units=lambda amounts: len(amounts.groups),
        most=lambda amounts: largest(amounts.groups),
        applies=lambda config: step in config.steps,
        step=step,
        merge=merge_signatures if STEPS[step].clusters else merge_keys,
        readers=lambda amounts: _buckets(amounts, step),
    )


def buckets_of(step: str) -> Stage[BucketSpec, Result]:
    return Stage(
        f"{step}-duplicates",
        1,
        decide_bucket,
        "lower dedup.keys_per_bucket",
        memory=120,  # of any step
        unit="a bucket of hashes",
        reads=(KEYS,),
        writes=DUPLICATES,
        units=lambda amounts: _buckets(amounts, step),
        most=lambda amounts: amounts.keys[step] // _buckets(amounts, step),
        sized_by="key of a bucket",
        applies=lambda config: step in config.steps,
        step=step,
        merge=None if STEPS[step].clusters else merge_duplicates,
        readers=lambda amounts: len(amounts.groups),
    )


def clusters_of(step: str) -> Stage[ClustersSpec, Result]:
    return Stage(
        f"{step}-clusters",
        2,
        find_clusters,
        "raise dedup.minhash.rows",
        memory=MEMORY_PER_DOCUMENT,
        unit="all pairs",
        reads=(KEYS, DUPLICATES),
        writes=DUPLICATES,
        units=lambda amounts: 1,
        most=lambda amounts: amounts.documents,
        sized_by="document, if each has near-duplicates",
        applies=lambda config: step in config.steps,
        step=step,
    )


LAST = Stage(
    "deduplicated",
    4,
    write_left,
    "lower characters_per_part, or look for fewer evaluation sets",
    unit="a part, or a group of small ones",
    reads=(PARTS, DUPLICATES, NGRAMS),
    writes=DOCUMENTS,
    units=lambda amounts: len(amounts.groups),
    applies=lambda config: bool(config.steps),
    ends="documents",
)


def _buckets(amounts: Amounts, step: str) -> int:
    return KeyBucket.enough(amounts.keys[step], amounts.config.dedup.keys_per_bucket)


def stages_of(step: str) -> list[AnyStage]:
    """The stages of a step that has keys."""
    return [keys_of(step), buckets_of(step), *([clusters_of(step)] if STEPS[step].clusters else [])]


def steps_of(config: CorpusConfig, read: Sequence[Finished[PartsResult]]) -> list[str]:
    """The steps of a corpus. Steps that compare URLs are left out if no document of the units `read` has a URL."""
    if any(unit.result.with_urls for unit in read):
        return config.steps
    return [step for step in config.steps if step in WITHOUT_KEYS or not STEPS[step].compares_dropped_pages]


def deduplicate(
    config: CorpusConfig, corpus: Store, parts: list[Part], steps: Sequence[str]
) -> dict[str, Sequence[Finished[Result]]]:
    """Runs the stages of `steps`, and the last stage. Returns the units by stage."""
    order = _Order(config, corpus, parts)
    for step in steps:
        order.take(step)
    return {**order.finished, LAST.name: run(LAST, order.units(LAST), corpus, config.ray)}


@dataclass(frozen=True)
class Decided:
    """A finished step.

    `files`: the key file of each group of parts, in the order of ids; "" for a step without keys. `duplicates`: the
    files of the buckets.
    """

    step: str
    files: list[str]
    duplicates: list[str]


class _Order:
    """The steps so far, and where their decisions are."""

    def __init__(self, config: CorpusConfig, corpus: Store, parts: list[Part]):
        self._config, self._corpus = config, corpus
        self._documents = sum(sum(part.documents.values()) for part in parts)
        self._groups = grouped(parts, config)
        in_order = in_order_of_ids(self._groups)
        self._number = {group[0].name: position for position, group in enumerate(in_order)}
        characters = sum(part.characters for part in parts)
        self._slots = KeyBucket.slots(characters // _CHARACTERS_OF_A_KEY, config.dedup.keys_per_bucket)
        self._cleaning = {source.name: config.cleaning_of(source) for source in config.sources}
        self._changes = ""  # the stage with the newest tables of changes
        self._since: list[Decided] = []  # the steps after these tables
        self._depends = ""  # a fingerprint of all that the steps so far depend on
        self.finished: dict[str, Sequence[Finished[Result]]] = {}

    def take(self, step: str) -> None:
        if step in WITHOUT_KEYS:
            self._depends = fingerprint([self._depends, step, WITHOUT_KEYS[step].version])
            if step == Decontamination.name:
                self._run(evaluation_sets.STAGE, evaluation_sets.plan(self._config.decontamination))
            self._since.append(Decided(step, [""] * len(self._groups), []))
            return
        settings = self._config.dedup.model_dump(include={STEPS[step].setting or step})
        if custom := [one for one in self._config.dedup.custom if one.step == step]:
            settings["custom"] = custom
        self._depends = fingerprint([self._depends, step, settings])
        stage = keys_of(step)
        read = self._run(stage, sorted(self.units(stage), key=lambda unit: self._number[unit.name]))
        if self._new_changes:
            self._changes = stage.name
        files = {name: sha256 for name, sha256 in outputs_of(read).items() if not name.endswith(_CHANGES)}
        self._since = [Decided(step, list(files), self._find_duplicates(step, files, read))]

    @property
    def _new_changes(self) -> bool:
        """Whether a step after the newest tables has changed documents."""
        return any(one.step in WITHOUT_KEYS or STEPS[one.step].drops for one in self._since)

    def units(self, stage: AnyStage) -> list[Unit]:
        """The units of a stage that reads the parts: a step's keys, or the last stage."""
        lists = [write_names(self._corpus, one.duplicates) if one.duplicates else "" for one in self._since]
        filters = any(one.step == Filters.name for one in self._since)
        units = []
        for group in self._groups:
            name, rules = group[0].name, self._cleaning[group[0].source]
            number = self._number[name]
            checked = PAGE_FILTERS if filters else ()
            settings = rules.model_dump(include={"min_sentences_per_page", *checked})
            content: list[str | int] = [*rules.identity] if filters else []
            if stage.step and self._slots > KeyBucket.slots(0, 1):
                content.append(self._slots)
            checksums = [checksum for part in group for checksum in part.checksums]
            inputs = fingerprint([checksums, number, settings, self._depends, *content])
            since = [Decision(one.step, one.files[number], path) for one, path in zip(self._since, lists, strict=True)]
            changes = f".stages/{self._changes}/{name}{_CHANGES}" if self._changes else ""
            earlier = Earlier(number, rules, self._config.dedup, changes, since)
            spec, outputs = LeftSpec(group, earlier, f"{DOCUMENTS.folder}/{name}.parquet"), list[str]()
            if stage.step:
                outputs = [f".stages/{stage.name}/{name}.safetensors"]
                new = f".stages/{stage.name}/{name}{_CHANGES}" if self._new_changes else ""
                spec = KeysSpec(group, earlier, outputs[0], stage.step, new, self._slots)
                outputs += [new] if new else []
            units.append(Unit(name, spec, inputs, tuple(outputs), sum(part.text_bytes for part in group)))
        return units

    def _find_duplicates(self, step: str, files: dict[str, str], read: Sequence[Finished]) -> list[str]:
        """The files of the duplicates among the keys in `files`."""
        config, stage = self._config, buckets_of(step)
        keys = sum(unit.result.keys for unit in read)
        buckets = KeyBucket.enough(keys, config.dedup.keys_per_bucket)
        if buckets > self._slots:
            found = f"{config.dedup.keys_per_bucket:,} of the {keys:,} keys of {step} can't be compared at once"
            most = f"in {self._slots:,} tasks, the most there may be; set it to {-(-keys // self._slots):,} or more"
            raise UserError(f"dedup.keys_per_bucket: {found} {most}")
        listed = write_names(self._corpus, self._merge(keys_of(step), files, buckets))
        units = []
        for number in range(buckets):
            name = f".stages/{stage.name}/{number:04d}-of-{buckets:04d}.safetensors"
            spec = BucketSpec(listed, len(self._groups), name, KeyBucket(number, buckets), step, config.dedup)
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
        """The files that `readers` read: a stage's `files` or, if they are too many, merged ones."""
        found, merged = stage.merged(files, readers, self._corpus, self._config)
        self.finished |= merged
        return found

    def _run(self, stage: AnyStage, units: list[Unit]) -> Sequence[Finished]:
        """Runs a stage, on which all later stages depend."""
        self.finished[stage.name] = done = run(stage, units, self._corpus, self._config.ray)
        self._depends = fingerprint([self._depends, [unit.checksums for unit in done]])
        return done


def in_order_of_ids(groups: list[list[Part]]) -> list[list[Part]]:
    """Groups of parts in the order in which their units are numbered."""
    return sorted(groups, key=lambda group: group[0].first_id)


def decided(corpus: Store, steps: Sequence[str], in_order: list[list[Part]]) -> list[Decided]:
    """The finished steps of a corpus that drop something. `in_order`: its groups of parts, `in_order_of_ids`."""
    found = []
    for step in steps:
        if step in WITHOUT_KEYS:
            found.append(Decided(step, [""] * len(in_order), []))
        elif STEPS[step].drops:
            own = [f".stages/{keys_of(step).name}/{group[0].name}.safetensors" for group in in_order]
            units = read_finished(stages_of(step)[-1], corpus)
            found.append(Decided(step, own, list(outputs_of(units))))
    return found
