"""The report of a build: what came in, what each rule dropped, and how fast each stage was.

Writes and reads report.json, and makes the lines that commands print.
"""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from data_pipeline.base.errors import FailedError, UserError
from data_pipeline.base.formatting import counted
from data_pipeline.base.open_store import open_store
from data_pipeline.base.store import Store
from data_pipeline.corpus.corpus import refuse_file
from data_pipeline.corpus.tokenizer.config import TokenizerConfig
from data_pipeline.engine.work_units import Finished, Result
from data_pipeline.engine.workers import Timing, timing_file
from data_pipeline.stages import documents, evaluation_sets, shards, table, tokenizer, tokens
from data_pipeline.stages.dedup import LAST, KeysResult, left
from data_pipeline.stages.documents import DocumentsResult, InputResult, InputsRead
from data_pipeline.stages.parts import PartsResult, PartsWritten
from data_pipeline.stages.shards import ShardResult
from data_pipeline.stages.stage import Build
from data_pipeline.stages.tokenizer import Sample
from data_pipeline.stages.tokens import TokensResult
from data_pipeline.text.document import Counts, Tally, most_common

FILE, MARKDOWN = "report.json", "report.md"
_SHOWN = 20  # languages, templates and changed characters, at most
_UNKNOWN = 1e-4  # the share of unknown tokens that a corpus may have without a warning


@dataclass(frozen=True)
class DocumentCounts:
    read: int
    kept: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class LineCounts:
    read: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class SpanCounts:
    dropped: dict[str, int]
    substring_words: int


@dataclass(frozen=True)
class EvaluationSetCounts:
    """`found`: number of items that documents contain; `too_short`: number of items that aren't looked for."""

    bytes: int
    items: int
    too_short: int
    found: int
    share: float
    documents_dropped: int


@dataclass(frozen=True)
class Coverage:
    """Numbers of all tokens, of unknown tokens and of bytes; the most frequent characters without a token, and those
    that the tokenizer's normalization changes."""

    tokens: int
    unknown: int
    bytes: int
    characters: dict[str, int]
    changed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceCounts:
    """`text_read_bytes`: the text before deduplication; `text_bytes`: the text that is kept."""

    inputs: int
    bytes: int
    text_read_bytes: int
    text_bytes: int
    read: int
    kept: int
    dropped: dict[str, int]
    lengths: dict[str, int]
    languages: dict[str, int]


@dataclass(frozen=True, slots=True)
class InputReport:
    path: str
    bytes: int
    documents: int
    status: str
    reason: str
    damage: list[dict[str, str]]


@dataclass(frozen=True)
class SplitCounts:
    rows: int = 0
    tokens: int = 0
    shards: int = 0
    documents: int = 0
    dropped_tokens: int = 0
    cut_inputs: int = 0
    cut_targets: int = 0


@dataclass(frozen=True)
class StageSpeed:
    """The speed of a stage, and the times of its last run that had units to do (`workers.Timing`).

    `keys`: number of keys that the stage has written; None for other stages.
    """

    name: str
    megabytes: float
    core_seconds: float
    megabytes_per_core_second: float | None
    units: int
    written_megabytes: float
    keys: int | None = None
    seconds: float | None = None
    workers: int | None = None
    idle_seconds: float | None = None
    ray_start_seconds: float | None = None
    driver_core_seconds: float | None = None


@dataclass(frozen=True)
class Report:
    """The content of report.json. Counts are by rule, kind or split; `lengths` are by powers of two."""

    name: str
    documents: DocumentCounts
    lines: LineCounts
    spans: SpanCounts
    masked: dict[str, int]
    template_holes: dict[str, int]
    evaluation_sets: dict[str, EvaluationSetCounts]
    undecodable_documents: int
    examples: dict[str, list[str]]
    lengths: dict[str, int]
    token_lengths: dict[str, int]
    coverage: Coverage | None
    languages: dict[str, int]
    with_urls: int
    sources: dict[str, SourceCounts]
    inputs: list[InputReport]
    pieces: int
    splits: dict[str, SplitCounts]
    tokenizer_sample: Sample | None
    stages: list[StageSpeed]
    hidden_inputs: int = 0
    """Number of hidden files and folders of the sources that were left out."""
    files: dict[str, str] = field(default_factory=dict)
    """The sha256 of each page that shows the report."""


