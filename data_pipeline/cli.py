"""Build corpora: from raw text to shards."""

import itertools
import json
import shlex
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from data_pipeline.base import paths, progress
from data_pipeline.base.command import Version, config_path, json_for, path_argument, path_option, run_command
from data_pipeline.base.errors import FailedError, failing_in_one_line
from data_pipeline.base.formatting import counted, first_few

# Commands import what they run: NumPy, PyArrow and pydantic take 0.8 s and 105 MB, and --help needs none of them.

_WRAPPED = textwrap.TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

ConfigPath = Annotated[
    Path, path_argument("CORPUS.yaml", "The corpus file. Its keys: docs/reference/settings.md.", config_path)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides: tokenizer.vocab_size=8000")
]
Until = Annotated[
    Literal["documents", "tokenizer", "shards"],
    typer.Option("--until", help="End the build once this folder of the corpus is complete."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if any input is damaged, after reading all of it.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Check every file of the corpus, and rebuild damaged ones byte for byte.")
]
_REPAIR = "data-pipeline build CORPUS.yaml --repair writes damaged files again"
Built = Annotated[str, path_argument("DIR", "A finished corpus, or its fsspec URL.", paths.location)]


@app.callback(epilog="Example: data-pipeline build configs/corpora/quickstart.yaml")
def _commands(version: Version = False) -> None:
    """Build corpora: from raw text to shards."""


@app.command("build", epilog="Example: data-pipeline build configs/corpora/quickstart.yaml")
def build_command(
    config: ConfigPath,
    overrides: Overrides = None,
    until: Until = "shards",
    strict: Strict = False,
    repair: Repair = False,
) -> None:
    """Build the whole corpus. An interrupted build can be resumed."""
    directory = _build(config, overrides, until, strict, repair)
    if until == "shards":
        print(f"{directory} is complete. Next: data-pipeline show {directory}")
    else:
        following = shlex.join(["data-pipeline", "build", str(config), *(overrides or [])])
        print(f"{directory}/{until} is complete. Next: {following}")


@app.command(epilog="Example: data-pipeline documents configs/corpora/quickstart.yaml cleaning.min_words_per_line=3")
def documents(config: ConfigPath, overrides: Overrides = None, strict: Strict = False, repair: Repair = False) -> None:
    """Read, clean and deduplicate only: writes documents/*.parquet; the same as build --until documents."""
    build_command(config, overrides, "documents", strict, repair)


@app.command("verify", epilog="Example: data-pipeline verify corpora/quickstart")
def verify_command(location: Built) -> None:
    """Check every checksum and count; name the damaged files."""
    from data_pipeline import corpus as corpora
    from data_pipeline.corpus import verify

    corpus = corpora.open_corpus(location)
    if problems := verify.verify(corpus):
        way_out = "to rebuild damaged files byte for byte: data-pipeline build CORPUS.yaml --repair"
        if corpus.remote:
            way_out = f"{way_out}; or, if this is a copy, copy these files again"
        damaged = any(not problem.endswith(verify.FOREIGN) for problem in problems)
        raise FailedError("\n".join([*problems, *([way_out] if damaged else [])]))
    shards = counted(len(corpus.manifest.shards), "shard")
    files = len(verify.documents_of(corpus))
    documents = f" and {counted(files, 'file')} of documents" if files else ""
    following = f"data-pipeline {'show' if corpus.remote else 'stats'} {location}"
    print(f"{location}: {shards}{documents} agree with the manifest. Next: {following}")


@app.command(epilog="Example: data-pipeline stats corpora/quickstart --json")
def stats(directory: Built, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show what came in, what each rule dropped and how fast each finished stage was."""
    from rich import console, markdown

    from data_pipeline.stages import report, report_pages

    found = report.read(directory)
    if as_json:
        print(json_for(sys.stdout, asdict(found), indent=1))
    else:
        console.Console().print(markdown.Markdown(report_pages.render(found).replace("<br>", " · ")))


@app.command(epilog="Example: data-pipeline show corpora/quickstart -n 1 --split validation")
def show(
    location: Built,
    number: Annotated[int, typer.Option("-n", min=1, help="Number of rows.")] = 3,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
) -> None:
    """Print the first rows' decoded inputs and targets, with the noise of epoch 0, and the ids of their documents."""
    from data_pipeline import from_python
    from data_pipeline.base import open_store
    from data_pipeline.tools import ids_of_rows

    corpus = from_python.open(location)
    for example in itertools.islice(corpus.examples(split), number):
        print(f"row {example.row}")
        print(f"  inputs   {example.inputs_text}")
        print(f"  targets  {example.targets_text}")
    if not corpus.rows(split):
        print(f"{location} has no row of {split}")
    ids, whose = ids_of_rows.ids_of_rows(corpus, split, number), "documents"
    if not ids:
        ids, whose = ids_of_rows.first_ids(open_store.open_store(location), split, number), "other documents"
    if ids:
        print(f"{whose}: {first_few(ids, number)}. Next: data-pipeline trace {location} {shlex.quote(ids[0])}")


@app.command("plan", epilog="Example: data-pipeline plan configs/corpora/quickstart.yaml --workers 64")
def plan_command(
    config: ConfigPath,
    overrides: Overrides = None,
    speeds: Annotated[
        Path | None, path_option("--speeds", "Take speeds from this finished corpus, not from a calibration here.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers. Default: this machine's cores.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, in bytes and seconds.")] = False,
) -> None:
    """Forecast the time, memory and disk of a build, before it starts."""
    from data_pipeline import config as configs
    from data_pipeline.base import config_file
    from data_pipeline.stages import report
    from data_pipeline.tools import planning

    with progress.activity_shown("reading the corpus file"):
        settings = config_file.load(config, overrides or [], configs.CorpusConfig)
        if speeds is None:
            progress.set_activity("building from the first 4 MB of each source")
            measured, found = "calibrated here, on the first 4 MB of each source", planning.calibrate(settings)
        else:
            measured, found = f"of {speeds}", report.read(speeds)
        progress.set_activity("counting units")
        planned = planning.forecast_build(settings, found, measured, workers)
    print(json.dumps(asdict(planned), indent=1) if as_json else planning.as_text(planned))


@app.command(
    "trace",
    epilog="Example: data-pipeline trace corpora/quickstart king-james/king-james.jsonl.bz2/000000017",
)
def trace_command(
    location: Annotated[str, path_argument("CORPUS", "A corpus's directory, or its URL.", paths.location)],
    name: Annotated[str, typer.Argument(metavar="ID|URL", help="The document.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: a list with an object for each document.")] = False,
) -> None:
    """Tell whether the corpus has a document, or which step and rule dropped it."""
    from data_pipeline.tools import trace

    with failing_in_one_line(Path(location), _REPAIR):
        found = trace.trace(location, name)
    if as_json:
        print(json_for(sys.stdout, [asdict(one) for one in found], indent=1))
    else:
        print("\n\n".join(map(trace.as_text, found)))


def _build(path: Path, overrides: list[str] | None, until: str, strict: bool, repair: bool) -> str:
    """Builds up to the stage `until` and prints a summary. Returns the corpus's path or URL."""
    from data_pipeline import config as configs
    from data_pipeline.base import config_file, open_store
    from data_pipeline.corpus.tokenizer import normalization
    from data_pipeline.stages import pipeline, report

    started = time.monotonic()
    config = config_file.load(path, overrides or [], configs.CorpusConfig)
    print(f"{config.name}: {counted(len(config.sources), 'source')} -> {config.output}", flush=True)
    directory = pipeline.build(config, until, strict, repair)
    found = report.read(directory)
    print(report.summary(found))
    if until == "tokenizer":
        print(f"tokenizer: {counted(found.pieces, 'token')}")
    if until == "shards":
        for split, counts in found.splits.items():
            shards = counted(counts.shards, "shard")
            print(f"{split}: {counts.rows:,} rows, {counts.tokens:,} tokens, {shards}")
        if coverage := report.coverage(found):
            print(_WRAPPED.fill(coverage))
        if found.coverage and (changed := normalization.describe(found.coverage.changed)):
            print(_WRAPPED.fill(f"tokenizer: {changed}"))
        for warning in report.cut_pairs(found):
            print(warning, file=sys.stderr)
    page = open_store.open_store(directory).at(report.MARKDOWN)
    print(f"took {time.monotonic() - started:.0f} s; the report is {page}")
    return directory


def main() -> None:
    run_command(app)
