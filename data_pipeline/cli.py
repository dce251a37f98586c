"""The command `data-pipeline`: raw text to shards."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from data_pipeline import report
from data_pipeline.command import run_command
from data_pipeline.config import CorpusConfig
from data_pipeline.config_file import load
from data_pipeline.corpus import open_corpus
from data_pipeline.errors import FailedError, UserError
from data_pipeline.fetch.commands import fetch_app
from data_pipeline.manifest import verify
from data_pipeline.pipeline import build

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(fetch_app, name="fetch")

ConfigPath = Annotated[Path, typer.Argument(metavar="CORPUS.yaml", help="The corpus file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides: tokenizer.vocab_size=8000")
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail on damaged input, after reading all of it.")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A finished corpus.")]


@app.command("build")
def build_command(config: ConfigPath, overrides: Overrides = None, strict: Strict = False) -> None:
    """Build the corpus: everything, resumable at any moment."""
    directory = _build(config, overrides, "shards", strict)
    for split, counts in report.read(directory)["splits"].items():
        print(f"{split}: {counts['rows']:,} rows, {counts['tokens']:,} tokens, {counts['shards']} shards")
    print(f"{directory} is complete. Next: data-pipeline show {directory}")


@app.command()
def clean(config: ConfigPath, overrides: Overrides = None, strict: Strict = False) -> None:
    """Only read and clean: documents/*.parquet."""
    directory = _build(config, overrides, "documents", strict)
    print(f"{directory}/documents is complete. Next: data-pipeline tokenizer {config}")


@app.command()
def tokenizer(config: ConfigPath, overrides: Overrides = None, strict: Strict = False) -> None:
    """Up to the tokenizer: tokenizer/spiece.model, or vocab.json and merges.txt."""
    directory = _build(config, overrides, "tokenizer", strict)
    print(f"{directory}/tokenizer is complete. Next: data-pipeline shard {config}")


@app.command()
def shard(config: ConfigPath, overrides: Overrides = None, strict: Strict = False) -> None:
    """Up to the shards; the same as build."""
    build_command(config, overrides, strict)


@app.command("verify")
def verify_command(directory: Directory) -> None:
    """Check every checksum and count; name the damaged shards."""
    corpus = open_corpus(directory)
    problems = verify(corpus)
    if problems:
        raise FailedError("\n".join(problems))
    shards = sum(len(split["shards"]) for split in corpus.manifest["splits"].values())
    print(f"{directory}: {shards} shards agree with the manifest. Next: data-pipeline stats {directory}")


@app.command()
def stats(directory: Directory, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What came in, what each rule dropped, how fast each stage was."""
    corpus = open_corpus(directory)
    found = report.read(directory)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        Console().print(Markdown(report.as_markdown(corpus.name, found).replace("<br>", " · ")))


@app.command()
def show(
    directory: Directory,
    number: Annotated[int, typer.Option("-n", min=1, help="How many rows.")] = 3,
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
) -> None:
    """Decoded inputs and targets of the first rows, with epoch 0's noise."""
    from data_pipeline.loading.reader import Reader

    corpus = open_corpus(directory)
    if split not in corpus.manifest["splits"]:
        raise UserError(f"--split: {directory} has the splits {', '.join(corpus.manifest['splits'])}, not {split!r}")
    reader = Reader(corpus, split)
    for row in range(min(number, corpus.rows(split))):
        examples = reader.examples([row], 0)
        print(f"row {row}")
        for name, side in (("inputs", examples.inputs), ("targets", examples.targets)):
            print(f"  {name:8} {corpus.tokenizer.decode(side.values[0, : side.lengths[0]].tolist())}")


def _build(path: Path, overrides: list[str] | None, until: str, strict: bool) -> Path:
    config = load(path, overrides or [], CorpusConfig)
    print(f"{config.name}: {len(config.sources)} sources -> {config.output}")
    return build(config, until, strict)


def main() -> None:
    run_command(app)
