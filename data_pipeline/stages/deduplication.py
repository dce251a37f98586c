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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from data_pipeline.cleaning.config import CleaningConfig
from data_pipeline.cleaning.page import PageFilters
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup.clusters import Clusters
from data_pipeline.dedup.config import DedupConfig, setting_of
from data_pipeline.dedup.documents import EqualDocuments
from data_pipeline.dedup.keys import (
    KeyBucket,
    Keys,
    decide,
    merge_duplicates,
    pairs_within,
    read_dropped,
    read_duplicates,
    read_repeated,
    write_duplicates,
)
from data_pipeline.dedup.lines import EqualLines
from data_pipeline.dedup.minhash import NearDuplicates
from data_pipeline.dedup.spans import EqualSpans
from data_pipeline.dedup.step import Step
from data_pipeline.dedup.substrings import Anchors, EqualSubstrings
from data_pipeline.dedup.urls import NewestUrl
from data_pipeline.dedup.verdicts import Verdict, Verdicts
from data_pipeline.execution.merging import MergeSpec, Merging, merge
from data_pipeline.execution.name_lists import read_names, write_names
from data_pipeline.execution.parts import SCHEMA, Histograms, Part, PartsResult, part_file, read_documents
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

    `file` has the part's own keys or, after the steps "filters" and "decontamination", its verdicts. `duplicates` is
    the list of the files with the duplicates (`name_lists`).
    """

    step: str
    file: str
    duplicates: str = ""


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
    applied: list[
        tuple[str, list[str], str]
    ] = []  # each earlier step, its files by part, and the list of those with its duplicates
    depends = ""  # fingerprint of all that the earlier steps depend on

    def per_part(parts: list[Part], step: str, output: str) -> list[Unit[PartSpec]]:
        units = []
        for part in parts:
            name, unit, rules = output.format(part.name), number[part.name], cleaning[part.source]
            earlier = [Applied(done, files[unit], duplicates) for done, files, duplicates in applied]
            checked = {"language", "bad_words", "bad_words_fraction", "classifier"} if step == "filters" else set()
            settings = rules.model_dump(include={"min_sentences_per_page", *checked})
            content = rules.identity if step == "filters" else []
            inputs = fingerprint([part.checksums, unit, settings, depends, *content])
            spec = PartSpec(part, unit, rules, config.dedup, earlier, step, name)
            units.append(Unit(part.name, spec, inputs, (name,) if step else (), part.text_bytes))
        return units

    for step in config.steps:
        depends = fingerprint([depends, step, config.dedup.model_dump(include={setting_of(step)})])
        if checking := VERDICTS.get(step):
            if step == "decontamination":
                indexed = run(evaluation_sets.STAGE, evaluation_sets.plan(config.decontamination), corpus, config.ray)
                finished[evaluation_sets.STAGE.name] = indexed
                depends = _after(depends, indexed)
            units = per_part(in_order, step, f".stages/{checking.name}/{{}}.parquet")
            finished[checking.name] = checked = run(checking, units, corpus, config.ray)
            applied.append((step, list(outputs_of(checked)), ""))
            depends = _after(depends, checked)
            continue
        if step == "urls":  # collected while reading
            files = {part.urls: part.checksums[-1] for part in in_order}
            count = sum(part.url_keys for part in in_order)
            depends = fingerprint([depends, [part.checksums for part in in_order]])
        else:
            units = per_part(in_order, step, f".stages/{step}-keys/{{}}.safetensors")
            finished[f"{step}-keys"] = gathered = run(KEYS[step], units, corpus, config.ray)
            files = outputs_of(gathered)
            count = sum(unit.result.keys for unit in gathered)
            depends = _after(depends, gathered)
        stage = f"{step}-duplicates"
        bucket_units = []
        buckets = KeyBucket.enough(count, config.dedup.keys_per_bucket)
        to_read, merged = merge(MERGE_KEYS[step], files, buckets, corpus, config.ray)
        finished |= merged
        listed = write_names(corpus, to_read)
        for bucket in range(buckets):
            name = f".stages/{stage}/{bucket:04d}-of-{buckets:04d}.safetensors"
            spec = BucketSpec(listed, len(parts), KeyBucket(bucket, buckets), step, config.dedup, name)
            bucket_units.append(Unit(Path(name).stem, spec, fingerprint([depends, bucket, buckets]), (name,)))
        finished[stage] = decided = run(DUPLICATES[step], bucket_units, corpus, config.ray)
        if step == "minhash":
            name = ".stages/minhash-clusters/clusters.safetensors"
            spec_of_clusters = ClustersSpec(listed, len(parts), list(outputs_of(decided)), name)
            clusters = Unit("clusters", spec_of_clusters, _after(depends, decided), (name,))
            finished[CLUSTERS.name] = decided = run(CLUSTERS, [clusters], corpus, config.ray)
            duplicates = [name]
        else:
            duplicates, merged = merge(MERGE_DUPLICATES[step], outputs_of(decided), len(parts), corpus, config.ray)
            finished |= merged
        if step == "substrings":
            applied.pop()  # the anchors, which only substrings need
        applied.append((step, list(files), write_names(corpus, duplicates)))
        depends = _after(depends, decided)
    return finished, run(LAST, per_part(parts, "", "documents/{}.parquet"), corpus, config.ray)


def _after(depends: str, units: Sequence[Finished[Result]]) -> str:
    """The fingerprint of all that a later step depends on, once `units` are finished."""
    return fingerprint([depends, [unit.checksums for unit in units]])


@dataclass(frozen=True)
class Decided:
    """A finished step: its files by part in the order of ids, which have keys or verdicts, and the files of its
    duplicates."""

    step: str
    files: list[str]
    duplicates: list[str]


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
        clustered = read_finished(CLUSTERS, corpus) if step == "minhash" else read_finished(DUPLICATES[step], corpus)
        duplicates = [name for unit in clustered for name in unit.outputs]
        steps.append(Decided(step, [part.urls for part in in_order] if step == "urls" else own, duplicates))
    return steps


def forget(corpus: Path, config: CorpusConfig) -> None:
    """Removes the results of steps that the config no longer asks for."""
    steps = config.steps
    stages = corpus / ".stages"
    stale = [folder for step in _STEPS if step not in steps for folder in stages.glob(f"{step}-*")]
    stale += [stages / stage.name for step, stage in VERDICTS.items() if step not in steps]
    stale += [stages / evaluation_sets.STAGE.name] if "decontamination" not in steps else []
    for folder in stale if steps else [*stale, stages / LAST.name]:
        shutil.rmtree(folder, ignore_errors=True)
    for pattern in ([] if "urls" in steps else ["*.urls.safetensors"]) + ([] if steps else ["*.parquet"]):
        for file in (stages / "documents").glob(pattern):
            file.unlink()


def gather_keys(corpus: Path, spec: PartSpec) -> KeysResult:
    """Writes one step's keys for one unit's documents, as the earlier steps left them."""
    dropped: list[int] = []
    documents = _left(corpus, spec, dropped)
    if spec.step in ("anchors", "substrings"):  # these take many documents at a time
        finder = _substrings(corpus, spec)
        keys = Keys(finder.group, finder.order)
        for table in finder.tables(documents):
            keys.extend(table)
    else:
        step = step_of(spec.step, spec.dedup)
        keys = Keys(step.group, step.order)
        for number, document in documents:
            for item, words in step.keys(document):
                keys.add(number, item, words)
    return KeysResult(keys.write(corpus / spec.output, dropped))


def filter_pages(corpus: Path, spec: PartSpec) -> Result:
    """Checks language and bad words in one unit's documents, as the earlier steps left them."""
    filters = PageFilters(spec.cleaning)
    verdicts: dict[int, Verdict] = {}
    for number, document in _documents(corpus, spec, [*_COLUMNS, "language"], Tally()):
        rules = Tally()
        language = document and filters(document.text, document.url, document.language, rules)
        rule = next(iter(rules), "")
        example = next(iter(rules.examples.get(rule, [])), "")
        verdicts[number] = Verdict(document is None, rule, example, language or "")
    Verdicts(verdicts).write(corpus / spec.output)
    return Result()


