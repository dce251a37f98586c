"""From raw text to a finished corpus: the stages, in order."""

from pathlib import Path

from data_pipeline import documents, manifest, ownership, report, shards, tokenizer, tokens
from data_pipeline.atomic import fingerprint, remove_leftovers
from data_pipeline.config import CorpusConfig
from data_pipeline.dedup import stages as dedup
from data_pipeline.errors import FailedError, UserError
from data_pipeline.inputs import list_files
from data_pipeline.parts import keep_only, parts_of
from data_pipeline.work_units import Finished, run

_ERRORS_SHOWN = 10


def build(config: CorpusConfig, until: str = "shards", strict: bool = False) -> Path:
    """Brings the corpus up to date, stopping after the stage `until`; returns its directory.

    Damaged inputs are told and the rest goes on; `strict` raises FailedError instead, after all were read.

    What a former run finished is kept where its input and config are the same, however that run ended.
    """
    corpus = Path(config.output)
    for source in config.sources:
        list_files(source)  # a missing input is told before anything is written
    if problems := config.rows.objective.problems(tokenizer.expected(config.tokenizer)):
        raise UserError("\n".join(f"rows.objective: {config.rows.objective.name}: {problem}" for problem in problems))
    _prepare(corpus)
    dedup.forget(corpus, config)
    planned = documents.plan(config, corpus)
    finished: dict[str, list[Finished]] = {}

    finished["documents"] = left = run(documents.STAGE, planned, corpus, config.ray)
    tell_damage(left, strict)
    parts = parts_of(left)
    if config.steps:
        keep_only(corpus, ".stages/documents", parts)
        finished |= dedup.deduplicate(config, corpus, parts)
        left = finished[dedup.LAST.name]
        parts = parts_of(left)
    keep_only(corpus, "documents", parts)
    if until == "documents":
        return corpus

    if documents.total(left, "train") == 0:
        raise FailedError(f"{config.name}: no document for training is left after reading, cleaning and deduplication")
    planned = tokenizer.plan(config.tokenizer, config.seed, parts)
    finished["tokenizer"] = run(tokenizer.STAGE, planned, corpus, config.ray)
    (trained,) = finished["tokenizer"]
    if sampled := tokenizer.describe_sample(trained, left):
        print(sampled)
    if until == "tokenizer":
        return corpus

    planned = tokens.plan(config, parts, trained)
    finished["tokens"] = run(tokens.STAGE, planned, corpus, config.ray)

    finished["rows"] = run(
        shards.COUNT, shards.plan_counts(config, corpus, finished["tokens"], trained), corpus, config.ray
    )
    planned = shards.plan(config, corpus, finished["tokens"], trained, finished["rows"])
    finished["shards"] = run(shards.STAGE, planned, corpus, config.ray)

    _complete(config, corpus, finished)
    return corpus


def _prepare(corpus: Path) -> None:
    try:
        corpus.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {corpus} can't be made: {error.strerror}") from None
    ownership.claim(corpus)  # before anything is removed that another build may be at
    remove_leftovers(corpus)


def tell_damage(units: list[Finished], strict: bool) -> None:
    """One line for each damaged input: its first damage, and how much more there is.

    A source of which nothing could be read is an error, and so is any damage if `strict`.
    """
    readable = {unit.result["source"] for unit in units if unit.result["status"] != "unreadable"}
    errors = []
    for result in (unit.result for unit in units if unit.result["status"] != "ok"):
        position, reason = result["damage"][0]
        records = result["counts"].get("damaged", 0)
        more = f" ({records:,} records damaged in all)" if records > 1 else ""
        line = f"{result['source']}/{result['file']}: {result['status']} at {position}: {reason}{more}"
        if strict or result["source"] not in readable:
            errors.append(line)
        else:
            print(f"warning: {line}; what is whole was kept")
    if errors and not strict:
        sources = sorted({unit.result["source"] for unit in units} - readable)
        others = [f"and {len(errors) - _ERRORS_SHOWN:,} inputs more"] if len(errors) > _ERRORS_SHOWN else []
        question = f"nothing could be read of source {', '.join(sources)}: are its path and format right?"
        errors = [*errors[:_ERRORS_SHOWN], *others, question]
    if errors:
        raise FailedError("\n".join(errors))


def _complete(config: CorpusConfig, corpus: Path, finished: dict[str, list[Finished]]) -> None:
    """Writes the manifest and the report, unless those of these very units are there."""
    stamp = fingerprint([config.name, [[unit.fingerprint for unit in units] for units in finished.values()]])
    mark = corpus / ".stages" / "complete"
    files = [corpus / name for name in ("manifest.json", "blocks.parquet", "report.json", "report.md")]
    if mark.exists() and mark.read_text() == stamp and all(file.exists() for file in files):
        return
    manifest.write(config, corpus, finished["documents"], finished["shards"])
    report.write(corpus, config.name, finished)
    mark.write_text(stamp)
