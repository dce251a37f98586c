"""The stages of deduplication: keys are gathered and decided step by step, and text is written once, at the end.

Each step gathers the keys of every unit's text as the earlier steps left it. That text is recomputed from their
decisions; no intermediate text is written. Then each bucket of hashes decides which duplicates are dropped, and the
last stage writes the remaining documents. For near-duplicates the buckets find pairs, and one more unit clusters them.

Language and bad words are checked between two steps, by each unit for its own documents: like C4, they are checked on
what is left of a page after duplicate lines are removed. Items of evaluation sets are looked for after all other steps,
in what will be the corpus.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.page import PageFilters
from data_pipeline.config import CorpusConfig
from data_pipeline.decontamination.contaminated import Contaminated
from data_pipeline.dedup.clusters import Clusters
from data_pipeline.dedup.config import DedupConfig, setting_of
from data_pipeline.dedup.documents import EqualDocuments
from data_pipeline.dedup.keys import (
    KeyBucket,
    Keys,
    decide,
    merge_losers,
    pairs_within,
    read_gone,
    read_losers,
    read_repeated,
    write_losers,
)
from data_pipeline.dedup.lines import EqualLines
from data_pipeline.dedup.minhash import NearDuplicates
from data_pipeline.dedup.spans import EqualSpans
from data_pipeline.dedup.step import Row, Step
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings
from data_pipeline.dedup.urls import NewestUrl
from data_pipeline.dedup.verdicts import Verdicts
from data_pipeline.execution.merging import MergeSpec, Merging, merge
from data_pipeline.execution.name_lists import read_names, write_names
from data_pipeline.execution.parts import Histograms, Part, PartsResult, part_file, read_documents
from data_pipeline.execution.work_units import Finished, Result, Stage, Unit, outputs_of, read_finished, run
from data_pipeline.foundation.atomic import atomic_path, fingerprint
from data_pipeline.foundation.safetensors_file import os_errors
from data_pipeline.stages import evaluation_sets
from data_pipeline.text.document import Document
from data_pipeline.text.tally import Tally

_COLUMNS = ["id", "text", "url", "target"]


@dataclass(frozen=True)
class Applied:
    """What an earlier step decided about one part.

    `file` has the part's own keys or, after the steps "filters" and "decontamination", its verdicts. `losers` lists the
    files of the losers (`name_lists`).
    """

    step: str
    file: str
    losers: str = ""


@dataclass(frozen=True)
class PartSpec:
    """A part as the steps in `applied` left it; `unit` is its number in the order of ids.

    `step` is the one whose keys are gathered, "filters", "decontamination", or "" for the documents that are left.
    """

    part: Part
    unit: int
    cleaning: CleaningConfig
    dedup: DedupConfig
    applied: list[Applied]
    step: str
    output: str


@dataclass(frozen=True)
class KeysResult(Result):
    keys: int


@dataclass(frozen=True)
class DecontaminationResult(Result):
    """For each evaluation set, the `documents` that contain any of its items, and which items were `found`, by their
    numbers in the set."""

    documents: dict[str, int]
    found: dict[str, list[int]]


@dataclass(frozen=True)
class BucketSpec:
    """A bucket of all keys of a step. `files` lists the files of keys of all `units` (`name_lists`), merged or not."""

    files: str
    units: int
    bucket: KeyBucket
    step: str
    dedup: DedupConfig
    output: str


@dataclass(frozen=True)
class ClustersSpec:
    """`files` lists the files of keys of all `units` (`name_lists`); `pairs` are the files of the buckets."""

    files: str
    units: int
    pairs: list[str]
    output: str


def deduplicate(
    config: CorpusConfig, corpus: Path, parts: list[Part]
) -> tuple[dict[str, Sequence[Finished[Result]]], list[Finished[PartsResult]]]:
    """Runs the stages that `config.dedup` asks for. Returns the units of all but the last by stage, and of the last."""
    finished: dict[str, Sequence[Finished[Result]]] = {}
    in_order = sorted(parts, key=lambda part: part.first_id)
    number = {part.name: position for position, part in enumerate(in_order)}
    cleaning = {source.name: config.cleaning_of(source) for source in config.sources}
    applied: list[tuple[str, list[str], str]] = []  # each earlier step, its files by part, and the list of its losers
    depends = ""  # fingerprint of all that the earlier steps depend on

    def per_part(of: list[Part], step: str, output: str) -> list[Unit[PartSpec]]:
        units = []
        for part in of:
            name, place, rules = output.format(part.name), number[part.name], cleaning[part.source]
            earlier = [Applied(done, own[place], losers) for done, own, losers in applied]
            checked = {"language", "bad_words", "bad_words_fraction", "classifier"} if step == "filters" else set()
            settings = rules.model_dump(include={"min_sentences_per_page", *checked})
            content = rules.identity if step == "filters" else []
            inputs = fingerprint([part.checksums, place, settings, depends, *content])
            spec = PartSpec(part, place, rules, config.dedup, earlier, step, name)
            units.append(Unit(part.name, spec, inputs, (name,) if step else (), part.text_bytes))
        return units

    for step in config.steps:
        depends = fingerprint([depends, step, config.dedup.model_dump(include={setting_of(step)})])
        if step == "filters":
            units = per_part(in_order, step, f".stages/{FILTERS.name}/{{}}.parquet")
            finished[FILTERS.name] = filtered = run(FILTERS, units, corpus, config.ray)
            applied.append((step, [name for unit in filtered for name in unit.outputs], ""))
            depends = fingerprint([depends, [unit.checksums for unit in filtered]])
            continue
        if step == "decontamination":
            indexed = run(evaluation_sets.STAGE, evaluation_sets.plan(config.decontamination), corpus, config.ray)
            depends = fingerprint([depends, [unit.checksums for unit in indexed]])
            units = per_part(in_order, step, f".stages/{DECONTAMINATION.name}/{{}}.parquet")
            searched = run(DECONTAMINATION, units, corpus, config.ray)
            finished |= {evaluation_sets.STAGE.name: indexed, DECONTAMINATION.name: searched}
            applied.append((step, [name for unit in searched for name in unit.outputs], ""))
            depends = fingerprint([depends, [unit.checksums for unit in searched]])
            continue
        if step == "urls":  # noted while reading
            files = {part.urls: part.checksums[-1] for part in in_order}
            count = sum(part.url_keys for part in in_order)
            depends = fingerprint([depends, [part.checksums for part in in_order]])
        else:
            stage = f"{step}-keys"
            units = per_part(in_order, step, f".stages/{stage}/{{}}.safetensors")
            gathered = run(KEYS[step], units, corpus, config.ray)
            finished[stage] = gathered
            files = outputs_of(gathered)
            count = sum(unit.result.keys for unit in gathered)
            depends = fingerprint([depends, [unit.checksums for unit in gathered]])
        stage = f"{step}-losers"
        bucket_units = []
        buckets = KeyBucket.enough(count, config.dedup.keys_per_bucket)
        to_read, merged = merge(MERGE_KEYS[step], files, buckets, corpus, config.ray)
        finished |= merged
        listed = write_names(corpus, to_read)
        for bucket in range(buckets):
            name = f".stages/{stage}/{bucket:04d}-of-{buckets:04d}.safetensors"
            spec = BucketSpec(listed, len(parts), KeyBucket(bucket, buckets), step, config.dedup, name)
            bucket_units.append(Unit(Path(name).stem, spec, fingerprint([depends, bucket, buckets]), (name,)))
        finished[stage] = decided = run(LOSERS[step], bucket_units, corpus, config.ray)
        if step == "minhash":
            losers = list(outputs_of(decided))
            name = ".stages/minhash-clusters/clusters.safetensors"
            depends = fingerprint([depends, [unit.checksums for unit in decided]])
            clusters = Unit("clusters", ClustersSpec(listed, len(parts), losers, name), depends, (name,))
            finished[CLUSTERS.name] = decided = run(CLUSTERS, [clusters], corpus, config.ray)
            losers = [name]
        else:
            losers, merged = merge(MERGE_LOSERS[step], outputs_of(decided), len(parts), corpus, config.ray)
            finished |= merged
        if step == "substrings":
            applied.pop()  # anchors have nothing more to tell
        applied.append((step, list(files), write_names(corpus, losers)))
        depends = fingerprint([depends, [unit.checksums for unit in decided]])
    return finished, run(LAST, per_part(parts, "", "documents/{}.parquet"), corpus, config.ray)


@dataclass(frozen=True)
class Decided:
    """A finished step: its files by part, in the order of ids (keys, or verdicts where there are no losers), and of its
    losers."""

    step: str
    files: list[str]
    losers: list[str]


def decided(corpus: Path, config: CorpusConfig, in_order: list[Part]) -> list[Decided]:
    """The finished steps of a corpus, whose parts are `in_order` of their ids."""
    steps = []
    for step in config.steps:
        if step == "anchors":  # they drop nothing
            continue
        if stage := VERDICTS.get(step):
            steps.append(Decided(step, [f".stages/{stage.name}/{part.name}.parquet" for part in in_order], []))
            continue
        own = [f".stages/{step}-keys/{part.name}.safetensors" for part in in_order]
        clustered = read_finished(CLUSTERS, corpus) if step == "minhash" else read_finished(LOSERS[step], corpus)
        losers = [name for unit in clustered for name in unit.outputs]
        steps.append(Decided(step, [part.urls for part in in_order] if step == "urls" else own, losers))
    return steps


def forget(corpus: Path, config: CorpusConfig) -> None:
    """Removes the results of steps that the config no longer asks for."""
    steps = config.steps
    stages = corpus / ".stages"
    unasked = [folder for step in _STEPS if step not in steps for folder in stages.glob(f"{step}-*")]
    unasked += [stages / stage.name for step, stage in VERDICTS.items() if step not in steps]
    unasked += [stages / evaluation_sets.STAGE.name] if "decontamination" not in steps else []
    for folder in unasked if steps else [*unasked, stages / LAST.name]:
        shutil.rmtree(folder, ignore_errors=True)
    for pattern in ([] if "urls" in steps else ["*.urls.safetensors"]) + ([] if steps else ["*.parquet"]):
        for file in (stages / "documents").glob(pattern):
            file.unlink()


def gather_keys(corpus: Path, spec: PartSpec) -> KeysResult:
    """Writes one step's keys for one unit's documents, as the earlier steps left them."""
    gone: list[int] = []
    rows = _left(corpus, spec, gone)
    if spec.step in ("anchors", "substrings"):  # these take many documents at a time
        finder = _substrings(corpus, spec)
        keys = Keys(finder.group, finder.order)
        for table in finder.tables(rows):
            keys.extend(table)
    else:
        step = step_of(spec.step, spec.dedup)
        keys = Keys(step.group, step.order)
        for number, row in rows:
            for item, words in step.keys(row):
                keys.add(number, item, words)
    return KeysResult(keys.write(corpus / spec.output, gone))


def filter_pages(corpus: Path, spec: PartSpec) -> Result:
    """Checks language and bad words in one unit's documents, as the earlier steps left them."""
    filters = PageFilters(spec.cleaning)
    verdicts = Verdicts()
    for _, row in _documents(corpus, spec, [*_COLUMNS, "language"], Tally()):
        rules = Tally()
        language = None if row is None else filters(row["text"], row["url"], row["language"], rules)
        verdicts.add(gone=row is None, rule=next(iter(rules), ""), language=language or "")
    verdicts.write(corpus / spec.output)
    return Result()


