"""`data-pipeline trace`: what happened to the documents with an id or a URL, as text and as JSON.

Traces repeat what each stage did to a document, since stages are pure functions.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

from data_pipeline.base.errors import DamagedInput, UserError
from data_pipeline.base.formatting import counted
from data_pipeline.corpus.documents import SCHEMA, read_documents
from data_pipeline.dedup.keys import NO_DOCUMENT, smallest_keys
from data_pipeline.dedup.reading import WITHOUT_KEYS, opened
from data_pipeline.dedup.step import Step
from data_pipeline.dedup.substrings import EqualSubstrings
from data_pipeline.engine.context import Context
from data_pipeline.sources.formats import FORMATS
from data_pipeline.sources.record import ReadStats, Record
from data_pipeline.stages.documents import DocumentsSpec, InputSpec, clean_record, read_records, splitter
from data_pipeline.text.cleaning.page import Cleaner
from data_pipeline.text.document import Document, Tally
from data_pipeline.tools.finished_build import BuiltInput, FinishedBuild, records_named

_WIDTH, _NAME, _QUOTED = 80, 12, 63  # columns of a line, of a name, of a quotation
_DROPS_SHOWN = 5  # of each rule


@dataclass(frozen=True)
class Drop:
    """A page, line or span that a rule dropped.

    Attributes:
        what: its text; "" if the rule doesn't give it.
        stays_on: the document that keeps the copy, if it is known.
    """

    rule: str
    what: str = ""
    stays_on: str = ""


@dataclass
class StepTrace:
    """The parts of a document that a step dropped, and the text that is left. None: the step dropped the document."""

    step: str
    drops: list[Drop]
    text: str | None


@dataclass
class DocumentTrace:
    """The way of a record through the steps. `text`: the text before the first step."""

    id: str
    path: str = ""
    url: str = ""
    title: str = ""
    text: str = ""
    steps: list[StepTrace] = field(default_factory=list)
    language: str = ""
    split: str = ""

    @property
    def dropped_by(self) -> str:
        """The rule that dropped the document; "" if the corpus has the document."""
        if self.steps and self.steps[-1].text is None:
            return self.steps[-1].drops[-1].rule if self.steps[-1].drops else self.steps[-1].step
        return ""


def trace(build: FinishedBuild, name: str) -> list[DocumentTrace]:
    """The traces of the records with the id or URL `name`. Raises UserError if there are none."""
    found = list[DocumentTrace]()
    for built, ordinals in records_named(build, name):
        found += _trace_records(build, built, ordinals)
    if not found:
        raise UserError(f"{name}: its file has no such record")
    return found


def _trace_records(build: FinishedBuild, built: BuiltInput, ordinals: set[int]) -> list[DocumentTrace]:
    """The traces of the records `ordinals` of an input, which is read again. A record that doesn't exist has none.

    If deduplication dropped a copy, the keys of all parts are opened, to find the document that keeps it.
    """
    traces = list(_as_read(*build.spec_of(built), ordinals))
    kept = {trace.id: trace for trace in traces if not trace.dropped_by}
    paths = {part.path for part in built.unit.result.parts if kept}
    for unit, group in enumerate(build.in_order):
        first = 0
        for part in group:
            if part.path in paths:
                read = enumerate(read_documents(build.corpus, [part.path], SCHEMA.names), first)
                documents = {number: document for number, document in read if document.id in kept}
                _deduplicate(build, unit, documents, kept)
            first += sum(part.documents.values())
    return traces


def _recorder(drops: list[Drop]) -> Tally:
    """A tally that appends every drop to `drops`, with its whole text."""
    return Tally(lambda rule, text, number: drops.extend([Drop(rule, text)] * number))


def _as_read(spec: DocumentsSpec, file: InputSpec, ordinals: set[int]) -> Iterator[DocumentTrace]:
    """The traces, up to cleaning, of the records that exist."""
    drops = list[Drop]()
    next_ordinal = file.range.first_ordinal
    clean, split_of_next = Cleaner(spec.cleaning), splitter(spec, file)
    try:
        for record in read_records(spec, file, ReadStats(_recorder(drops))):
            split = split_of_next(record)
            yield from _left_out(spec, file, ordinals, range(next_ordinal, record.ordinal), drops)
            if record.ordinal in ordinals:
                yield _cleaned(spec, file, record, split, clean)
            drops.clear()
            next_ordinal = record.ordinal + 1
            if next_ordinal > max(ordinals):
                return
    except DamagedInput as error:
        drops.append(Drop("damaged", f"{error.position}: {error.reason}"))
    at_end = range(next_ordinal, next_ordinal + len(drops))
    yield from _left_out(spec, file, ordinals, at_end, drops)


def _left_out(
    spec: DocumentsSpec, file: InputSpec, ordinals: set[int], skipped: range, drops: list[Drop]
) -> Iterator[DocumentTrace]:
    """The traces of records that the reader has `skipped`, with the `drops` that it noted."""
    rules = dict.fromkeys(drop.rule for drop in drops)
    for ordinal in sorted(ordinals.intersection(skipped)) if drops else ():
        # lines without a record, such as blank lines, leave fewer drops than skipped records
        drop = drops[ordinal - skipped.start] if len(drops) == len(skipped) else Drop(" or ".join(rules))
        steps = [StepTrace("reading", [drop], None)]
        yield DocumentTrace(spec.identity(file.file, ordinal), file.path, steps=steps)


def _cleaned(spec: DocumentsSpec, file: InputSpec, record: Record, split: str, clean: Cleaner) -> DocumentTrace:
    text = FORMATS[spec.format].text_of(record)
    trace = DocumentTrace(spec.identity(file.file, record.ordinal), file.path, record.url, record.title, text)
    if not text.strip():
        trace.steps.append(StepTrace("reading", [Drop("empty")], None))
        return trace
    drops = list[Drop]()
    document = clean_record(record, text, split, clean, spec, file, _recorder(drops))
    trace.steps.append(StepTrace("cleaning", drops, document.text if document else None))
    if document:
        trace.language, trace.split = document.language, document.split
    return trace


def _deduplicate(
    build: FinishedBuild, unit: int, documents: dict[int, Document], traces: dict[str, DocumentTrace]
) -> None:
    """Adds what deduplication did to `documents`, by number in their unit, to `traces`."""
    source = build.in_order[unit][0].source
    cleaning = next(build.config.cleaning_of(one) for one in build.config.sources if one.name == source)
    for decided in build.steps if documents else ():
        step, least = (
            opened(Context(build.corpus), decided.step, build.config.dedup, cleaning),
            cleaning.min_sentences_per_page,
        )
        found = step.found(build.corpus, decided.files[unit], decided.duplicates, unit)
        for number, document in list(documents.items()):
            drops = list[Drop]()
            ((_, _, left),) = step.left([(number, document, document)], found, _recorder(drops), least)
            if drops and decided.step not in WITHOUT_KEYS:
                drops = _with_copies(build, step, decided.files, found.get(number, []), (unit, number), document, drops)
            trace = traces[document.id]
            trace.steps.append(StepTrace(decided.step, drops, left.text if left else None))
            if left:
                documents[number], trace.language = left, left.language
            else:
                del documents[number]


def _with_copies(
    build: FinishedBuild,
    step: Step,
    files: list[str],
    items: list[int],
    place: tuple[int, int],
    document: Document,
    drops: list[Drop],
) -> list[Drop]:
    """`drops` with the documents that keep the copies. They are the duplicate `items` of the document at `place`,
    (unit, number). `files` have the keys of all units."""
    keys = {item: words[: step.group] for item, words in step.keys(document)}
    if isinstance(step, EqualSubstrings):  # one drop for each region
        items = [first for first, _ in step.regions(items)]
        keys = {item: words for item, words in keys.items() if item in items}
    smallest = smallest_keys(build.corpus, files, step.group, set(keys.values()))
    if step.clusters:  # documents of a cluster share bands; the smallest one stays
        others = {document for document in smallest.values() if document != place}
        return [replace(drop, stays_on=_name(build, *min(others))) for drop in drops] if others else drops
    copies = [smallest[keys[item]] for item in items if item in keys]
    named = [replace(drop, stays_on=_name(build, *copy)) for drop, copy in zip(drops, copies, strict=False)]
    return named + drops[len(copies) :]


def _name(build: FinishedBuild, unit: int, number: int) -> str:
    """The id of a document, or words for a page that cleaning dropped."""
    if number == NO_DOCUMENT:
        return "a page that cleaning drops"
    paths = (part.path for part in build.in_order[unit])
    return next(islice(read_documents(build.corpus, paths, ["id"]), number, None)).id


def as_json(found: DocumentTrace) -> dict[str, object]:
    """A trace with every drop in full, and numbers of characters in place of texts."""
    return {
        "id": found.id,
        "file": found.path,
        "url": found.url,
        "title": found.title,
        "kept": not found.dropped_by,
        "rule": found.dropped_by,
        "characters": len(found.text),
        "steps": [
            {
                "step": step.step,
                "characters": None if step.text is None else len(step.text),
                "dropped": [asdict(drop) for drop in step.drops],
            }
            for step in found.steps
        ],
        "language": found.language,
        "split": found.split,
    }


def as_text(found: DocumentTrace) -> str:
    """A trace in lines of 80 columns."""
    entries = [("file", found.path.removeprefix("file://")), ("url", found.url), ("title", found.title)]
    entries.append(("read", counted(len(found.text), "character") if found.text else ""))
    for step in found.steps:
        entries += _step(step, found)
    if found.dropped_by:
        entries.append(("dropped", f"by {found.dropped_by}"))
    else:
        language = f", language {found.language}" if found.language else ""
        entries.append(("kept", f"split {found.split}{language}"))
    return "\n".join([found.id, *(line for name, text in entries for line in _wrapped(name, text))])


def _step(step: StepTrace, found: DocumentTrace) -> Iterator[tuple[str, str]]:
    left = "the document is dropped" if step.text is None else f"{counted(len(step.text), 'character')} left"
    yield step.step, left if step.drops or step.step == "cleaning" else "nothing dropped"
    by_rule: dict[str, list[Drop]] = {}
    for drop in step.drops:
        by_rule.setdefault(drop.rule, []).append(drop)
    for rule, drops in by_rule.items():
        yield "", f"{rule}: {len(drops):,}" if len(drops) > 1 else rule
        for drop in drops[:_DROPS_SHOWN]:
            if drop.what and drop.what not in (found.url, found.text):
                what = " ".join(drop.what.split())
                yield "", f'"{what}"' if len(what) <= _QUOTED else f'"{what[: _QUOTED - 1]}…"'
            if drop.stays_on:
                yield "", f"a copy stays on {drop.stays_on}"
        if len(drops) > _DROPS_SHOWN:
            yield "", f"and {len(drops) - _DROPS_SHOWN:,} more (--json has them all)"


def _wrapped(name: str, text: str) -> list[str]:
    """The lines of `text` beside `name`; none for an empty text."""
    head = f"  {name:{_NAME}} "
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