def write(store: Store, report: Report, page: str) -> Report:
    """Writes report.md, the `page`, and report.json. Returns the report with the page's checksum."""
    content = page.encode()
    store.write(MARKDOWN, content)
    report = replace(report, files={MARKDOWN: hashlib.sha256(content).hexdigest()})
    store.write_json(FILE, report, sealed=True)
    return report


def read(location: str | Path | Store) -> Report:
    """The content of report.json. Raises UserError if the file is missing, FailedError if it is damaged."""
    store = open_store(location)
    refuse_file(Path(str(store)))
    try:
        return store.read_json(FILE, Report)
    except FileNotFoundError:
        way_out = "write it with data-pipeline build CORPUS.yaml"
        raise UserError(f"{store.at(FILE)}: no such file; {way_out}") from None
    except FailedError as error:
        raise FailedError(f"{error}; rewrite it with data-pipeline build CORPUS.yaml --repair") from None


def summary(report: Report) -> str:
    """A line: how many files and documents were read, how many were kept, and how many each rule dropped."""
    documents = report.documents
    files = sum(source.inputs for source in report.sources.values())
    line = f"documents: {counted(files, 'file')} → {counted(documents.read, 'document')}, {documents.kept:,} kept"
    dropped = sum(documents.dropped.values())
    return line + (f", {dropped:,} dropped: {_rules(documents.dropped)}" if dropped else "")


def coverage(report: Report) -> str:
    """A line: how many tokens are unknown or bytes, and the most frequent characters without a token; "" before the
    tokens stage."""
    if (found := report.coverage) is None:
        return ""
    if not found.unknown + found.bytes:
        return f"tokens: {found.tokens:,}, none of them unknown or a byte of a character without a token"
    shown = ", ".join(f"{visible(character)} {n:,}" for character, n in found.characters.items())
    return (
        f"tokens: {found.tokens:,}, {found.unknown:,} of them unknown ({found.unknown / found.tokens:.3%}) and "
        f"{found.bytes:,} bytes ({found.bytes / found.tokens:.3%}) of characters without a token, most often {shown}"
    )


def unknown_tokens(found: Coverage, config: TokenizerConfig) -> str:
    """A warning if more than 0.01 % of all tokens are unknown; else ""."""
    if found.unknown <= _UNKNOWN * found.tokens:
        return ""
    shown = ", ".join(f"{visible(character)} {n:,}" for character, n in found.characters.items())
    share = f"{found.unknown:,} of {found.tokens:,} tokens ({found.unknown / found.tokens:.2%})"
    return f"warning: {share} are unknown, and their text is lost, most often {shown}; {config.on_unknown}"


def visible(text: str) -> str:
    """A character or a symbol, with its code points if they are invisible: "K", "U+00AD"."""
    shows = text.isprintable() and not text.isspace() and not unicodedata.combining(text[0])
    return text if shows else code_points(text)


def code_points(text: str) -> str:
    """ "K"  ->  "U+004B" """
    return " ".join(f"U+{ord(character):04X}" for character in text)


def cut_pairs(report: Report) -> list[str]:
    """A line for each split with inputs or targets of pairs that are longer than the objective allows."""
    return [
        f"warning: {split}: {counts.cut_inputs:,} inputs and {counts.cut_targets:,} targets of "
        f"{counts.documents:,} pairs are longer than rows.objective allows (inputs_length, targets_length) "
        "and lost their end"
        for split, counts in report.splits.items()
        if counts.cut_inputs or counts.cut_targets
    ]


def why_nothing_is_left(documents: DocumentCounts, lines: LineCounts) -> str:
    """A line: which rules dropped all documents, and which rules dropped lines."""
    if documents.kept:
        held_out = counted(documents.kept, "document")
        return f"no document for training: {held_out} left, all held out (split.validation_fraction)"
    if not documents.read:
        return "no document was read from the sources"
    reason = f"no document is left of {documents.read:,} read; dropped: {_rules(documents.dropped)}"
    return reason + (f"; lines dropped: {_rules(lines.dropped)}" if lines.dropped else "")


