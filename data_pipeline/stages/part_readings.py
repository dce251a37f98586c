"""The units of deduplication that read parts as the earlier steps left them: for keys, and for the corpus.

What a step decides by comparing documents is applied in the reading after it. The checks of single documents, "filters"
and "decontamination", are made in the same reading.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.page import PageFilters
from data_pipeline.dedup.config import STEPS, DedupConfig, step_of
from data_pipeline.dedup.keys import NO_DOCUMENT, Keys, read_duplicates, read_repeated
from data_pipeline.dedup.step import Step
from data_pipeline.execution.merging import read_names
from data_pipeline.execution.work_units import Result
from data_pipeline.foundation.json_file import parse_json
from data_pipeline.foundation.store import Store
from data_pipeline.stages import evaluation_sets
from data_pipeline.stages.duplicates import buckets_for, merge_keys, merge_signatures
from data_pipeline.stages.parts import (
    SCHEMA,
    Histograms,
    Part,
    PartsResult,
    part_file,
    read_documents,
    rows_file,
)
from data_pipeline.stages.stage import DOCUMENTS, DUPLICATES, KEYS, NGRAMS, PARTS, Stage, largest
from data_pipeline.text.document import Counts, Document, Tally

Row = tuple[int, Document, Document | None]
"""(number, document of a unit, what is left of it)"""

_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("dropped", pa.bool_()),
        ("text", pa.large_string()),  # null: as in the part
        ("language", pa.string()),  # "": as in the part
    ]
)
_CHARACTERS_OF_A_ROW = 100
_CHANGES_VERSION = 1  # of the table of changes; grows when its bytes change, as does the version of a step's keys


def with_changes_noted(corpus: Store, name: str, rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
    """The same `rows`; writes a table of what the steps so far have changed of a part, and of what they have counted,
    so that no step applies all earlier decisions.

    A row of the table is a document that was dropped, or one that has another text or language than in the part. They
    are in the order of the documents, and are read and written beside them, so that memory doesn't grow with the part.
    """
    with rows_file(corpus, name, _SCHEMA) as table:
        for number, document, left in rows:
            text = None if left is None or left.text == document.text else left.text
            language = "" if left is None or left.language == document.language else left.language
            if left is None or text is not None or language:
                table.add((number, left is None, text, language), _CHARACTERS_OF_A_ROW + len(text or ""))
            yield number, document, left
        table.writer.add_key_value_metadata({"counts": to_json(tally.recorded())})


def changed(corpus: Store, name: str, rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
    """`rows` of unchanged documents, in order, with what the table leaves of each.

    Adds what earlier steps have counted to `tally`.
    """
    with pq.ParquetFile(corpus.readable(name)) as file:
        tally.add(parse_json(file.metadata.metadata[b"counts"], Counts, corpus.at(name)))
        changes = (row for group in range(file.num_row_groups) for row in file.read_row_group(group).to_pylist())
        change = next(changes, None)
        for number, document, left in rows:
            if change and change["document"] == number:
                text, language = change["text"], change["language"] or document.language
                left = None if change["dropped"] else replace(document, text=text or document.text, language=language)
                change = next(changes, None)
            yield number, document, left


Apply = Callable[[Iterable[Row], Tally], Iterator[Row]]
"""What a step leaves of documents, in order; counts what it drops."""

CHECKS = {"filters": 4, "decontamination": 4}
"""The version of each check of single documents, which grows when what it drops changes."""

_NEEDED = ("id", "text", "url", "target", "language")  # by the decisions of a step and by checks
_DOCUMENTS_AT_ONCE = 100  # in which items of evaluation sets are looked for


@dataclass(frozen=True)
class Applied:
    """What the last step decided about some parts: `file` has their own keys, and `duplicates` is the list of the files
    with the duplicates (`write_names`)."""

    step: str
    file: str
    duplicates: str


@dataclass(frozen=True)
class PartSpec:
    """A group of neighbouring parts as the earlier steps left them; `unit` is its number in the order of ids.

    `changes` is the table of what the steps before the `last` one changed ("": nothing); `checks` follow that one.
    `new_changes` will be the table of what all of them did; "" if it isn't needed. `step` is the one whose keys are
    gathered, in a file of `slots`, or "" for the documents that are left.
    """

    parts: list[Part]
    unit: int
    cleaning: CleaningConfig
    dedup: DedupConfig
    changes: str
    last: Applied | None
    checks: list[str]
    step: str
    output: str
    new_changes: str
    slots: int


@dataclass(frozen=True)
class KeysResult(Result):
    keys: int


@dataclass(frozen=True, kw_only=True)
class LeftResult(PartsResult):
    """For each evaluation set, the documents that contain any of its items (`contaminated`), and which items were
    found, by their numbers in the set."""

    contaminated: dict[str, int]
    items: dict[str, list[int]]


def gather_keys(corpus: Store, spec: PartSpec) -> KeysResult:
    """Writes one step's keys for one unit's documents."""
    step = step_of(spec.step, spec.dedup)
    keys = Keys(step.group, step.order)
    documents = _left(corpus, spec, step.columns, Tally(), _checks(corpus, spec))
    if step.compares_dropped_pages:
        pages = read_documents(corpus, (part.urls for part in spec.parts), ["url", "timestamp"])
        documents = chain(documents, ((NO_DOCUMENT, page) for page in pages))
    repeated = None
    if spec.last and not STEPS[spec.last.step].drops:
        repeated = read_repeated(corpus, spec.last.file, read_names(corpus, spec.last.duplicates), spec.unit)
    step.gather(documents, keys, repeated)
    with corpus.put(spec.output) as path:
        return KeysResult(keys.write(path, spec.slots))


def write_left(corpus: Store, spec: PartSpec) -> LeftResult:
    """Writes one unit's documents that are left after all steps; returns counts of what was dropped."""
    tally, histograms, checks = Tally(), Histograms(), _checks(corpus, spec)
    with part_file(corpus, spec.output) as file:
        for _, document in _left(corpus, spec, SCHEMA.names, tally, checks):
            file.add(document)
            histograms.add(document)
    parts = [file.describe(spec.output, spec.parts[0].source, spec.parts[0].first_id)]
    searched = [check for check in checks if isinstance(check, Decontamination)]
    return LeftResult(
        **vars(PartsResult.of(tally, parts, histograms)),
        contaminated={name: count for check in searched for name, count in sorted(check.contaminated.items())},
        items={name: sorted(items) for check in searched for name, items in sorted(check.items.items())},
    )