def find_contaminated(corpus: Path, spec: PartSpec) -> DecontaminationResult:
    """Looks for items of evaluation sets in one unit's documents, as all other steps left them."""
    index = evaluation_sets.Index.read(corpus / evaluation_sets.INDEX)
    dropped: list[int] = []
    evidence: dict[int, tuple[int, str]] = {}  # the first in each document
    hit: set[tuple[str, int]] = set()
    found: dict[str, set[int]] = {}
    texts = ((number, f"{one.text}\n{one.target}") for number, one in _left(corpus, spec, dropped))
    for match in index.ngrams.matches(texts):
        for item in match.items:
            found.setdefault(index.set_of(item), set()).add(index.number_of(item))
            hit.add((index.set_of(item), match.number))
        found_here = match.word, f"{index.name_of(match.items[0])}: {match.words}"
        evidence[match.number] = min(found_here, evidence.get(match.number, found_here))
    verdicts = {number: Verdict(rule="contaminated", example=text) for number, (_, text) in evidence.items()}
    Verdicts(verdicts | {number: Verdict(dropped=True) for number in dropped}).write(corpus / spec.output)
    documents = Counter(name for name, _ in sorted(hit))
    return DecontaminationResult(dict(documents), {name: sorted(items) for name, items in sorted(found.items())})