def _rules(dropped: dict[str, int]) -> str:
    """Counts by rule, the largest first."""
    return ", ".join(f"{rule} {n:,}" for rule, n in most_common(dropped, len(dropped)).items())


class _Sums:
    """The sums of what units that write parts have counted."""

    def __init__(self, sums: Iterable["_Sums"] = ()):
        self._tally, self.lengths, self.languages = Tally(), Counter[str](), Counter[str]()
        for one in sums:
            self.add(one)

    def add(self, one: "PartsResult | _Sums") -> None:
        self._tally.add(one.counts)
        self.lengths.update(one.lengths)
        self.languages.update(one.languages)

    @property
    def counts(self) -> Counts:
        return self._tally.recorded()


def of(build: Build, hidden: int) -> Report:
    """The report of the stages that have run. `hidden` becomes `Report.hidden_inputs`."""
    read = [unit.result for unit in build.of(documents.STAGE)]
    kept = [unit.result for unit in left(build)]
    cleaning, deduplication, holes = defaultdict[str, _Sums](_Sums), defaultdict[str, _Sums](_Sums), Counter[str]()
    for result in build.recorded(documents.STAGE, DocumentsResult):
        cleaning[result.source].add(result)
        holes.update(result.template_holes)
    for deduplicated in build.recorded(LAST, PartsResult):
        deduplication[deduplicated.parts[0].source].add(deduplicated)
    of_kept = deduplication or cleaning
    searched = _Sums(deduplication.values()).counts
    counts, all_kept = _Sums([*cleaning.values(), *deduplication.values()]).counts, _Sums(of_kept.values())
    sets = _evaluation_sets(build, searched)
    sizes = {
        "inputs": sum(result.bytes for result in read),
        "sets": sum(one.bytes for one in sets.values()),
        "read": sum(result.text_bytes for result in read),
        "kept": sum(result.text_bytes for result in kept),
    }
    samples = [unit.result.sample for unit in build.of(tokenizer.STAGE) if unit.result.sample.documents]
    coverage, token_lengths = coverage_of(build.recorded(tokens.STAGE, TokensResult))
    return Report(
        name=build.config.name,
        documents=DocumentCounts(
            read=counts.read,
            kept=sum(sum(result.documents.values()) for result in kept),
            dropped=_sorted(counts.dropped_documents),
        ),
        lines=LineCounts(
            sum(_lines_read(cleaning[source].counts, deduplication[source].counts) for source in cleaning),
            _sorted(counts.dropped_lines),
        ),
        spans=SpanCounts(_sorted(counts.dropped_spans), counts.substring_words),
        masked=_sorted(counts.masked_data),
        template_holes=most_common(holes, _SHOWN),
        evaluation_sets=sets,
        undecodable_documents=counts.undecodable,
        examples={rule: [" ".join(text.split()) for text in texts] for rule, texts in sorted(counts.examples.items())},
        lengths=_by_power(all_kept.lengths),
        token_lengths=_by_power(token_lengths),
        coverage=coverage if build.of(tokens.STAGE) else None,
        languages=most_common(all_kept.languages, _SHOWN),
        with_urls=sum(result.with_urls for result in kept),
        sources={
            source: _source(
                [result for result in read if result.source == source],
                [result for result in kept if result.parts[0].source == source],
                _Sums([cleaning[source], deduplication[source]]).counts,
                of_kept[source],
            )
            for source in dict.fromkeys(result.source for result in read)
        },
        inputs=[_input(result.source, one) for result in read for one in result.inputs],
        pieces=sum(unit.result.pieces for unit in build.of(tokenizer.STAGE)),
        splits=_splits([unit.result for unit in build.of(shards.STAGE)]),
        tokenizer_sample=samples[0] if samples else None,
        stages=[
            _speed(build.store, stage.name, units, sizes[stage.reads[0].of])
            for stage in table.stages_of(build.config)
            if (units := build.of(stage))
        ],
        hidden_inputs=hidden,
    )


