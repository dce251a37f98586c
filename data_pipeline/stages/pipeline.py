"""Builds a corpus: runs the stages in order, and writes the report and the manifest."""

import contextlib
import fnmatch
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import FailedError, UserError, failing_in_one_line
from data_pipeline.base.formatting import counted, first_few, printable
from data_pipeline.base.open_store import open_store
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.corpus import LINEAGE, MANIFEST
from data_pipeline.engine import workers
from data_pipeline.engine.checking import forget_damaged
from data_pipeline.engine.work_units import KEPT, Finished, ResultType, Spec, Stage, Unit, outputs_of, run
from data_pipeline.stages import (
    dedup,
    documents,
    evaluation_sets,
    report,
    report_pages,
    revisions,
    shards,
    table,
    tokenizer,
    tokens,
    write_manifest,
)
from data_pipeline.stages.dedup import LAST
from data_pipeline.stages.documents import DocumentsResult
from data_pipeline.stages.inputs import InputFile, inputs_of
from data_pipeline.stages.output import WRITTEN
from data_pipeline.stages.parts import PartsResult, parts_of
from data_pipeline.stages.stage import DOCUMENTS, DROPPED, PARTS, SHARDS, Kind
from data_pipeline.stages.table import Built
from data_pipeline.stages.write_manifest import BLOCKS
from data_pipeline.text.cleaning.bad_words import BadWords, list_of
from data_pipeline.text.document import most_common

_ERRORS_SHOWN = 10
_LANGUAGES_SHOWN = 5
_MARK = ".stages/complete"  # fingerprints of the units that the report and the manifest were made from


def build(config: CorpusConfig, until: str = "shards", strict: bool = False, repair: bool = False) -> str:
    """Builds the corpus until its folder `until` (documents, tokenizer or shards) is complete, and writes the report.

    Returns the corpus's path or URL.
    Units of earlier builds are kept if their input and config haven't changed and their files have the expected sizes.
    `repair`: also checks the checksums of all files. Warns about damaged inputs and continues; `strict`: raises
    FailedError instead, after reading all inputs.
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
    found = inputs_of(config)  # a missing input is reported before anything is written
    inputs = found.files
    if searched := config.searched_for:
        evaluation_sets.check(searched, corpus)
    for step in (step for steps in config.all_steps.values() for step in steps):
        step.check()
    if problems := config.rows.objective.problems(tokenizer.expected(config.tokenizer)):
        raise UserError("\n".join(f"rows.objective: {config.rows.objective.name}: {problem}" for problem in problems))
    small = workers.are_small(sum(file.bytes for file in inputs), config.ray)
    with workers.without_ray() if small else contextlib.nullcontext():
        corpus.claim()  # before anything is removed: another build may be using it
        corpus.remove_leftovers(WRITTEN)
        revisions.keep(commits, corpus)
        if repair:
            _forget_damaged(corpus, config)
        table.forget(corpus, config)
        built = Built()
        for folder in _stages(config, corpus, inputs, strict, built):
            if folder == until:
                break
        written = _record(config, corpus, built, len(found.hidden))
        if not documents.total(built.left, *(() if until == documents.STAGE.ends else ("train",))):
            reason = report.why_nothing_is_left(written.documents, written.lines)
            raise FailedError(f"{config.name}: {reason} (more in {corpus.at(report.MARKDOWN)})")


def _stages(config: CorpusConfig, corpus: Store, inputs: list[InputFile], strict: bool, built: Built) -> Iterator[str]:
    """Runs the stages in order, and adds their units to `built`. Yields each folder of the corpus after the last stage
    that writes there.

    Ends early if no documents are left to train on.
    """

    def done(stage: Stage[Spec, ResultType], units: list[Unit[Spec]]) -> list[Finished[ResultType]]:
        if finished := run(stage, units, corpus, config.ray):
            built.units[stage.name] = finished
        return finished

    read = done(documents.STAGE, documents.plan(config, corpus, inputs))
    report_damage(read, strict)
    parts = parts_of(read)
    if LAST.applies(config):
        keep_only(PARTS, corpus, outputs_of(read))
        steps = dedup.steps_after_reading(config, any(unit.result.with_urls for unit in read))
        built.units |= dedup.deduplicate(config, corpus, parts, steps)
        parts = parts_of(built.left)
    keep_only(DOCUMENTS, corpus, outputs_of(built.left))
    keep_only(DROPPED, corpus, {name for units in built.units.values() for name in outputs_of(units)})
    _report_without_list(config, built.left)
    yield LAST.ends
    if not documents.total(built.left, "train"):
        return

    sampled = done(tokenizer.SAMPLING, tokenizer.plan_sampling(config.tokenizer, config.seed, parts))
    (trained,) = done(tokenizer.STAGE, tokenizer.plan(config.tokenizer, config.seed, parts, sampled))
    print(tokenizer.describe(config.tokenizer, trained, built.left))
    yield tokenizer.STAGE.ends

    tokenized = done(tokens.STAGE, tokens.plan(config, parts, trained))
    if warning := report.unknown_tokens(report.coverage_of([unit.result for unit in tokenized]), config.tokenizer):
        print(warning, file=sys.stderr)
    readers = len(shards.buckets_of(config, tokenized))
    files, merged = tokens.STAGE.merged(outputs_of(tokenized), readers, corpus, config)
    built.units |= merged
    buckets = shards.specs_of(config, corpus, tokenized, files, trained)
    rows = done(shards.COUNT, shards.plan_counts(config, buckets))
    written = done(shards.STAGE, shards.plan(config, corpus, buckets, files, rows))
    keep_only(SHARDS, corpus, outputs_of(written))
    yield shards.STAGE.ends


def keep_only(kind: Kind, corpus: Store, names: Collection[str]) -> None:
    """Removes the files of `kind` that aren't among `names`. A build with another config, or one whose records were
    damaged, may have left them."""
    found = fnmatch.filter(corpus.names(kind.folder), f"*/{kind.files}")
    corpus.delete(name for name in found if name not in names)


def report_damage(units: list[Finished[DocumentsResult]], strict: bool) -> None:
    """Prints a line for each damaged input, with its first damage and the number of damaged records.

    Raises FailedError if nothing could be read from a source or, with `strict`, if any input is damaged.
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


