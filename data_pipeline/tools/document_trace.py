"""Traces documents by repeating what the stages did to them: every stage is a pure function."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow.parquet as pq

from data_pipeline.cleaning.page import Cleaner
from data_pipeline.dedup.config import step_of
from data_pipeline.dedup.keys import NO_DOCUMENT, read_duplicates, smallest_keys
from data_pipeline.dedup.substrings import EqualSubstrings
from data_pipeline.execution.parts import SCHEMA, Part, read_documents
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources.record import ReadStats, Record
from data_pipeline.stages.deduplication import Decided
from data_pipeline.stages.documents import DocumentsSpec, InputSpec, Splits, clean_record, read_records, text_of
from data_pipeline.stages.part_readings import CHECKS, Apply, application, check_of
from data_pipeline.text.document import NO_RULES, Document, Tally
from data_pipeline.tools.finished_build import BuiltInput, FinishedBuild


@dataclass(frozen=True)
class Drop:
    """A page, line or span that the rule `rule` dropped. `what` is its text, or "" if the rule doesn't give it.

    `stays_on` is the document that keeps the copy, if it is known.
    """

    rule: str
    what: str = ""
    stays_on: str = ""


class DropRecorder(Tally):
    """A tally that also keeps every drop in order, with its whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: list[Drop] = []

    def __setitem__(self, rule: str, count: int) -> None:
        super().__setitem__(rule, count)
        if rule not in NO_RULES:
            self.drops.append(Drop(rule))

    def drop(self, rule: str, example: str = "") -> None:
        self[rule] += 1
        self.drops[-1] = Drop(rule, example)


@dataclass
class StepTrace:
    """What one step did to a document: what it dropped, and the text that it left; None if it dropped the document."""

    step: str
    drops: list[Drop]
    text: str | None


@dataclass(frozen=True)
class BlockLocation:
    """A block of the shard: its number, and its bytes."""

    number: int
    offset: int
    length: int


@dataclass(frozen=True)
class TokenLocation:
    """The `tokens` tokens of a document, in `rows` (the first and the last, ids in its split) and `blocks` of `shard`.

    `rows` is () if the tokens are in the bucket's dropped tail, None for rows that mix sentences of several documents.
    """

    tokens: int
    shard: str
    rows: tuple[int, ...] | None
    blocks: list[BlockLocation]


@dataclass
class DocumentTrace:
    """What the steps did to one record. `text` is as it was read, before the first step.

    `location`: where its tokens are, if it is in the corpus and the corpus has shards.
    """

    id: str
    path: str = ""
    url: str = ""
    title: str = ""
    text: str = ""
    steps: list[StepTrace] = field(default_factory=list)
    language: str = ""
    split: str = ""
    location: TokenLocation | None = None

    @property
    def dropped_by(self) -> str:
        """The rule that dropped the document, or "" if it is part of the corpus."""
        if self.steps and self.steps[-1].text is None:
            return self.steps[-1].drops[-1].rule if self.steps[-1].drops else self.steps[-1].step
        return ""


def ordinal_of(identity: str) -> int:
    """The index of a document's record in its file."""
    return int(identity.rpartition("/")[2])


def trace_records(
    build: FinishedBuild, built: BuiltInput, ordinals: set[int], find_copies: bool = False
) -> dict[int, DocumentTrace]:
    """The traces of the records `ordinals` of one input, which is read again. A record that doesn't exist has none.

    `find_copies`: also finds the document that keeps each copy that deduplication dropped, which opens the keys of all
    parts.
    """
    traces = dict(_as_read(*build.spec_of(built), ordinals))
    kept = {ordinal: trace for ordinal, trace in traces.items() if not trace.dropped_by}
    for part, documents in cleaned_documents(build, built, {trace.id for trace in kept.values()}):
        for steps, document in trace_deduplication(build, part, documents, find_copies):
            trace = kept[ordinal_of(document.id)]
            trace.steps += steps
            trace.language = document.language
    return traces


def _as_read(spec: DocumentsSpec, file: InputSpec, ordinals: set[int]) -> Iterator[tuple[int, DocumentTrace]]:
    """(ordinal, trace up to cleaning) of each of the records that exists."""
    remaining = sorted(ordinals, reverse=True)
    recorder = DropRecorder()
    next_ordinal = file.range.first_ordinal
    clean, splits = Cleaner(spec.cleaning), Splits(spec, file)
    records = read_records(spec, file, ReadStats(counters=recorder))
    try:
        for record in records:
            split = splits.of_next(record)
            skipped = record.ordinal - next_ordinal
            while remaining and remaining[-1] < record.ordinal:
                ordinal = remaining.pop()
                yield from _left_out(spec, file, ordinal, recorder.drops, ordinal - next_ordinal, skipped)
            if remaining and remaining[-1] == record.ordinal:
                yield remaining.pop(), _cleaned(spec, file, record, split, clean)
            recorder.drops.clear()
            next_ordinal = record.ordinal + 1
            if not remaining:
                return
    except DamagedInput as error:
        recorder.drop("damaged", f"{error.position}: {error.reason}")
    for ordinal in reversed(remaining):
        yield from _left_out(spec, file, ordinal, recorder.drops, ordinal - next_ordinal, len(recorder.drops))


