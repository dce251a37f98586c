"""From raw text to a finished corpus: the stages, in order."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from data_pipeline import report, report_pages, write_manifest
from data_pipeline.cleaning import classifier
from data_pipeline.cleaning.bad_words import list_of
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.corpus import MANIFEST
from data_pipeline.corpus.lineage import LINEAGE
from data_pipeline.execution import workers
from data_pipeline.execution.checking import forget_damaged
from data_pipeline.execution.merging import without_level
from data_pipeline.execution.work_units import (
    KEPT,
    Finished,
    Result,
    ResultType,
    Spec,
    Stage,
    Unit,
    keep_only,
    outputs_of,
    run,
)
from data_pipeline.foundation.atomic import fingerprint
from data_pipeline.foundation.errors import FailedError, UserError, failing_in_one_line
from data_pipeline.foundation.formatting import counted, first_few, printable
from data_pipeline.foundation.open_store import open_store
from data_pipeline.foundation.paths import opening
from data_pipeline.foundation.store import Store
from data_pipeline.stages import dedup, documents, evaluation_sets, revisions, shards, table, tokenizer, tokens
from data_pipeline.stages.dedup import LAST
from data_pipeline.stages.documents import DocumentsResult
from data_pipeline.stages.inputs import WRITTEN, InputFile, list_files
from data_pipeline.stages.parts import PartsResult, parts_of
from data_pipeline.stages.stage import DOCUMENTS, PARTS, SHARDS, Kind
from data_pipeline.stages.table import Built
from data_pipeline.text.document import most_common
from data_pipeline.write_manifest import BLOCKS

_ERRORS_SHOWN = 10
_LANGUAGES_SHOWN = 5
_MARK = ".stages/complete"  # which units of each stage the report and the manifest were made from


def build(config: CorpusConfig, until: str = "shards", strict: bool = False, repair: bool = False) -> str:
    """Brings the corpus up to date, as far as the command `until` does, and writes the report; returns its path or URL.

    Warns about damaged inputs and continues. With `strict` it raises FailedError instead, after reading all inputs.

    Work from an earlier run is kept if its input and config haven't changed and its files have the expected sizes.
    `repair` also reads the files, and rebuilds those whose checksum differs.
    """
    corpus = open_store(config.output)
    try:
        with failing_in_one_line(corpus.disk, KEPT):
            _build(config, corpus, until, strict, repair)
            corpus.remove_leftovers(WRITTEN)
    finally:
        corpus.release()
    return config.output


def _build(config: CorpusConfig, corpus: Store, until: str, strict: bool, repair: bool) -> None:
    config, commits = revisions.pin(config, corpus)
    inputs = []
    for source in config.sources:  # report a missing input before writing anything
        with opening(source.path if isinstance(source.path, str) else ", ".join(source.path)):
            inputs += list_files(source, output=config.output)
    evaluation_sets.check(config.decontamination)
    for rules in map(config.cleaning_of, config.sources):
        if rules.classifier:
            classifier.check(rules.classifier)
    if problems := config.rows.objective.problems(tokenizer.expected(config.tokenizer)):
        raise UserError("\n".join(f"rows.objective: {config.rows.objective.name}: {problem}" for problem in problems))
    small = workers.are_small(sum(file.bytes for file in inputs), config.ray)
    with workers.without_ray() if small else contextlib.nullcontext():
        corpus.claim()  # before removing anything that another build may be using
        corpus.remove_leftovers(WRITTEN)
        revisions.keep(commits, corpus)
        if repair:
            _forget_damaged(corpus, config)
        built = _run_stages(config, corpus, inputs, until, strict)
        found = _record(config, corpus, built)
        if not documents.total(built.left, *(() if until == documents.STAGE.ends else ("train",))):
            reason = report.why_nothing_is_left(found.documents, found.lines)
            raise FailedError(f"{config.name}: {reason} (more in {corpus.at(report.MARKDOWN)})")


def _run_stages(config: CorpusConfig, corpus: Store, inputs: list[InputFile], until: str, strict: bool) -> Built:
    """Runs the stages that the command `until` needs, or as many as there are documents to train on."""
    table.forget(corpus, config)
    built = Built()
    for command in _stages(config, corpus, inputs, strict, built):
        if command == until:
            break
    shown = table.stages_of(config, built.with_urls)
    built.units = {name: units for name, units in built.units.items() if without_level(name) in shown and units}
    return built


def _stages(config: CorpusConfig, corpus: Store, inputs: list[InputFile], strict: bool, built: Built) -> Iterator[str]:
    """Runs one stage after the other, and notes its units in `built`. Yields each command that has no more to do."""

    def done(stage: Stage[Spec, ResultType], units: list[Unit[Spec]]) -> list[Finished[ResultType]]:
        built.units[stage.name] = finished = run(stage, units, corpus, config.ray)
        return finished

    read = done(documents.STAGE, documents.plan(config, corpus, inputs))
    report_damage(read, strict)
    _report_unchecked(read)
    parts = parts_of(read)
    if LAST.applies(config):
        _keep_only(PARTS, corpus, read)
        shown = table.stages_of(config, built.with_urls)
        steps, left = dedup.deduplicate(config, corpus, parts, lambda stage: stage.name in shown)
        built.units |= {**steps, LAST.name: left}
        parts = parts_of(left)
    _keep_only(DOCUMENTS, corpus, built.left)
    _report_without_list(config, built.left)
    yield LAST.ends
    if not documents.total(built.left, "train"):
        return

    sampled = done(tokenizer.SAMPLING, tokenizer.plan_sampling(config.tokenizer, config.seed, parts))
    (trained,) = done(tokenizer.STAGE, tokenizer.plan(config.tokenizer, config.seed, parts, sampled))
    if said := tokenizer.describe_sample(trained, built.left):
        print(said)
    yield tokenizer.STAGE.ends

    tokenized = done(tokens.STAGE, tokens.plan(config, parts, trained))
    readers = len(shards.buckets_of(config, tokenized))
    files, merged = tokens.STAGE.merged(outputs_of(tokenized), readers, corpus, config)
    built.units |= merged
    rows = done(shards.COUNT, shards.plan_counts(config, corpus, tokenized, files, trained))
    written = done(shards.STAGE, shards.plan(config, corpus, tokenized, files, trained, rows))
    _keep_only(SHARDS, corpus, written)
    yield shards.STAGE.ends


def _keep_only(kind: Kind, corpus: Store, units: Sequence[Finished[Result]]) -> None:
    keep_only(corpus, kind.folder, kind.files, outputs_of(units))


def report_damage(units: list[Finished[DocumentsResult]], strict: bool) -> None:
    """Prints one line for each damaged input: its first damage, and the number of damaged records.

    Raises FailedError if nothing could be read from a source or, with `strict`, if there is any damage.
    """
    inputs = [(unit.result.source, read) for unit in units for read in unit.result.inputs]
    readable = {source for source, read in inputs if read.status != "unreadable"}
    errors = []
    for source, read in inputs:
        if read.status == "ok":
            continue
        position, reason = read.damage[0]
        more = f" ({read.damaged:,} records damaged in all)" if read.damaged > 1 else ""
        line = printable(f"{source}/{read.file}: {read.status} at {position}: {reason}{more}")
        if strict or source not in readable:
            errors.append(line)
        else:
            kept = "" if read.status == "unreadable" else "; its undamaged records were kept"
            print(f"warning: {line}{kept}", file=sys.stderr)
    if errors and not strict:
        sources = sorted({source for source, _ in inputs} - readable)
        others = [f"and {len(errors) - _ERRORS_SHOWN:,} more inputs"] if len(errors) > _ERRORS_SHOWN else []
        errors = [*errors[:_ERRORS_SHOWN], *others, f"nothing could be read from source {', '.join(sources)}"]
    if errors:
        raise FailedError("\n".join(errors))


def _report_unchecked(units: list[Finished[DocumentsResult]]) -> None:
    """Prints how many input files have no checksums, though their formats may have some."""
    files = [read for unit in units for read in unit.result.inputs if read.range.start == 0]
    if unchecked := sum(read.unchecked for read in files):
        print(
            f"input files without checksums: {unchecked:,} of {len(files):,}; a flipped bit in them goes unseen",
            file=sys.stderr,
        )


def _report_without_list(config: CorpusConfig, left: Sequence[Finished[PartsResult]]) -> None:
    """Prints how many documents weren't searched for bad words, since the list of their language isn't enabled."""
    lists = {source.name: config.cleaning_of(source).bad_words for source in config.sources}
    without = Counter[str]()
    for unit in left:
        if listed := lists[unit.result.parts[0].source]:
            of_lists = {"unknown", *listed}
            without.update({tag: n for tag, n in unit.result.languages.items() if list_of(tag) not in of_lists})
    if without:
        shown = first_few((f"{tag} {n:,}" for tag, n in most_common(without, len(without)).items()), _LANGUAGES_SHOWN)
        print(
            f"documents in languages whose list cleaning.bad_words doesn't name: {without.total():,} ({shown}); they "
            "weren't searched for bad words",
            file=sys.stderr,
        )


def _forget_damaged(corpus: Store, config: CorpusConfig) -> None:
    """Removes the records of damaged files, so that the stages rebuild them."""
    damaged = forget_damaged(corpus, config.ray)
    corpus.delete_folder(".stages/plans")  # they have no checksums
    corpus.delete([_MARK])
    for name in damaged:
        print(f"{corpus.at(name)}: damaged, will be rebuilt")
    print(f"repair: {counted(len(damaged), 'damaged file')}; manifest, its tables and report will be rewritten")


def _record(config: CorpusConfig, corpus: Store, built: Built) -> report.Report:
    """Writes the report and, for a complete corpus, the manifest, unless they already describe these units.

    Returns the report.
    """
    write_manifest.write_settings(config, corpus)
    settings = write_manifest.recorded(config)
    stages = {
        stage: fingerprint([config.name, settings, [unit.fingerprint for unit in units]])
        for stage, units in built.units.items()
    }
    recorded = corpus.read_valid_json(_MARK, dict[str, str]) or {}
    files = {report.FILE, *((MANIFEST, BLOCKS, LINEAGE) if shards.STAGE.name in built.units else ())}
    if recorded and stages.items() <= recorded.items() and corpus.sizes(files).keys() == files:
        found = report.read(corpus)  # perhaps of more stages than this command asks for
        if corpus.sizes(found.files).keys() == found.files.keys():
            return found
    if recorded:
        corpus.write_json(_MARK, {})  # it speaks of the manifest and report that are replaced now
    if shards.STAGE.name in built.units:
        write_manifest.write(config, corpus, built)
    made = report.of(corpus, config.name, built)
    written = report.write(corpus, made, report_pages.render(made))
    corpus.write_json(_MARK, stages)
    return written
