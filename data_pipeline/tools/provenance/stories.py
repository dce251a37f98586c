"""What became of documents, by doing again what the stages did: every stage is a pure function."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow.parquet as pq

from data_pipeline.cleaning.page import Cleaner
from data_pipeline.dedup.keys import NOBODY, read_losers, smallest_keys
from data_pipeline.dedup.step import Row, Step
from data_pipeline.dedup.substrings import EqualSubstrings
from data_pipeline.execution.parts import Part, read_documents
from data_pipeline.foundation.errors import DamagedInput
from data_pipeline.sources import Intake, Record
from data_pipeline.stages.deduplication import VERDICTS, Decided, read_verdicts, step_of
from data_pipeline.stages.documents import DocumentsSpec, InputSpec, Splits, clean_record, read_records, text_of
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally
from data_pipeline.tools.provenance.finished_build import BuiltInput, FinishedBuild
from data_pipeline.tools.provenance.trail import Drop, Trail

Apply = Callable[[int, Row, Tally, int], str | None]  # (number, row, tally, least sentences) -> the text that is left
_COLUMNS = list(Document.__dataclass_fields__)


@dataclass
class Passage:
    """What one step did to a document: what it dropped, and the text that it left; None if it dropped the document."""

    step: str
    drops: list[Drop]
    text: str | None


@dataclass
class Story:
    """What became of one record, step by step. `text` is as it was read, before the first step."""

    id: str
    path: str = ""
    url: str = ""
    title: str = ""
    text: str = ""
    passages: list[Passage] = field(default_factory=list)
    language: str = ""
    split: str = ""

    @property
    def dropped_by(self) -> str:
        """The rule that dropped the document, or "" if it is part of the corpus."""
        if self.passages and self.passages[-1].text is None:
            return self.passages[-1].drops[-1].rule if self.passages[-1].drops else self.passages[-1].step
        return ""


def ordinal_of(identity: str) -> int:
    """The index of a document's record in its file."""
    return int(identity.rpartition("/")[2])


def stories(build: FinishedBuild, of: BuiltInput, ordinals: set[int], winners: bool = False) -> dict[int, Story]:
    """The stories of the records `ordinals` of one input, which is read again. A record that doesn't exist has none.

    `winners`: also finds which document keeps each copy that deduplication dropped, which opens the keys of all parts.
    """
    found = dict(_as_read(*build.spec_of(of), ordinals))
    kept = {number: story for number, story in found.items() if not story.dropped_by}
    for part, rows in rows_of(build, of, {story.id for story in kept.values()}):
        for passages, row in deduplicated(build, part, rows, winners):
            story = kept[ordinal_of(row["id"])]
            story.passages += passages
            story.language = row["language"]
    return found


def _as_read(spec: DocumentsSpec, of: InputSpec, ordinals: set[int]) -> Iterator[tuple[int, Story]]:
    """(ordinal, story up to cleaning) of each of the records that exists."""
    wanted = sorted(ordinals, reverse=True)
    trail = Trail()
    after = of.range.first_ordinal  # the first record that may come next
    clean, splits = Cleaner(spec.cleaning), Splits(spec, of)
    records = read_records(spec, of, Intake(counters=trail))
    try:
        for record in records:
            split = splits.of_next(record)
            while wanted and wanted[-1] < record.ordinal:
                ordinal = wanted.pop()
                yield from _unread(spec, of, ordinal, trail.drops, ordinal - after, record.ordinal - after)
            if wanted and wanted[-1] == record.ordinal:
                yield wanted.pop(), _cleaned(spec, of, record, split, clean)
            trail.drops.clear()
            after = record.ordinal + 1
            if not wanted:
                return
    except DamagedInput as error:
        trail.drop("damaged", f"{error.position}: {error.reason}")
    while wanted:
        ordinal = wanted.pop()
        yield from _unread(spec, of, ordinal, trail.drops, ordinal - after, len(trail.drops))


def _unread(
    spec: DocumentsSpec, of: InputSpec, ordinal: int, drops: list[Drop], place: int, gap: int
) -> Iterator[tuple[int, Story]]:
    """The story of the record at `place` of `gap` that the reader left out, where it dropped `drops`."""
    rules = dict.fromkeys(drop.rule for drop in drops)
    if not rules or place >= gap:
        return
    # A line without a record, as a blank one, leaves fewer drops than the gap has places.
    drop = drops[place] if len(drops) == gap else Drop(" or ".join(rules))
    yield ordinal, Story(spec.identity(of.file, ordinal), of.path, passages=[Passage("reading", [drop], None)])