def _left_out(
    spec: DocumentsSpec, file: InputSpec, ordinal: int, drops: list[Drop], index: int, skipped: int
) -> Iterator[tuple[int, DocumentTrace]]:
    """The trace of a record that the reader left out, `index` of the `skipped` ones, among which it noted `drops`."""
    rules = dict.fromkeys(drop.rule for drop in drops)
    if not rules or index >= skipped:
        return
    # A line without a record, as a blank one, leaves fewer drops than records are skipped.
    drop = drops[index] if len(drops) == skipped else Drop(" or ".join(rules))
    steps = [StepTrace("reading", [drop], None)]
    yield ordinal, DocumentTrace(spec.identity(file.file, ordinal), file.path, steps=steps)


def _cleaned(spec: DocumentsSpec, file: InputSpec, record: Record, split: str, clean: Cleaner) -> DocumentTrace:
    text = text_of(record, spec.format)
    trace = DocumentTrace(spec.identity(file.file, record.ordinal), file.path, record.url, record.title, text)
    if not text.strip():
        trace.steps.append(StepTrace("reading", [Drop("empty")], None))
        return trace
    recorder = DropRecorder()
    document = clean_record(record, text, split, clean, spec, file, recorder)
    trace.steps.append(StepTrace("cleaning", recorder.drops, document.text if document else None))
    if document:
        trace.language, trace.split = document.language, document.split
    return trace


def cleaned_documents(
    build: FinishedBuild, built: BuiltInput, ids: set[str]
) -> Iterator[tuple[Part, dict[int, Document]]]:
    """Each part with documents of an input, and those of the documents `ids` by number, as cleaning left them."""
    paths = {part.path for part in built.unit.result.parts}
    for part in build.in_order:
        if part.path in paths and ids:
            identities = pq.read_table(build.directory / part.path, columns=["id"])["id"].to_pylist()
            numbers = {number for number, identity in enumerate(identities) if identity in ids}
            if numbers:
                documents = enumerate(read_documents(build.directory, part.path, SCHEMA.names))
                yield part, {number: document for number, document in documents if number in numbers}


def trace_deduplication(
    build: FinishedBuild, part: Part, documents: dict[int, Document], find_copies: bool = False
) -> Iterator[tuple[list[StepTrace], Document]]:
    """What the steps of deduplication did to `documents` of one part, by number, and what they leave of each."""
    unit = build.in_order.index(part)
    cleaning = next(build.config.cleaning_of(one) for one in build.config.sources if one.name == part.source)

    def function_of(one: Decided) -> Apply:
        if one.step in CHECKS:
            return check_of(build.directory, one.step, cleaning)
        step, least = step_of(one.step, build.config.dedup), cleaning.min_sentences_per_page
        return application(build.directory, step, one.files[unit], one.duplicates, unit, least)

    applied = [(one, function_of(one)) for one in build.steps]
    for number, document in documents.items():
        steps: list[StepTrace] = []
        for decided, apply in applied:
            recorder = DropRecorder()
            ((_, _, left),) = apply([(number, document, document)], recorder)
            drops = recorder.drops
            if drops and find_copies and decided.step not in CHECKS:
                drops = _with_copies(build, decided, unit, number, document, drops)
            steps.append(StepTrace(decided.step, drops, left.text if left else None))
            if left is None:
                break
            document = left
        yield steps, document


def _with_copies(
    build: FinishedBuild, decided: Decided, unit: int, number: int, document: Document, drops: list[Drop]
) -> list[Drop]:
    """`drops` with the documents that keep the copies."""
    step = step_of(decided.step, build.config.dedup)
    keys = {item: words[: step.group] for item, words in step.keys(document)}
    own = None if step.clusters else decided.files[unit]
    items = read_duplicates(build.directory, own, decided.duplicates, unit).get(number, [])
    if isinstance(step, EqualSubstrings):  # one drop for each region
        items = [first for first, _ in step.regions(items)]
        keys = {item: words for item, words in keys.items() if item in items}
    smallest = smallest_keys(build.directory, decided.files, step.group, set(keys.values()))
    if step.clusters:  # a cluster's documents share bands; the smallest neighbour is one of them
        others = sorted({document for document in smallest.values() if document != (unit, number)})
        return [replace(drop, stays_on=_name(build, others[:1])) for drop in drops]
    copies = [smallest[keys[item]] for item in items if item in keys]
    named = [replace(drop, stays_on=_name(build, [copy])) for drop, copy in zip(drops, copies, strict=False)]
    return named + drops[len(copies) :]


def _name(build: FinishedBuild, documents: Iterable[tuple[int, int]]) -> str:
    """The id of the first of `documents`, (unit, number), or a word for a page that cleaning dropped."""
    for unit, number in documents:
        if number == NO_DOCUMENT:
            return "a page that cleaning drops"
        for count, document in enumerate(read_documents(build.directory, build.in_order[unit].path, ["id"])):
            if count == number:
                return document.id
    return ""