def find_contaminated(corpus: Path, spec: PartSpec) -> DecontaminationResult:
    """Looks for items of evaluation sets in one unit's documents, as all other steps left them."""
    index = evaluation_sets.Index.read(corpus / evaluation_sets.INDEX)
    gone: list[int] = []
    evidence: dict[int, tuple[int, str]] = {}  # the first in each document
    hit: set[tuple[str, int]] = set()
    found: dict[str, set[int]] = {}
    texts = ((number, f"{row['text']}\n{row['target']}") for number, row in _left(corpus, spec, gone))
    for match in index.ngrams.matches(texts):
        for item in match.items:
            found.setdefault(index.set_of(item), set()).add(index.number_of(item))
            hit.add((index.set_of(item), match.number))
        told = match.word, f"{index.name_of(match.items[0])}: {match.words}"
        evidence[match.number] = min(told, evidence.get(match.number, told))
    Contaminated(gone, {number: told for number, (_, told) in evidence.items()}).write(corpus / spec.output)
    documents = Counter(name for name, _ in sorted(hit))
    return DecontaminationResult(dict(documents), {name: sorted(items) for name, items in sorted(found.items())})


def decide_bucket(corpus: Path, spec: BucketSpec) -> Result:
    """Decides which documents, lines or spans with keys in one bucket are dropped."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    _, losers, _ = decide(table, step_of(spec.step, spec.dedup).group, units)
    write_losers(corpus / spec.output, units[losers], table[losers, -1], spec.units)
    return Result()


def find_repeated(corpus: Path, spec: BucketSpec) -> Result:
    """Writes the places of the anchors in one bucket that occur more than once, in the same form as losers."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    _, losers, winners = decide(table, Anchors.group, units)
    repeated = np.unique(np.concatenate([losers, winners]))
    write_losers(corpus / spec.output, units[repeated], table[repeated, -1], spec.units)
    return Result()