def decide_bucket(corpus: Path, spec: BucketSpec) -> Result:
    """Decides which documents, lines or spans with keys in one bucket are dropped."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    _, duplicates, _ = decide(table, step_of(spec.step, spec.dedup).group, units)
    write_duplicates(corpus / spec.output, units[duplicates], table[duplicates, -1], spec.units)
    return Result()


def find_repeated(corpus: Path, spec: BucketSpec) -> Result:
    """Writes the places of the anchors in one bucket that occur more than once, in the form of duplicates."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    _, duplicates, kept = decide(table, Anchors.group, units)
    repeated = np.unique(np.concatenate([duplicates, kept]))
    write_duplicates(corpus / spec.output, units[repeated], table[repeated, -1], spec.units)
    return Result()


def find_pairs(corpus: Path, spec: BucketSpec) -> Result:
    """Writes the near-duplicates in one bucket as distinct pairs of unit << 32 | document."""
    table, units = spec.bucket.read(corpus, read_names(corpus, spec.files))
    _, duplicates, kept = decide(table, step_of(spec.step, spec.dedup).group, units)
    documents = units << np.uint64(32) | table[:, -1] >> np.uint64(32)
    pairs = np.unique(np.stack([documents[duplicates], documents[kept]], axis=1), axis=0)
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
    duplicates = documents[documents != first]
    places = (duplicates & np.uint64(2**32 - 1)) << np.uint64(32)
    write_duplicates(corpus / spec.output, duplicates >> np.uint64(32), places, spec.units)
    return Result()


def merge_keys(corpus: Path, spec: MergeSpec) -> Result:
    KeyBucket.merge(corpus, spec.files, spec.first, corpus / spec.output)
    return Result()


def merge_signatures(corpus: Path, spec: MergeSpec) -> Result:
    """Like `merge_keys`, with the near-duplicates within a unit, which the clusters need too."""
    KeyBucket.merge(corpus, spec.files, spec.first, corpus / spec.output, with_pairs=True)
    return Result()


def merge_decided(corpus: Path, spec: MergeSpec) -> Result:
    merge_duplicates(corpus, spec.files, corpus / spec.output)
    return Result()


def write_left(corpus: Path, spec: PartSpec) -> PartsResult:
    """Writes one unit's documents that are left after all steps; returns counts of what was dropped."""
    tally, histograms = Tally(), Histograms()
    with part_file(corpus / spec.output) as file:
        for _, document in _documents(corpus, spec, SCHEMA.names, tally):
            if document is not None:
                file.add(document)
                histograms.add(document)
    return PartsResult.of(tally, [file.describe(spec.output, spec.part.source, spec.part.first_id)], histograms)


