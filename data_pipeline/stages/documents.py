"""The documents stage: reads and cleans input files, or ranges of large ones, and writes Parquet files of documents."""

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.base import packages, stores
from data_pipeline.base.arrow_tables import table_of
from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import DamagedInput, StoreDamage, StoreError, StoreUnavailable, UserError, may_be_of_node
from data_pipeline.base.formatting import masked
from data_pipeline.base.store import Store
from data_pipeline.base.stores import Checksum
from data_pipeline.config import CorpusConfig, while_reading
from data_pipeline.dedup.places import Span
from data_pipeline.engine.context import Context
from data_pipeline.engine.work_units import Finished, Unit
from data_pipeline.sources import formats
from data_pipeline.sources.decompress import CorruptMember
from data_pipeline.sources.formats import FORMATS, advice
from data_pipeline.sources.record import Damage, Input, Range, ReadStats, Record
from data_pipeline.stages import dropped
from data_pipeline.stages.inputs import InputFile, pieces, shared
from data_pipeline.stages.kinds import INPUTS, PARTS
from data_pipeline.stages.parts import Histograms, PartsResult, PartsWritten, WrittenPart, part_file, size_of
from data_pipeline.stages.stage import Stage
from data_pipeline.text.cleaning.page import TOO_LONG
from data_pipeline.text.document import Document, Dropped, Listener, Tally, is_chosen, most_common, normalize_url
from data_pipeline.text.languages import shortest_tag
from data_pipeline.text.step import Rule, cleaned, loaded_once, memory_of

_HOLES_IN_RESULT = 100  # a report shows 20
_MOST_WAITING = 10_000  # records without an id, in memory
_FILES_IN_FOLDER = 1000  # twice as many with the files of URLs
Item = TypeVar("Item")
_ADDRESSES = pa.schema([("url", pa.string()), ("timestamp", pa.string())])


@dataclass(frozen=True, slots=True)
class InputSpec:
    """A `range` of the file at `path`.

    Attributes:
        file: the path relative to the source's root.
        killed: why the file isn't read: it has crashed its workers, or its store sends other bytes than it publishes.
        held_out: (p, q): the last p/q of its characters go to validation. None: a hash of each document decides.
        sha256: the file's checksum as its store publishes it; "" if none.
    """

    path: str
    file: str
    range: Range
    killed: str = ""
    held_out: tuple[int, int] | None = None
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class DocumentsSpec:
    """Inputs of one source, and how they become documents.

    Attributes:
        name: the source's name.
        rules: the steps that are applied while the inputs are read.
        split: `CorpusConfig.ratio_of` the source.
        part: the name of the first part, which is written to `folder`.
        dropped: the name of the table of dropped documents; "": none is written.
        urls: True: the URLs of dropped pages are written beside each part, for deduplication.
    """

    inputs: list[InputSpec]
    format: str
    name: str
    language: str
    options: dict[str, Any]
    rules: list[Rule]
    split: tuple[int, int]
    part: str
    folder: str
    dropped: str
    urls: bool
    characters_per_part: int

    def identity(self, file: str, ordinal: int) -> str:
        """The id of the document made from the record `ordinal` of `file`."""
        return f"{self.name}/{file}/{ordinal:09d}"


@dataclass(frozen=True, slots=True)
class InputResult:
    """The result of reading one range of an input file.

    Attributes:
        documents: the number of documents that cleaning kept.
        damaged: the number of damaged records.
        bytes, sha256: of the whole file. Only the result of the first range has them; its unit reads the whole file.
        again: the system or the store has refused the file, so that the next build reads the file again.
    """

    file: str
    range: Range
    status: Literal["ok", "damaged", "truncated", "unreadable"]
    documents: int
    damaged: int
    damage: list[Damage]
    bytes: int = 0
    sha256: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsRead(PartsWritten):
    """What the driver keeps of a unit's result: the results of its inputs, in order, and the parts."""

    source: str
    inputs: list[InputResult]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.inputs)

    @property
    def again(self) -> list[str]:
        return [one.file for one in self.inputs if one.again]


@dataclass(frozen=True, kw_only=True)
class DocumentsResult(PartsResult, InputsRead):
    """The result of a unit. `template_holes`: how often each template left a hole in a sentence."""

    template_holes: dict[str, int] = field(default_factory=dict)