def _report_without_list(config: CorpusConfig, left: Sequence[Finished[PartsResult]]) -> None:
    """Prints how many documents weren't searched for bad words because their language's list isn't enabled."""
    lists = {
        source: [listed for step in steps if isinstance(step, BadWords) for listed in step.languages]
        for source, steps in config.all_steps.items()
    }
    without = Counter[str]()
    for unit in left:
        if listed := lists[unit.result.parts[0].source]:
            of_lists = {"unknown", *listed}
            without.update({tag: n for tag, n in unit.result.languages.items() if list_of(tag) not in of_lists})
    if without:
        shown = first_few((f"{tag} {n:,}" for tag, n in most_common(without, len(without)).items()), _LANGUAGES_SHOWN)
        found = f"documents in languages whose list cleaning.bad_words doesn't name: {without.total():,} ({shown})"
        print(f"{found}; they weren't searched for bad words", file=sys.stderr)


def _forget_damaged(corpus: Store, config: CorpusConfig) -> None:
    """Removes the records of damaged files, so that their stages rebuild them."""
    damaged = forget_damaged(corpus, config.ray)
    corpus.delete_folder(".stages/plans")  # files without checksums
    corpus.delete([_MARK])
    for name in damaged:
        print(f"{corpus.at(name)}: damaged, will be rebuilt")
    print(f"repair: {counted(len(damaged), 'damaged file')}; manifest, its tables and report will be rewritten")


def _record(config: CorpusConfig, corpus: Store, built: Built, hidden: int) -> report.Report:
    """Writes the report and, for a complete corpus, the manifest, unless they are up to date. Returns the report.

    `hidden`: number of hidden files and folders of the sources that were left out.
    """
    settings = write_manifest.recorded(config)
    stages = {
        stage: fingerprint([config.name, settings, [unit.fingerprint for unit in units]])
        for stage, units in built.units.items()
    } | {"hidden": str(hidden)}
    recorded = corpus.read_valid_json(_MARK, dict[str, str]) or {}
    files = {report.FILE, *((MANIFEST, BLOCKS, LINEAGE) if shards.STAGE.name in built.units else ())}
    if recorded and stages.items() <= recorded.items() and corpus.sizes(files).keys() == files:
        found = report.read(corpus)  # may have later stages, too
        if corpus.sizes(found.files).keys() == found.files.keys():
            return found
    if recorded:
        corpus.write_json(_MARK, {})  # the manifest and the report are replaced below
    if shards.STAGE.name in built.units:
        write_manifest.write(config, corpus, built)
    made = report.of(corpus, config.name, built, hidden)
    written = report.write(corpus, made, report_pages.render(made))
    corpus.write_json(_MARK, stages)
    return written