def find_pairs(corpus: Path, spec: BucketSpec) -> Result:
    """Writes the near-duplicates in one bucket as distinct pairs of unit << 32 | document."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    _, losers, winners = decide(table, step_of(spec.step, spec.dedup).group, units)
    documents = units << np.uint64(32) | table[:, -1] >> np.uint64(32)
    pairs = np.unique(np.stack([documents[losers], documents[winners]], axis=1), axis=0)
    with atomic_path(corpus / spec.output) as temporary, os_errors():
        save_file({"pairs": pairs}, temporary)
    return Result()


def find_clusters(corpus: Path, spec: ClustersSpec) -> Result:
    """Finds the connected components of all pairs, and drops all but the smallest id of each."""
    clusters = Clusters()
    for name in spec.pairs:
        clusters.join(load_file(corpus / name)["pairs"])
    for pairs in pairs_within(corpus, read_names(corpus, spec.files)):
        clusters.join(pairs)
    documents, first = clusters.members()
    losers = documents[documents != first]
    places = (losers & np.uint64(2**32 - 1)) << np.uint64(32)
    write_losers(corpus / spec.output, losers >> np.uint64(32), places, spec.units)
    return Result()


def merge_keys(corpus: Path, spec: MergeSpec) -> Result:
    KeyBucket.merge(corpus, spec.files, spec.first, corpus / spec.output)
    return Result()


def merge_signatures(corpus: Path, spec: MergeSpec) -> Result:
    """Like `merge_keys`, with the near-duplicates within a unit, which the clusters need too."""
    KeyBucket.merge(corpus, spec.files, spec.first, corpus / spec.output, with_pairs=True)
    return Result()


def merge_decided(corpus: Path, spec: MergeSpec) -> Result:
    merge_losers(corpus, spec.files, corpus / spec.output)
    return Result()


def write_left(corpus: Path, spec: PartSpec) -> PartsResult:
    """Writes one unit's documents that are left after all steps; returns counts of what was dropped."""
    tally, histograms = Tally(), Histograms()
    with part_file(corpus / spec.output) as file:
        for _, row in _documents(corpus, spec, list(Document.__dataclass_fields__), tally):
            if row is not None:
                document = Document(**row)
                file.add(document)
                histograms.add(document)
    return PartsResult.of(tally, [file.describe(spec.output, spec.part.source, spec.part.first_id)], histograms)