_SETTINGS = [one.name for one in fields(DocumentsSpec) if one.name not in ("inputs", "rules")]


def plan(config: CorpusConfig, store: Store, files: Sequence[InputFile]) -> list[Unit[DocumentsSpec]]:
    """A unit for each large input file or range of one, and for neighbouring small files of a source.

    Units are in the order of sources and then of their documents' ids. `files`: the files of all sources, in order.
    Documents that will be deduplicated are written below `.stages`.
    """
    units = []
    rules = {name: while_reading(steps) for name, steps in config.all_steps.items()}
    identities = {name: [rule.identity for rule in own] for name, own in rules.items()}
    later = any(len(rules[name]) < len(steps) for name, steps in config.all_steps.items())
    compared = any(step.compares_dropped_pages for step in config.key_steps)
    offering = {source.name: packages.offering("sources", source.format) for source in config.sources}
    ratios = {source.name: config.ratio_of(source) for source in config.sources}
    whole = _held_out_files(files, ratios) if config.split.by == "files" else set()
    memory = memory_of(rule for own in rules.values() for rule in own)  # a worker may read units of all sources
    sizes, before = Counter[str](), Counter[str]()  # bytes of each source
    for file in files:
        sizes[file.source.name] += file.bytes
    for number, own in enumerate(_inputs_of_units(config, store, files)):
        name = f"part-{number:05d}"
        source = own[0][0].source
        by = config.split.by if source.split is None else "hash"
        total, start, specs = sizes[source.name], before[source.name], list[InputSpec]()
        for file, piece in own:
            size = (piece.stop or file.bytes) - piece.start
            before[source.name] += size
            left = total - before[source.name]
            end: tuple[int, int] | None = None
            if by == "files":
                end = (1, 1) if (source.name, file.name) in whole else (0, 1)
            elif by == "position":
                end = _held_out(left, size, total, ratios[source.name])
            specs.append(InputSpec(file.path, file.name, piece, held_out=end, sha256=file.sha256))
        spec = DocumentsSpec(
            inputs=specs,
            format=source.format,
            name=source.name,
            language=source.language,
            options=source.options,
            rules=rules[source.name],
            split=ratios[source.name],
            part=name,
            folder=".stages/documents" if later else "documents",
            dropped=dropped.name_of(STAGE.name, name) if config.keep_dropped else "",
            urls=compared,
            characters_per_part=config.characters_per_part,
        )
        settings = {key: getattr(spec, key) for key in _SETTINGS}
        stamps = [(file.name, piece, file.bytes, file.stamp) for file, piece in own]  # no paths: files may be moved
        settings["held_out"] = [one.held_out for one in specs]
        inputs_of = fingerprint([settings, stamps, identities[source.name], offering[source.name]])
        if later and number >= _FILES_IN_FOLDER:  # after the fingerprint, which doesn't include the folder
            spec = replace(spec, folder=f"{spec.folder}/{number // _FILES_IN_FOLDER:03d}")
        outputs = tuple(filter(None, [spec.dropped]))
        units.append(Unit(name, spec, inputs_of, outputs, before[source.name] - start, memory))
    return units


def _inputs_of_units(
    config: CorpusConfig, store: Store, files: Sequence[InputFile]
) -> Iterator[list[tuple[InputFile, Range]]]:
    """The files, or the range of one file, that each unit reads."""
    for together in shared(files, config):
        if len(together) > 1:
            yield [(file, Range()) for file in together]
        else:
            yield from ([(together[0], piece)] for piece in pieces(together[0], config.bytes_per_unit, store))