def keys_stage(step: str) -> Stage[PartSpec, KeysResult]:
    clusters = STEPS[step].clusters
    return Stage(
        f"{step}-keys",
        STEPS[step].version + _CHANGES_VERSION,
        gather_keys,
        "lower characters_per_part",
        memory=2.5,  # the key of a line, which counts as 40 characters, has 24 bytes and is held four times
        unit="a part, or a group of small ones",
        reads=(PARTS, DUPLICATES),
        writes=KEYS,
        units=lambda amounts: len(amounts.groups),
        most=lambda amounts: largest(amounts.groups),
        applies=lambda config: step in config.steps,
        step=step,
        of_urls=STEPS[step].compares_dropped_pages,
        merge=merge_signatures if clusters else merge_keys,
        readers=lambda amounts: buckets_for(amounts, step),
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


def _left(
    corpus: Store, spec: PartSpec, columns: Sequence[str], tally: Tally, checks: list[Apply]
) -> Iterator[tuple[int, Document]]:
    """(number, document) of each document of a unit that the earlier steps left. Writes the table of their changes."""
    decided = STEPS[spec.last.step] if spec.last and STEPS[spec.last.step].drops else None
    needed = dict.fromkeys([*columns, *(decided.columns if decided else ()), *(_NEEDED if decided or checks else ())])
    documents = enumerate(read_documents(corpus, (part.path for part in spec.parts), [*needed]))
    rows: Iterator[Row] = ((number, document, document) for number, document in documents)
    if spec.changes:
        rows = changed(corpus, spec.changes, rows, tally)
    if (last := spec.last) and decided:
        duplicates = read_names(corpus, last.duplicates)
        least = spec.cleaning.min_sentences_per_page
        rows = application(corpus, step_of(last.step, spec.dedup), last.file, duplicates, spec.unit, least)(rows, tally)
    for check in checks:
        rows = check(rows, tally)
    if spec.new_changes:
        rows = with_changes_noted(corpus, spec.new_changes, rows, tally)
    for number, _, left in rows:
        if left is not None:
            yield number, left


def application(corpus: Store, step: Step, file: str, duplicates: list[str], unit: int, min_sentences: int) -> Apply:
    """What `step` does to the documents of a part, whose keys are in `file`."""
    own = None if step.clusters else file  # clusters have a part's own pairs
    items = read_duplicates(corpus, own, duplicates, unit)

    def apply(number: int, document: Document, tally: Tally) -> Document | None:
        text = step.without(document, items.get(number, []), tally, min_sentences)
        if text is None or text is document.text:
            return None if text is None else document
        if text.strip():
            return replace(document, text=text)
        tally.document("empty_after_dedup", document.url or document.id)
        return None

    return _each(apply)


def _checks(corpus: Store, spec: PartSpec) -> list[Apply]:
    return [check_of(corpus, name, spec.cleaning) for name in spec.checks]


def check_of(corpus: Store, name: str, cleaning: CleaningConfig) -> Apply:
    """What the check `name`, "filters" or "decontamination", does to documents that are cleaned by `cleaning`."""
    if name == "decontamination":
        return Decontamination(evaluation_sets.Index.read(corpus))
    filters = PageFilters(cleaning)

    def apply(_: int, document: Document, tally: Tally) -> Document | None:
        language = filters(document.text, document.url, document.language, tally)
        if language is None or language == document.language:
            return None if language is None else document
        return replace(document, language=language)

    return _each(apply)


class Decontamination:
    """Drops documents with items of evaluation sets, and notes how many `contaminated` documents and which `items` were
    found, by set."""

    def __init__(self, index: evaluation_sets.Index):
        self._index = index
        self.contaminated: Counter[str] = Counter()
        self.items: dict[str, set[int]] = {}

    def __call__(self, rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
        remaining = iter(rows)
        while batch := list(islice(remaining, _DOCUMENTS_AT_ONCE)):
            evidence = self._evidence((number, left) for number, _, left in batch if left is not None)
            for number, document, left in batch:
                if number in evidence:
                    tally.document("contaminated", evidence[number])
                yield number, document, None if number in evidence else left

    def _evidence(self, documents: Iterable[tuple[int, Document]]) -> dict[int, str]:
        """For each document with items, by number: the name of the first one and the words."""
        first: dict[int, tuple[int, str]] = {}
        hit: set[tuple[str, int]] = set()
        for match in self._index.ngrams.matches((number, f"{one.text}\n{one.target}") for number, one in documents):
            for item in match.items:
                name = self._index.set_of(item)
                self.items.setdefault(name, set()).add(self._index.number_of(item))
                hit.add((name, match.number))
            found = match.word, f"{self._index.name_of(match.items[0])}: {match.words}"
            first[match.number] = min(found, first.get(match.number, found))
        self.contaminated.update(name for name, _ in hit)
        return {number: text for number, (_, text) in first.items()}


def _each(step: Callable[[int, Document, Tally], Document | None]) -> Apply:
    def apply(rows: Iterable[Row], tally: Tally) -> Iterator[Row]:
        for number, document, left in rows:
            yield number, document, None if left is None else step(number, left, tally)

    return apply