_STEPS = ("urls", "lines", "spans", "anchors", "substrings", "documents", "minhash")
_DECIDING = {"anchors": find_repeated, "minhash": find_pairs}
_VERSIONS = {"anchors": 2, "substrings": 2, "minhash": 2}  # of the stages that gather keys; those of other steps: 1
KEYS = {
    step: Stage(f"{step}-keys", _VERSIONS.get(step, 1), gather_keys, "lower characters_per_part") for step in _STEPS
}
LOSERS = {
    step: Stage(f"{step}-losers", 1, _DECIDING.get(step, decide_bucket), "lower dedup.keys_per_bucket")
    for step in _STEPS
}
MERGE_KEYS = {step: Merging(f"{step}-keys", merge_signatures if step == "minhash" else merge_keys) for step in _STEPS}
MERGE_LOSERS = {step: Merging(f"{step}-losers", merge_decided) for step in _STEPS}
CLUSTERS = Stage("minhash-clusters", 2, find_clusters, "raise dedup.minhash.rows")
FILTERS = Stage("page-filters", 1, filter_pages, "lower characters_per_part")
DECONTAMINATION = Stage("decontamination", 2, find_contaminated, "look for fewer evaluation sets")
VERDICTS: dict[str, Stage] = {"filters": FILTERS, "decontamination": DECONTAMINATION}
LAST = Stage("deduplicated", 2, write_left, "lower characters_per_part")