class PartsWriter:
    """Writes the parts of a unit, as a context manager. A part ends after `characters_per_part` characters of pages."""

    def __init__(self, store: Store, spec: DocumentsSpec):
        self._store, self._spec = store, spec
        self._stack = contextlib.ExitStack()
        self.histograms = Histograms()
        self.written: list[WrittenPart] = []

    def __enter__(self) -> "PartsWriter":
        first = self._spec.inputs[0]
        self._open(self._spec.identity(first.file, first.range.first_ordinal))
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None:
            self._close()
        self._stack.__exit__(*raised)

    def add(self, file: str, record: Record, document: Document | None, may_be_newest: bool) -> None:
        """Adds a page of `file`, and its document if cleaning kept it. `may_be_newest`: the page may be the newest of
        its URL."""
        if self._characters >= self._spec.characters_per_part:
            self._close()
            self._open(self._spec.identity(file, record.ordinal))
        self._characters += size_of(record.text) + len(record.target)
        if document is None and may_be_newest and self._spec.urls:
            self._dropped.append((record.url, record.timestamp))
        if document is not None:
            self._file.add(document)
            self.histograms.add(document)
            first, _ = self._records.get(file, (record.ordinal, 0))
            self._records[file] = first, record.ordinal + 1

    def _open(self, first_id: str) -> None:
        number = len(self.written)
        name = self._spec.part + (f"_{number:05d}" if number else "")  # sorts in this order
        self._path = f"{self._spec.folder}/{name}"
        self._first_id = first_id
        self._file = self._stack.enter_context(part_file(self._store, f"{self._path}.parquet"))
        self._dropped: list[tuple[str, str]] = []
        self._records: dict[str, tuple[int, int]] = {}  # of each file: from the first document's to behind the last's
        self._characters = 0

    def _close(self) -> None:
        self._stack.close()
        part = self._file.describe(f"{self._path}.parquet", self._spec.name, self._first_id)
        spans = [Span(f"{self._spec.name}/{file}", *records) for file, records in self._records.items()]
        part = replace(part, spans=spans)
        if self._spec.urls:
            part = replace(part, urls=f"{self._path}.urls.parquet")
            with self._store.put(part.urls) as temporary:
                pq.write_table(table_of(self._dropped, _ADDRESSES), temporary, compression="zstd")
        self.written.append(part)


def write_documents(context: Context, spec: DocumentsSpec) -> DocumentsResult:
    """Reads, cleans and splits inputs and writes their documents; returns counts of what was read and dropped.

    Damage ends only its own input. Undamaged records are kept, and the result says where the damage is and why. The
    status is "unreadable" if no record is undamaged, if a remote store refuses the file, or sends bytes with another
    checksum than the published one. Raises StoreUnavailable if a store doesn't answer.
    """
    try:
        return _write(context, spec)
    except StoreDamage as error:
        if context.may_be_retried(error):
            raise
        return write_documents(context, without(spec, error.file, str(error)))


def _write(context: Context, spec: DocumentsSpec) -> DocumentsResult:
    spec = replace(spec, rules=[loaded_once(rule, context) for rule in spec.rules])
    counts, results, holes = Tally(), list[InputResult](), Counter[str]()
    with PartsWriter(context.store, spec) as parts, dropped.dropped_file(context.store, spec.dropped) as listener:
        for file in spec.inputs:
            context.file(file.file)
            checksum = context.checksum(file.path)
            result = _write_input(context, spec, file, checksum, parts, counts, holes, listener)
            if file.range.start:
                results.append(result)
                continue
            size, sha256 = (0, "") if result.again else checksum.finish()
            if file.sha256 and sha256 not in ("", file.sha256):
                reason = f"its sha256 is {sha256}, but the store publishes {file.sha256}; run the same command again"
                raise StoreDamage(f"{file.path}: {reason}", file.file)
            results.append(replace(result, bytes=size, sha256=sha256))
    own = {"source": spec.name, "inputs": results, "template_holes": most_common(holes, _HOLES_IN_RESULT)}
    return DocumentsResult.of(counts, parts.written, parts.histograms, **own)


def without(spec: DocumentsSpec, file: str, reason: str) -> DocumentsSpec:
    """`spec` with `file` marked as unreadable, as `InputSpec.killed` says."""
    return replace(spec, inputs=[replace(one, killed=reason) if one.file == file else one for one in spec.inputs])


STAGE: Stage[DocumentsSpec, InputsRead] = Stage(
    "documents",
    17,
    write_documents,
    "lower characters_per_part",
    without,
    plan=lambda build: plan(build.config, build.store, build.inputs),
    unit="one input file, a range of a large one, or several small ones",
    reads=(INPUTS,),
    writes=PARTS,
    memory="twice the file of each classifier",
    keeps=InputsRead,
)


def total(finished: Sequence[Finished[PartsWritten]], *splits: str) -> int:
    """The number of documents of `splits`, or of all splits, that units have written."""
    counts = (unit.result.documents for unit in finished)
    return sum(n for count in counts for split, n in count.items() if not splits or split in splits)