def _cleaned(spec: DocumentsSpec, of: InputSpec, record: Record, split: str, clean: Cleaner) -> Story:
    text = text_of(record, spec.format)
    story = Story(spec.identity(of.file, record.ordinal), of.path, record.url, record.title, text)
    if not text.strip():
        story.passages.append(Passage("reading", [Drop("empty")], None))
        return story
    trail = Trail()
    document = clean_record(record, text, split, clean, spec, of, trail)
    story.passages.append(Passage("cleaning", trail.drops, document.text if document else None))
    if document:
        story.language, story.split = document.language, document.split
    return story


def rows_of(build: FinishedBuild, of: BuiltInput, ids: set[str]) -> Iterator[tuple[Part, dict[int, Row]]]:
    """Each part with documents of an input, with the rows of the documents `ids` by number, as cleaning left them."""
    own = {part.path for part in of.unit.result.parts}
    for part in build.in_order:
        if part.path in own and ids:
            identities = pq.read_table(build.directory / part.path, columns=["id"])["id"].to_pylist()
            numbers = {number for number, identity in enumerate(identities) if identity in ids}
            if numbers:
                rows = enumerate(read_documents(build.directory, part.path, _COLUMNS))
                yield part, {number: row for number, row in rows if number in numbers}


def deduplicated(
    build: FinishedBuild, part: Part, rows: dict[int, Row], winners: bool
) -> Iterator[tuple[list[Passage], Row]]:
    """What the steps of deduplication did to the documents `rows` of one part, by number, and the row they leave."""
    unit = build.in_order.index(part)
    sentences = next(
        build.config.cleaning_of(source).min_sentences_per_page
        for source in build.config.sources
        if source.name == part.source
    )
    steps = [(decided, _applied(build, decided, unit)) for decided in build.steps]
    for number, row in rows.items():
        passages: list[Passage] = []
        for decided, apply in steps:
            before = {**row}
            trail = Trail()
            text = apply(number, row, trail, sentences)
            drops = trail.drops
            if drops and winners and decided.step not in VERDICTS:
                drops = _with_winners(build, decided, unit, number, before, drops)
            passages.append(Passage(decided.step, drops, text))
            if text is None:
                break
            row["text"] = text
        yield passages, row


def _applied(build: FinishedBuild, decided: Decided, unit: int) -> Apply:
    if decided.step in VERDICTS:
        return read_verdicts(build.directory, decided.step, decided.files[unit]).without
    step = step_of(decided.step, build.config.dedup)
    return partial(_without, step, _losers(build, decided, unit))


def _losers(build: FinishedBuild, decided: Decided, unit: int) -> dict[int, list[int]]:
    own = None if decided.step == "minhash" else decided.files[unit]
    return read_losers(build.directory, own, decided.losers, unit)


def _without(
    step: Step, losers: dict[int, list[int]], number: int, row: Row, tally: Tally, sentences: int
) -> str | None:
    return step.without(row, losers.get(number, []), tally, sentences)


def _with_winners(
    build: FinishedBuild, decided: Decided, unit: int, number: int, row: Row, drops: list[Drop]
) -> list[Drop]:
    """`drops` with the documents that keep the copies."""
    step = step_of(decided.step, build.config.dedup)
    keys = [(item, words[: step.group]) for item, words in step.keys(row)]
    lost = _losers(build, decided, unit).get(number, [])
    if isinstance(step, EqualSubstrings):  # one drop for each region
        lost = [first for first, _ in step.regions(lost)]
        keys = [(item, words) for item, words in keys if item in lost]
    smallest = smallest_keys(build.directory, decided.files, step.group, {words for _, words in keys})
    if decided.step == "minhash":  # a cluster's documents share bands; the smallest neighbour is one of them
        others = sorted({place for place in smallest.values() if place != (unit, number)})
        return [replace(drop, stays_on=_name(build, others[:1])) for drop in drops]
    groups = dict(keys)
    places = [[smallest[groups[item]]] for item in lost if item in groups]
    return [replace(drop, stays_on=_name(build, place)) for drop, place in zip(drops, places, strict=False)] + drops[
        len(places) :
    ]


def _name(build: FinishedBuild, places: Iterable[tuple[int, int]]) -> str:
    """The id of the first of `places`, or a word for a page that cleaning dropped."""
    for unit, number in places:
        if number == NOBODY:
            return "a page that cleaning drops"
        for count, row in enumerate(read_documents(build.directory, build.in_order[unit].path, ["id"])):
            if count == number:
                return row["id"]
    return ""
