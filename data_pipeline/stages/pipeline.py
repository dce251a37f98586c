"""Builds a corpus: runs the stages in order, and writes the report and the manifest."""

import contextlib
import fnmatch
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from data_pipeline.base.atomic import fingerprint
from data_pipeline.base.errors import FailedError, UserError, failing_in_one_line
from data_pipeline.base.formatting import counted, first_few, printable
from data_pipeline.base.open_store import open_store
from data_pipeline.base.store import Store
from data_pipeline.config import CorpusConfig
from data_pipeline.corpus.corpus import LINEAGE, MANIFEST
from data_pipeline.engine import workers
from data_pipeline.engine.checking import forget_damaged
from data_pipeline.engine.work_units import KEPT, Finished, outputs_of
from data_pipeline.stages import (
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
from data_pipeline.stages.dedup import LAST, counts_of_left, left
from data_pipeline.stages.documents import InputsRead
from data_pipeline.stages.inputs import InputFile, inputs_of
from data_pipeline.stages.kinds import DOCUMENTS, Kind
from data_pipeline.stages.output import WRITTEN
from data_pipeline.stages.stage import Build
from data_pipeline.stages.tokens import TokensResult
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
    store = open_store(config.output, at_start=True)
    try:
        with failing_in_one_line(store.disk, KEPT):
            _build(config, store, until, strict, repair)
            store.remove_leftovers(WRITTEN)
    finally:
        store.release()
    return config.output


def _build(config: CorpusConfig, store: Store, until: str, strict: bool, repair: bool) -> None:
    config, commits = revisions.pin(config, store)
    found = inputs_of(config)  # a missing input is reported before anything is written
    inputs = found.files
    _warn_of_single_files(config, inputs)
    if searched := config.searched_for:
        evaluation_sets.check(searched, store)
    for step in (step for steps in config.all_steps.values() for step in steps):
        step.check()
    if problems := config.rows.objective.problems(tokenizer.expected(config.tokenizer)):
        raise UserError("\n".join(f"rows.objective: {config.rows.objective.name}: {problem}" for problem in problems))
    small = workers.are_small(sum(file.bytes for file in inputs), config.ray)
    with workers.without_ray() if small else contextlib.nullcontext():
        store.claim()  # before anything is removed: another build may be using it
        store.remove_leftovers(WRITTEN)
        revisions.keep(commits, store)
        if repair:
            _forget_damaged(store, config, until)
        table.forget(store, config)
        build = Build(config, store, inputs, strict)
        for stage in table.stages_of(config):
            stage.run(build)
            _AFTER.get(stage.name, lambda build: None)(build)
            for kind in stage.completes:
                keep_only(kind, store, {name for units in build.units.values() for name in outputs_of(units)})
            if until in (kind.folder for kind in stage.completes) or (stage is LAST and not _left(build, "train")):
                break
        written = _record(build, len(found.hidden))
        if not _left(build, *(() if until == DOCUMENTS.folder else ("train",))):
            reason = report.why_nothing_is_left(written.documents, written.lines)
            raise FailedError(f"{config.name}: {reason} (more in {store.at(report.MARKDOWN)})")


def _warn_of_single_files(config: CorpusConfig, inputs: Sequence[InputFile]) -> None:
    """Prints a line for each source with one file if whole files are held out: the only file is left to train on."""
    if config.split.by == "files" and config.split.validation_fraction:
        numbers = Counter(file.source.name for file in inputs if file.source.split is None)
        for name in (name for name, number in numbers.items() if number == 1):
            reason = f"source {name} has one file, so nothing is held out of it"
            print(f"warning: split.by: files: {reason}; use hash or position", file=sys.stderr)


def _left(build: Build, *splits: str) -> int:
    """The number of documents of `splits`, or of all splits."""
    return documents.total(left(build), *splits)


def keep_only(kind: Kind, store: Store, names: Collection[str]) -> None:
    """Removes the files of `kind` that aren't among `names`. A build with another config, or one whose records were
    damaged, may have left them."""
    found = fnmatch.filter(store.names(kind.folder), f"*/{kind.files}")
    store.delete(name for name in found if name not in names)


def report_damage(units: Sequence[Finished[InputsRead]], strict: bool) -> None:
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


def _report_without_list(build: Build) -> None:
    """Prints how many documents weren't searched for bad words because their language's list isn't enabled."""
    lists = {
        source: [listed for step in steps if isinstance(step, BadWords) for listed in step.languages]
        for source, steps in build.config.all_steps.items()
    }
    without = Counter[str]()
    for result in counts_of_left(build) if any(lists.values()) else ():
        if listed := lists[result.parts[0].source]:
            of_lists = {"unknown", *listed}
            without.update({tag: n for tag, n in result.languages.items() if list_of(tag) not in of_lists})
    if without:
        shown = first_few((f"{tag} {n:,}" for tag, n in most_common(without, len(without)).items()), _LANGUAGES_SHOWN)
        found = f"documents in languages whose list cleaning.bad_words doesn't name: {without.total():,} ({shown})"
        print(f"{found}; they weren't searched for bad words", file=sys.stderr)


def _describe_tokenizer(build: Build) -> None:
    (trained,) = build.of(tokenizer.STAGE)
    print(tokenizer.describe(build.config.tokenizer, trained, left(build)))


def _warn_of_unknown_tokens(build: Build) -> None:
    coverage, _ = report.coverage_of(build.recorded(tokens.STAGE, TokensResult))
    if warning := report.unknown_tokens(coverage, build.config.tokenizer):
        print(warning, file=sys.stderr)


_AFTER: Mapping[str, Callable[[Build], None]] = {  # what is told after a stage
    documents.STAGE.name: lambda build: report_damage(build.of(documents.STAGE), build.strict),
    LAST.name: _report_without_list,
    tokenizer.STAGE.name: _describe_tokenizer,
    tokens.STAGE.name: _warn_of_unknown_tokens,
}


def _forget_damaged(store: Store, config: CorpusConfig, until: str) -> None:
    """Removes the records of damaged files, so that their stages rebuild them. `until`: as `build` has it."""
    damaged = forget_damaged(store, config.ray)
    store.delete_folder(".stages/plans")  # files without checksums
    store.delete([_MARK])
    for name in damaged:
        print(f"{store.at(name)}: damaged, will be rebuilt")
    rewritten = "manifest, its tables and report" if until == "shards" else "the report"
    print(f"repair: {counted(len(damaged), 'damaged file')}; {rewritten} will be rewritten")


def _record(build: Build, hidden: int) -> report.Report:
    """Writes the report and, for a complete corpus, the manifest, unless they are up to date. Returns the report.

    `hidden`: number of hidden files and folders of the sources that were left out.
    """
    config, store = build.config, build.store
    settings = write_manifest.recorded(config)
    stages = {
        stage: fingerprint([config.name, settings, [unit.fingerprint for unit in units]])
        for stage, units in build.units.items()
    } | {"hidden": str(hidden)}
    recorded = store.read_valid_json(_MARK, dict[str, str]) or {}
    files = {report.FILE, *((MANIFEST, BLOCKS, LINEAGE) if shards.STAGE.name in build.units else ())}
    if recorded and stages.items() <= recorded.items() and store.sizes(files).keys() == files:
        found = report.read(store)  # may have later stages, too
        if store.sizes(found.files).keys() == found.files.keys():
            return found
    if recorded:
        store.write_json(_MARK, {})  # the manifest and the report are replaced below
    if shards.STAGE.name in build.units:
        write_manifest.write(build)
    made = report.of(build, hidden)
    written = report.write(store, made, report_pages.render(made))
    store.write_json(_MARK, stages)
    return written