def split_of(url: str, identity: str, held_out: int, modulus: int) -> str:
    """ "validation" if the md5 of the normalised URL (or of the id) mod `modulus` is below `held_out`, else "train"."""
    return "validation" if is_chosen(normalize_url(url) or identity, held_out, modulus) else "train"


class _LeftOut:
    """Makes documents with ids of the records that a reader leaves out, such as redirects, for a listener.

    Their ordinals are those between two records. If there are more ordinals than records, as with blank lines, or more
    than 10,000 records, the id is the file's.
    """

    def __init__(self, spec: DocumentsSpec, file: InputSpec, listener: Listener):
        self._spec, self._file, self._listener = spec, file, listener
        self._next: int | None = file.range.first_ordinal  # of the first record that waits; None: unknown
        self._waiting: list[tuple[str, str]] = []  # (rule, example)

    def add(self, rule: str, example: str) -> None:
        self._waiting.append((rule, example))
        if len(self._waiting) == _MOST_WAITING:
            self._next = None
            self._note()

    def before(self, ordinal: int | None) -> None:
        """Notes the records since the last one, which come before the record `ordinal`; None: they are the last."""
        if self._next is not None and ordinal not in (None, self._next + len(self._waiting)):
            self._next = None
        self._note()
        if ordinal is not None:
            self._next = ordinal + 1

    def _note(self) -> None:
        for number, (rule, example) in enumerate(self._waiting):
            known = None if self._next is None else self._spec.identity(self._file.file, self._next + number)
            identity = known or f"{self._spec.name}/{self._file.file}"
            self._listener("reading", Document(identity, example, source=self._spec.name), Dropped(rule))
        self._waiting = []


def _write_input(
    context: Context,
    spec: DocumentsSpec,
    file: InputSpec,
    checksum: Checksum,
    parts: PartsWriter,
    counts: Tally,
    holes: Counter[str],
    listener: Listener | None,
) -> InputResult:
    if file.killed:
        damage = [Damage("a place unknown", masked(file.killed))]
        return InputResult(file.file, file.range, "unreadable", 0, 0, damage, again=True)
    left_out = _LeftOut(spec, file, listener) if listener else None
    stats, documents, ends = ReadStats(Tally(listener, left_out.add if left_out else None)), 0, list[UserError]()
    pages = _pages(spec, file, checksum, stats, holes, left_out)
    for record, document, may_be_newest in _until_error(context, pages, file, ends):
        parts.add(file.file, record, document, may_be_newest)
        documents += document is not None
    if left_out:
        left_out.before(None)
    damage = [
        Damage(end.position, end.reason) if isinstance(end, DamagedInput) else Damage("the start", str(end))
        for end in ends
    ]
    corrupt = any(isinstance(end, CorruptMember) for end in ends)
    own, damaged = stats.counters, stats.counters.dropped_documents["damaged"]
    counts.add(own)
    found = [*damage, *stats.damage]
    unreadable = bool(found) and own.read <= damaged
    again = any(map(may_be_of_node, ends))
    if unreadable and not corrupt and not again:  # the format may be wrong
        position, reason = found[0]
        found[0] = Damage(position, f"{reason}{advice(file.path, spec.format, reason)}")
    found = [Damage(one.position, masked(one.reason)) for one in found]  # reasons may name the URL
    status: Literal["ok", "damaged", "truncated", "unreadable"] = "damaged" if found else "ok"
    status = "unreadable" if unreadable else "truncated" if own.truncated_xml else status
    return InputResult(file.file, file.range, status, documents, damaged, found, again=again)


def _until_error(context: Context, pages: Iterator[Item], file: InputSpec, ends: list[UserError]) -> Iterator[Item]:
    """Yields the `pages` of `file` up to the error that ends the input, which is added to `ends`: the input is damaged,
    was removed, lacks a column, or is refused by the system or by a store that still lists it."""
    try:
        yield from pages
    except UserError as error:
        if context.may_be_retried(error):
            raise
        if isinstance(error, StoreUnavailable) or (isinstance(error, StoreError) and not stores.lists(file.path)):
            raise  # no file is at fault, but the store or the credentials
        ends.append(error)


