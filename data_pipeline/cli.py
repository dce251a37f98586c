"""The command `data-pipeline`: raw text to shards."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from data_pipeline.fetch.commands import fetch_app
from data_pipeline.foundation import paths
from data_pipeline.foundation.command import Version, config_path, path_argument, run_command
from data_pipeline.foundation.errors import FailedError, UserError

# Each command imports what it needs itself, so that --help and a mistyped option answer at once.

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(fetch_app, name="fetch")

ConfigPath = Annotated[
    Path, path_argument("CORPUS.yaml", "The corpus file. `pretrain reference` shows its keys.", config_path)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides: tokenizer.vocab_size=8000")
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if any input is damaged, after reading all of it.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Check every file of the corpus, and rebuild damaged ones byte for byte.")
]
Directory = Annotated[Path, path_argument("DIR", "A finished corpus.")]


@app.callback()
def _commands(version: Version = False) -> None:
    """Build corpora: from raw text to shards."""


@app.command("build")
def build_command(
    config: ConfigPath, overrides: Overrides = None, strict: Strict = False, repair: Repair = False
) -> None:
    """Build the whole corpus. An interrupted build can be resumed."""
    directory = _build(config, overrides, "shards", strict, repair)
    print(f"{directory} is complete. Next: data-pipeline show {directory}")


@app.command()
def clean(config: ConfigPath, overrides: Overrides = None, strict: Strict = False, repair: Repair = False) -> None:
    """Read and clean only: writes documents/*.parquet."""
    directory = _build(config, overrides, "documents", strict, repair)
    print(f"{directory}/documents is complete. Next: data-pipeline tokenizer {config}")


@app.command()
def tokenizer(config: ConfigPath, overrides: Overrides = None, strict: Strict = False, repair: Repair = False) -> None:
    """Build up to the tokenizer: tokenizer/spiece.model, or vocab.json and merges.txt."""
    directory = _build(config, overrides, "tokenizer", strict, repair)
    print(f"{directory}/tokenizer is complete. Next: data-pipeline shard {config}")


@app.command()
def shard(config: ConfigPath, overrides: Overrides = None, strict: Strict = False, repair: Repair = False) -> None:
    """Build up to the shards; the same as build."""
    build_command(config, overrides, strict, repair)


@app.command("verify")
def verify_command(directory: Directory) -> None:
    """Check every checksum and count; name the damaged files."""
    from data_pipeline.corpus import open_corpus
    from data_pipeline.corpus.manifest import has_documents, verify
    from data_pipeline.foundation.progress import counted

    corpus = open_corpus(directory)
    if problems := verify(corpus):
        way_out = "to rebuild damaged files byte for byte: data-pipeline build CORPUS.yaml --repair"
        raise FailedError("\n".join([*problems, way_out]))
    shards = counted(sum(len(split["shards"]) for split in corpus.manifest["splits"].values()), "shard")
    documents = ""
    if has_documents(corpus):
        documents = f" and {counted(len(corpus.manifest['documents']), 'file')} of documents"
    print(f"{directory}: {shards}{documents} agree with the manifest. Next: data-pipeline stats {directory}")


@app.command()
def stats(directory: Directory, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show what came in, what each rule dropped and how fast each finished stage was."""
    from rich.console import Console
    from rich.markdown import Markdown

    from data_pipeline import report

    found = report.read(directory)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        Console().print(Markdown(report.as_markdown(found).replace("<br>", " · ")))


@app.command()
def show(
    location: Annotated[str, path_argument("DIR", "A finished corpus, or its fsspec URL.", paths.location)],
    number: Annotated[int, typer.Option("-n", min=1, help="How many rows.")] = 3,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
) -> None:
    """Print the first rows' decoded inputs and targets, with the noise of epoch 0."""
    from data_pipeline.corpus import open_corpus
    from data_pipeline.loading.reader import Reader

    corpus = open_corpus(location)
    if split not in corpus.manifest["splits"]:
        raise UserError(f"--split: {location} has the splits {', '.join(corpus.manifest['splits'])}, not {split!r}")
    reader = Reader(corpus, split)
    for row in range(min(number, corpus.rows(split))):
        examples = reader.examples([row], 0)
        print(f"row {row}")
        for name, side in (("inputs", examples.inputs), ("targets", examples.targets)):
            print(f"  {name:8} {corpus.tokenizer.decode(side.values[0, : side.lengths[0]].tolist())}")


def _build(path: Path, overrides: list[str] | None, until: str, strict: bool, repair: bool) -> Path:
    """Builds up to the stage `until` and prints a summary. Returns the corpus's directory."""
    from data_pipeline import report
    from data_pipeline.config import CorpusConfig
    from data_pipeline.foundation.config_file import load
    from data_pipeline.foundation.progress import counted
    from data_pipeline.pipeline import build

    started = time.monotonic()
    config = load(path, overrides or [], CorpusConfig)
    print(f"{config.name}: {counted(len(config.sources), 'source')} -> {config.output}", flush=True)
    directory = build(config, until, strict, repair)
    found = report.read(directory)
    print(report.summary(found))
    if until == "tokenizer":
        print(f"tokenizer: {counted(found['pieces'], 'piece')}")
    if until == "shards":
        for split, counts in found["splits"].items():
            shards = counted(counts["shards"], "shard")
            print(f"{split}: {counts['rows']:,} rows, {counts['tokens']:,} tokens, {shards}")
        for warning in report.cut_pairs(found):
            print(warning, file=sys.stderr)
    print(f"took {time.monotonic() - started:.0f} s; the report is {directory / report.FOR_PEOPLE}")
    return directory


def main() -> None:
    run_command(app)
