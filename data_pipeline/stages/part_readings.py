"""The units of deduplication that read a part as the earlier steps left it: for keys, for verdicts, for the corpus."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.page import PageFilters
from data_pipeline.dedup.changes import changed, changes_file
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.dedup.keys import NO_DOCUMENT, Keys, read_duplicates, read_repeated
from data_pipeline.dedup.step import Step
from data_pipeline.dedup.steps import STEPS, step_of
from data_pipeline.dedup.verdicts import Verdict, Verdicts
from data_pipeline.execution.name_lists import read_names
from data_pipeline.execution.parts import SCHEMA, Histograms, Part, PartsResult, part_file, read_documents
from data_pipeline.execution.work_units import Result, Stage
from data_pipeline.stages import evaluation_sets
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

_COLUMNS = ["id", "text", "url", "target"]

Apply = Callable[[int, Document, Tally, int], Document | None]
"""(number, document, tally, least number of sentences) -> the document that a step leaves, if any."""


@dataclass(frozen=True)
class Applied:
    """What the step before decided about one part.

    `file` has the part's own keys or, after the steps "filters" and "decontamination", its verdicts. `duplicates` is
    the list of the files with the duplicates (`name_lists`).
    """

    step: str
    file: str
    duplicates: str


@dataclass(frozen=True)
class PartSpec:
    """A part as the earlier steps left it; `unit` is its number in the order of ids.

    `changes` is the table of what all but the `last` of them changed ("": nothing). `new_changes` will be the one of
    what all of them did; "" if it isn't needed. `step` is the one whose keys are gathered, "filters",
    "decontamination", or "" for the documents that are left.
    """

    part: Part
    unit: int
    cleaning: CleaningConfig
    dedup: DedupConfig
    changes: str
    last: Applied | None
    step: str
    output: str
    new_changes: str


@dataclass(frozen=True)
class KeysResult(Result):
    keys: int


@dataclass(frozen=True)
class DecontaminationResult(Result):
    """For each evaluation set, the `documents` that contain any of its items, and which items were `found`, by their
    numbers in the set."""

    documents: dict[str, int]
    found: dict[str, list[int]]


def gather_keys(corpus: Path, spec: PartSpec) -> KeysResult:
    """Writes one step's keys for one unit's documents."""
    step = step_of(spec.step, spec.dedup)
    keys = Keys(step.group, step.order)
    documents = _left(corpus, spec, list(step.columns))
    if step.compares_dropped_pages:
        pages = read_documents(corpus, spec.part.urls, ["url", "timestamp"])
        documents = chain(documents, ((NO_DOCUMENT, page) for page in pages))
    repeated = None
    if spec.last and not drops(spec.last.step):
        repeated = read_repeated(corpus, spec.last.file, read_names(corpus, spec.last.duplicates), spec.unit)
    step.gather(documents, keys, repeated)
    return KeysResult(keys.write(corpus / spec.output))


def filter_pages(corpus: Path, spec: PartSpec) -> Result:
    """Checks language and bad words in one unit's documents."""
    filters = PageFilters(spec.cleaning)
    verdicts: dict[int, Verdict] = {}
    for number, document in _left(corpus, spec, [*_COLUMNS, "language"]):
        rules = Tally()
        language = filters(document.text, document.url, document.language, rules)
        rule = next(iter(rules), "")
        example = next(iter(rules.examples.get(rule, [])), "")
        verdicts[number] = Verdict(rule, example, language or "")
    Verdicts(verdicts).write(corpus / spec.output)
    return Result()