def _documents(corpus: Path, spec: PartSpec, columns: list[str], tally: Tally) -> Iterator[tuple[int, Row | None]]:
    """(number, row) of each document of a part, with its text after the applied steps; None if they dropped it."""
    steps: list[Callable[[int, Row, Tally, int], str | None]] = []
    # Counting sentences is slow, so it isn't repeated for earlier steps: the last keys record which documents are gone.
    counted, gone = 0, set()
    for position, done in enumerate(spec.applied):
        if done.step in VERDICTS:
            verdicts = read_verdicts(corpus, done.step, done.file)
            steps.append(verdicts.without)
            counted, gone = position, verdicts.gone
            continue
        if done.step == "anchors":  # the last one here, and it drops nothing
            counted, gone = position, read_gone(corpus, done.file)
            continue
        own = None if done.step == "minhash" else done.file  # the clusters include pairs inside a part
        losers = read_losers(corpus, own, read_names(corpus, done.losers), spec.unit)
        steps.append(partial(_without, step_of(done.step, spec.dedup), losers))
        if done.step != "urls":  # noted before any step
            counted, gone = position, read_gone(corpus, done.file)
    for number, row in enumerate(read_documents(corpus, spec.part.path, columns)):
        left: Row | None = row
        for position, without in enumerate(steps):
            min_sentences = spec.cleaning.min_sentences_per_page if position >= counted or number in gone else 0
            text = without(number, row, tally, min_sentences)
            if text is None:
                left = None
                break
            row["text"] = text
        yield number, left


def read_verdicts(corpus: Path, step: str, file: str) -> Verdicts | Contaminated:
    """What a step that needs no other part's keys decided about the documents of one part."""
    return Verdicts.read(corpus / file) if step == "filters" else Contaminated.read(corpus / file)


def _left(corpus: Path, spec: PartSpec, gone: list[int]) -> Iterator[tuple[int, Row]]:
    """(number, row) of each document of a part that the applied steps left. The numbers of others go to `gone`."""
    for number, row in _documents(corpus, spec, _COLUMNS, Tally()):
        if row is None:
            gone.append(number)
        else:
            yield number, row


def _substrings(corpus: Path, spec: PartSpec) -> Anchors | EqualSubstrings:
    """What gathers the keys of `spec.step`: anchors, or the substrings whose anchors occur more than once."""
    assert spec.dedup.substrings is not None, "a step that isn't asked for"
    if spec.step == "anchors":
        return Anchors(spec.dedup.substrings)
    anchors = spec.applied[-1]
    repeated = read_repeated(corpus, anchors.file, read_names(corpus, anchors.losers), spec.unit)
    return EqualSubstrings(spec.dedup.substrings, repeated)


def _without(
    step: Step, losers: dict[int, list[int]], number: int, row: Row, tally: Tally, min_sentences: int
) -> str | None:
    return step.without(row, losers.get(number, []), tally, min_sentences)


def step_of(name: str, config: DedupConfig) -> Step:
    """The step `name` with its settings."""
    if name == "minhash":
        assert config.minhash is not None, "a step that isn't asked for"
        return NearDuplicates(config.minhash)
    if name == "substrings":
        assert config.substrings is not None, "a step that isn't asked for"
        return EqualSubstrings(config.substrings)
    steps: dict[str, Step] = {
        "urls": NewestUrl(),
        "lines": EqualLines(),
        "spans": EqualSpans(),
        "documents": EqualDocuments(),
    }
    return steps[name]