def coverage_of(results: Iterable[TokensResult]) -> tuple[Coverage, Counter[str]]:
    """(the sum of the counts of units, numbers of documents by the power of two of their tokens)."""
    tokens, uncovered, characters, changed, lengths = (Counter[str]() for _ in range(5))
    for one in results:
        tokens.update(one.tokens)
        uncovered.update(one.uncovered)
        characters.update(one.characters)
        changed.update(one.changed)
        lengths.update(one.lengths)
    shown = most_common(characters, 10), most_common(changed, _SHOWN)
    return Coverage(tokens.total(), uncovered["unknown"], uncovered["bytes"], *shown), lengths


def _lines_read(cleaned: Counts, searched: Counts) -> int:
    """The number of lines of a source before a step dropped any: the most that the rules or deduplication have checked.

    `cleaned`: the counts of rules that were applied while the source was read; `searched`: of all later steps.
    """
    by_later_rules = searched.lines_passed + searched.dropped_lines.total() - searched.dropped_lines["duplicate_line"]
    dropped = cleaned.dropped_lines.total() + searched.dropped_lines.total()
    return max(cleaned.lines_passed + cleaned.dropped_lines.total(), searched.lines_seen, by_later_rules, dropped)


def _source(read: Sequence[InputsRead], kept: Sequence[PartsWritten], counts: Counts, of_kept: _Sums) -> SourceCounts:
    return SourceCounts(
        inputs=sum(one.range.start == 0 for result in read for one in result.inputs),
        bytes=sum(result.bytes for result in read),
        text_read_bytes=sum(result.text_bytes for result in read),
        text_bytes=sum(result.text_bytes for result in kept),
        read=counts.read,
        kept=sum(sum(result.documents.values()) for result in kept),
        dropped=_sorted(counts.dropped_documents),
        lengths=_by_power(of_kept.lengths),
        languages=most_common(of_kept.languages, _SHOWN),
    )


def _evaluation_sets(build: Build, counts: Counts) -> dict[str, EvaluationSetCounts]:
    """`counts`: of the stage that searches for the sets."""
    sets = {}
    for one in (one for unit in build.of(evaluation_sets.STAGE) for one in unit.result.sets):
        found, dropped = len(counts.items.get(one.name, [])), counts.contaminated[one.name]
        share = round(found / one.items, 6)
        sets[one.name] = EvaluationSetCounts(one.bytes, one.items, one.too_short, found, share, dropped)
    return sets


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def _by_power(counts: Counter[str]) -> dict[str, int]:
    """A histogram by powers of two, in their order."""
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))


def _input(source: str, read: InputResult) -> InputReport:
    start, stop, _ = read.range
    part = f" from byte {start}" if start or stop else ""
    reason = ": ".join(read.damage[0]) if read.damage else ""
    damage = [damage._asdict() for damage in read.damage]
    return InputReport(f"{source}/{read.file}{part}", read.bytes, read.documents, read.status, reason, damage)


def _splits(shards: list[ShardResult]) -> dict[str, SplitCounts]:
    summed = [one.name for one in fields(SplitCounts) if one.name != "shards"]
    splits: dict[str, list[ShardResult]] = {}
    for shard in shards:
        splits.setdefault(shard.split, []).append(shard)
    return {
        split: SplitCounts(shards=len(own), **{name: sum(getattr(one, name) for one in own) for name in summed})
        for split, own in splits.items()
    }


def _speed(store: Store, stage: str, units: Sequence[Finished[Result]], size: int) -> StageSpeed:
    """The speed of a stage that worked on `size` bytes."""
    megabytes, seconds = size / 1e6, sum(unit.seconds for unit in units)
    written = sum(output.bytes for unit in units for output in unit.outputs.values())
    keys = [unit.result.keys for unit in units if isinstance(unit.result, KeysResult)]
    speed = StageSpeed(
        name=stage,
        megabytes=round(megabytes, 3),
        core_seconds=round(seconds, 1),
        megabytes_per_core_second=round(megabytes / seconds, 3) if seconds else None,
        units=len(units),
        written_megabytes=round(written / 1e6, 3),
        keys=sum(keys) if keys else None,
    )
    run = store.read_valid_json(timing_file(stage), Timing)
    return replace(speed, **vars(run)) if run else speed