def find_contaminated(corpus: Path, spec: PartSpec) -> DecontaminationResult:
    """Looks for items of evaluation sets in one unit's documents."""
    index = evaluation_sets.Index.read(corpus / evaluation_sets.INDEX)
    evidence: dict[int, tuple[int, str]] = {}  # the first in each document
    hit: set[tuple[str, int]] = set()
    found: dict[str, set[int]] = {}
    texts = ((number, f"{one.text}\n{one.target}") for number, one in _left(corpus, spec, _COLUMNS))
    for match in index.ngrams.matches(texts):
        for item in match.items:
            found.setdefault(index.set_of(item), set()).add(index.number_of(item))
            hit.add((index.set_of(item), match.number))
        found_here = match.word, f"{index.name_of(match.items[0])}: {match.words}"
        evidence[match.number] = min(found_here, evidence.get(match.number, found_here))
    verdicts = {number: Verdict(rule="contaminated", example=text) for number, (_, text) in evidence.items()}
    Verdicts(verdicts).write(corpus / spec.output)
    documents = Counter(name for name, _ in sorted(hit))
    return DecontaminationResult(dict(documents), {name: sorted(items) for name, items in sorted(found.items())})


def write_left(corpus: Path, spec: PartSpec) -> PartsResult:
    """Writes one unit's documents that are left after all steps; returns counts of what was dropped."""
    tally, histograms = Tally(), Histograms()
    with part_file(corpus / spec.output) as file:
        for _, document in _left(corpus, spec, SCHEMA.names, tally):
            file.add(document)
            histograms.add(document)
    return PartsResult.of(tally, [file.describe(spec.output, spec.part.source, spec.part.first_id)], histograms)


def keys_stage(step: str) -> Stage[PartSpec, KeysResult]:
    return Stage(f"{step}-keys", STEPS[step].version, gather_keys, "lower characters_per_part")


CHECKS: dict[str, Stage] = {
    "filters": Stage("page-filters", 3, filter_pages, "lower characters_per_part"),
    "decontamination": Stage("decontamination", 4, find_contaminated, "look for fewer evaluation sets"),
}
LAST = Stage("deduplicated", 3, write_left, "lower characters_per_part")


def drops(step: str) -> bool:
    """Whether a step, or a check between two of them, drops anything."""
    return step in CHECKS or STEPS[step].drops


def _left(
    corpus: Path, spec: PartSpec, columns: list[str], tally: Tally | None = None
) -> Iterator[tuple[int, Document]]:
    """(number, document) of each document of a part that the earlier steps left. Writes the table of their changes."""
    tally = Tally() if tally is None else tally
    documents = enumerate(read_documents(corpus, spec.part.path, columns))
    rows = ((number, document, document) for number, document in documents)
    before = changed(corpus / spec.changes, documents, tally) if spec.changes else rows
    apply = _apply(corpus, spec)
    with changes_file(corpus / spec.new_changes, tally) if spec.new_changes else contextlib.nullcontext() as changes:
        for number, document, left in before:
            if left is not None and apply:
                left = apply(number, left, tally, spec.cleaning.min_sentences_per_page)
            if changes:
                changes.add(number, document, left)
            if left is not None:
                yield number, left


def _apply(corpus: Path, spec: PartSpec) -> Apply | None:
    """What the last step does to the documents of the part."""
    last = spec.last
    if last is None or not drops(last.step):
        return None
    return application(corpus, last.step, spec.dedup, last.file, read_names(corpus, last.duplicates), spec.unit)


def application(corpus: Path, name: str, config: DedupConfig, file: str, duplicates: list[str], unit: int) -> Apply:
    """What the step `name` does to the documents of a part, whose keys or verdicts are in `file`."""
    if name in CHECKS:
        return Verdicts.read(corpus / file).without
    step = step_of(name, config)
    return without_duplicates(step, duplicates_of(corpus, step, file, duplicates, unit))


def duplicates_of(corpus: Path, step: Step, file: str, duplicates: list[str], unit: int) -> dict[int, list[int]]:
    """The items of each document of a part that `step` drops, by number."""
    return read_duplicates(
        corpus, None if step.clusters else file, duplicates, unit
    )  # clusters have a part's own pairs


def without_duplicates(step: Step, duplicates: dict[int, list[int]]) -> Apply:
    """Removes the items `duplicates` of each document, by its number."""

    def apply(number: int, document: Document, tally: Tally, min_sentences: int) -> Document | None:
        text = step.without(document, duplicates.get(number, []), tally, min_sentences)
        if text is None or text is document.text:
            return document if text is not None else None
        return replace(document, text=text)

    return apply