_STEPS = ("urls", "lines", "spans", "anchors", "substrings", "documents", "minhash")
_DECIDING = {"anchors": find_repeated, "minhash": find_pairs}
_VERSIONS = {"anchors": 2, "substrings": 2, "minhash": 2}  # of the stages that gather keys; those of other steps: 1
KEYS = {
    step: Stage(f"{step}-keys", _VERSIONS.get(step, 1), gather_keys, "lower characters_per_part") for step in _STEPS
}
DUPLICATES = {
    step: Stage(f"{step}-duplicates", 1, _DECIDING.get(step, decide_bucket), "lower dedup.keys_per_bucket")
    for step in _STEPS
}
MERGE_KEYS = {step: Merging(f"{step}-keys", merge_signatures if step == "minhash" else merge_keys) for step in _STEPS}
MERGE_DUPLICATES = {step: Merging(f"{step}-duplicates", merge_decided) for step in _STEPS}
CLUSTERS = Stage("minhash-clusters", 2, find_clusters, "raise dedup.minhash.rows")
FILTERS = Stage("page-filters", 2, filter_pages, "lower characters_per_part")
DECONTAMINATION = Stage("decontamination", 3, find_contaminated, "look for fewer evaluation sets")
VERDICTS: dict[str, Stage] = {"filters": FILTERS, "decontamination": DECONTAMINATION}
LAST = Stage("deduplicated", 2, write_left, "lower characters_per_part")


Apply = Callable[[int, Document, Tally, int], Document | None]
"""(number, document, tally, least number of sentences) -> the document that a step leaves, if any."""


def _documents(corpus: Path, spec: PartSpec, columns: list[str], tally: Tally) -> Iterator[tuple[int, Document | None]]:
    """(number, document) of each document of a part after the applied steps; None if they dropped it."""
    steps: list[Apply] = []
    # Counting sentences is slow, so it isn't repeated for earlier steps: the last keys record what they dropped.
    counted, dropped = 0, set[int]()
    for position, done in enumerate(spec.applied):
        if done.step in VERDICTS:
            verdicts = Verdicts.read(corpus / done.file)
            steps.append(verdicts.without)
            counted, dropped = position, verdicts.dropped
            continue
        if done.step != "urls":  # collected before any step
            counted, dropped = position, read_dropped(corpus, done.file)
        if done.step != "anchors":  # the last one here, and it drops nothing
            own = None if done.step == "minhash" else done.file  # the clusters include pairs inside a part
            duplicates = read_duplicates(corpus, own, read_names(corpus, done.duplicates), spec.unit)
            steps.append(without_duplicates(step_of(done.step, spec.dedup), duplicates))
    for number, document in enumerate(read_documents(corpus, spec.part.path, columns)):
        left: Document | None = document
        for position, apply in enumerate(steps):
            min_sentences = spec.cleaning.min_sentences_per_page if position >= counted or number in dropped else 0
            if left is not None:
                left = apply(number, left, tally, min_sentences)
        yield number, left


def without_duplicates(step: Step, duplicates: dict[int, list[int]]) -> Apply:
    """Removes the items `duplicates` of each document, by its number."""

    def apply(number: int, document: Document, tally: Tally, min_sentences: int) -> Document | None:
        text = step.without(document, duplicates.get(number, []), tally, min_sentences)
        if text is None or text is document.text:
            return document if text is not None else None
        return replace(document, text=text)

    return apply


def _left(corpus: Path, spec: PartSpec, dropped: list[int]) -> Iterator[tuple[int, Document]]:
    """(number, document) of each document of a part that the applied steps left. The numbers of others go to
    `dropped`."""
    for number, document in _documents(corpus, spec, _COLUMNS, Tally()):
        if document is None:
            dropped.append(number)
        else:
            yield number, document


def _substrings(corpus: Path, spec: PartSpec) -> Anchors | EqualSubstrings:
    """What gathers the keys of `spec.step`: anchors, or the substrings whose anchors occur more than once."""
    assert spec.dedup.substrings is not None, "the config has no such step"
    if spec.step == "anchors":
        return Anchors(spec.dedup.substrings)
    anchors = spec.applied[-1]
    repeated = read_repeated(corpus, anchors.file, read_names(corpus, anchors.duplicates), spec.unit)
    return EqualSubstrings(spec.dedup.substrings, repeated)


def step_of(name: str, config: DedupConfig) -> Step:
    """The step `name` with its settings."""
    if name == "minhash":
        assert config.minhash is not None, "the config has no such step"
        return NearDuplicates(config.minhash)
    if name == "substrings":
        assert config.substrings is not None, "the config has no such step"
        return EqualSubstrings(config.substrings)
    steps: dict[str, Step] = {
        "urls": NewestUrl(),
        "lines": EqualLines(),
        "spans": EqualSpans(),
        "documents": EqualDocuments(),
    }
    return steps[name]