def _pages(
    spec: DocumentsSpec,
    file: InputSpec,
    checksum: Checksum,
    stats: ReadStats,
    holes: Counter[str],
    left_out: _LeftOut | None,
) -> Iterator[tuple[Record, Document | None, bool]]:
    """(page, its document or None, whether it may be the newest page of its URL) for each page of one input.

    A page that cleaning drops may be the newest, too, unless it is too long. `holes` counts the templates that left a
    hole in a sentence.
    """
    split_of_next, text_of = splitter(spec, file), FORMATS[spec.format].text_of
    for record in read_records(spec, file, stats, checksum):
        if left_out:
            left_out.before(record.ordinal)
        split, text = split_of_next(record), text_of(record, holes)
        if not text.strip():
            why = Dropped("empty", record.title or record.url or record.text)
            stats.counters.drop("reading", document_of(record, text, split, spec, file), why)
            continue
        counted = stats.counters.dropped_documents
        too_long = counted[TOO_LONG]
        document = cleaned(document_of(record, text, split, spec, file), spec.rules, stats.counters)
        may_be_newest = bool(record.url and not record.target and counted[TOO_LONG] == too_long)
        yield record, document, may_be_newest


def read_records(
    spec: DocumentsSpec, file: InputSpec, stats: ReadStats, checksum: Checksum | None = None
) -> Iterator[Record]:
    """The records of one input, before cleaning. Reading them updates `checksum`."""
    return formats.read(spec.format, Input(file.path, *file.range, spec.options, checksum=checksum), stats)


def splitter(spec: DocumentsSpec, file: InputSpec) -> Callable[[Record], str]:
    """A function that returns the split of a record. It takes every record of the input, in order.

    If a part of the input is held out by position, the whole input is read first, to count its characters.
    """
    if file.held_out is None:
        return lambda record: split_of(record.url, spec.identity(file.file, record.ordinal), *spec.split)
    end, characters, before = Fraction(*file.held_out), 0, 0
    if 0 < end < 1:
        try:
            for record in read_records(spec, file, ReadStats()):
                characters += len(record.text) + len(record.target)
        except UserError as error:
            if may_be_of_node(error):  # the next reading may find more: the split would depend on it
                raise
            # damage ends the next reading, too, which reports it
    for_training: float | Fraction = (1 - end) * characters if end else math.inf

    def split_of_next(record: Record) -> str:
        nonlocal before
        split = "validation" if before >= for_training else "train"
        before += len(record.text) + len(record.target)
        return split

    return split_of_next


def document_of(record: Record, text: str, split: str, spec: DocumentsSpec, file: InputSpec) -> Document:
    """The document made from a record with the text `text`, before the first step."""
    return Document(
        id=spec.identity(file.file, record.ordinal),
        text=text,
        url=record.url,
        title=record.title,
        language=shortest_tag(spec.language or record.language),
        source=spec.name,
        split=split,
        timestamp=record.timestamp,
        target=record.target,
    )


def _held_out_files(files: Sequence[InputFile], ratios: Mapping[str, tuple[int, int]]) -> set[tuple[str, str]]:
    """(source, file) of the files that are held out whole: as many as come nearest to the ratio of a source's bytes, at
    least one of several files."""
    found = set[tuple[str, str]]()
    by_source: dict[str, list[InputFile]] = {}
    for file in files:
        by_source.setdefault(file.source.name, []).append(file)
    for name, own in by_source.items():
        own.sort(key=lambda file: hashlib.md5(file.name.encode(), usedforsecurity=False).digest())
        wanted, taken = Fraction(*ratios[name]) * sum(file.bytes for file in own), 0
        for number, file in enumerate(own[:-1] if wanted else ()):  # one file is left to train on
            if number and taken + Fraction(file.bytes, 2) > wanted:
                break
            found.add((name, file.name))
            taken += file.bytes
    return found


def _held_out(left: int, size: int, total: int, ratio: tuple[int, int]) -> tuple[int, int]:
    """(p, q): the share p/q of an input of `size` bytes that lies in the last `ratio` of its source. The source has
    `total` bytes; `left` bytes come after the input."""
    inside = Fraction(*ratio) * total - left
    share = min(max(inside / size, Fraction(0)), Fraction(1)) if size else Fraction(0)
    return share.numerator, share.denominator
