"""The commands `data-pipeline fetch wet|c4|wikipedia`."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.foundation.command import path_argument
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted, duration, human_size
from data_pipeline.tools.fetch.published import C4_CONFIGS, COMMON_CRAWL, HUGGING_FACE, WIKIMEDIA, PublishedFile

if TYPE_CHECKING:
    from data_pipeline.tools.fetch.client import Client

ListFiles = Callable[[ModuleType, "Client"], list[PublishedFile]]
"""(the module `catalogues`, a client) -> the published files"""

fetch_app = typer.Typer(
    no_args_is_help=True,
    help="Download published files: resumable, checked, polite.",
    epilog="Example: data-pipeline fetch wikipedia enwiki 20240101 data",
)

_MOST_FAILURES_LISTED = 20

Output = Annotated[Path, path_argument("OUT", "The folder to write to.")]
BaseUrl = Annotated[str, typer.Option(help="Where to fetch from: a mirror with the same layout.")]


@dataclass(frozen=True)
class Options:
    """The options of every command: which files of the list to fetch, and how."""

    files: Annotated[
        int | None, typer.Option("--files", min=1, help="Fetch only the first N files of the list.", metavar="N")
    ] = None
    first: Annotated[
        int | None, typer.Option(min=0, help="Position in the list of the first file to fetch, from 0.")
    ] = None
    last: Annotated[int | None, typer.Option(min=0, help="Position in the list of the last file to fetch.")] = None
    connections: Annotated[int, typer.Option(min=1, max=16, help="Number of files to download at the same time.")] = 4
    rate: Annotated[
        float, typer.Option("--requests-per-second", min=0.01, help="Limit for all connections together.")
    ] = 2.0
    tries: Annotated[int, typer.Option(min=1, help="Consecutive tries without progress before a file is given up.")] = (
        12
    )
    contact: Annotated[
        str, typer.Option(help="Your address or web page, sent with each request so that operators can reach you.")
    ] = ""
    recheck: Annotated[
        bool, typer.Option("--recheck", help="Also read and compare the files that were checked before.")
    ] = False


def _command(example: str, connections: int = 4) -> Callable[[Callable[..., None]], None]:
    """Registers a command, whose parameter `options` becomes the options of every command."""

    def register(function: Callable[..., None]) -> None:
        own = [one for one in signature(function).parameters.values() if one.annotation is not Options]
        shared = signature(Options).replace(return_annotation=None).parameters.values()
        defaults = [one.replace(default=connections) if one.name == "connections" else one for one in shared]

        def command(**given: Any) -> None:
            options = Options(**{one.name: given.pop(one.name) for one in shared})
            function(**given, options=options)

        keyword_only = [one.replace(kind=one.KEYWORD_ONLY) for one in (*own, *defaults)]
        command.__name__ = function.__name__
        command.__signature__ = Signature(keyword_only)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in keyword_only}
        fetch_app.command(function.__name__, help=function.__doc__, epilog=f"Example: data-pipeline fetch {example}")(
            command
        )

    return register


@_command("wet CC-MAIN-2019-18 data/wet --files 10")
def wet(
    crawl: Annotated[str, typer.Argument(metavar="CRAWL", help="The crawl, such as CC-MAIN-2019-18.")],
    output: Output,
    options: Options,
    base_url: BaseUrl = COMMON_CRAWL,
) -> None:
    """Fetch Common Crawl's extracted text: some 56,000 files of 150 MB.

    They are published without checksums; each is tested as a gzip file.
    """
    glob = f"crawl-data/{crawl}/**/*.warc.wet.gz"
    _fetch(crawl, lambda lists, client: lists.wet_files(client, crawl, base_url), output, glob, options)


@_command("c4 data/c4 --split validation")
def c4(
    output: Output,
    options: Options,
    config: Annotated[str, typer.Option(help=f"One of {', '.join(C4_CONFIGS)}.")] = "en",
    split: Annotated[str, typer.Option(help="train or validation.")] = "train",
    revision: Annotated[str, typer.Option(help="A branch or commit of allenai/c4.")] = "main",
    base_url: BaseUrl = HUGGING_FACE,
) -> None:
    """Fetch C4 from the Hugging Face hub. en has 1,024 files of 320 MB for training and 8 for validation."""
    what, glob = f"c4 {config} {split}", f"{config}/c4-{split}.*.json.gz"
    _fetch(what, lambda lists, client: lists.c4_files(client, config, split, revision, base_url), output, glob, options)


@_command("wikipedia enwiki 20240101 data", connections=2)  # Wikimedia limits connections per address
def wikipedia(
    wiki: Annotated[str, typer.Argument(metavar="WIKI", help="The wiki, such as enwiki.")],
    date: Annotated[str, typer.Argument(metavar="DATE", help="The date of the dump, such as 20240101.")],
    output: Output,
    options: Options,
    job: Annotated[
        str, typer.Option(help="The job of the dump. articlesdump has one bzip2 stream per file and no index.")
    ] = "articlesmultistreamdump",
    base_url: BaseUrl = WIKIMEDIA,
) -> None:
    """Fetch a wiki's articles from a Wikimedia dump, in the order of their pages, each index after its articles."""
    what, glob = f"{wiki} {date} {job}", f"{wiki}-{date}-*.xml*.bz2"
    _fetch(what, lambda lists, client: lists.wikipedia_files(client, wiki, date, job, base_url), output, glob, options)


def _select(list_files: Callable[[], list[PublishedFile]], options: Options) -> list[PublishedFile]:
    number, first, last = options.files, options.first, options.last
    if number is not None and (first is not None or last is not None):
        raise UserError("--files: expected either --files, or --first and --last")
    if first is not None and last is not None and last < first:
        raise UserError(f"--last: {last}: expected a position no smaller than --first ({first})")
    every = list_files()
    selected = every[first or 0 : number if last is None else last + 1]
    if not every:
        raise FailedError("the list of published files is empty")
    if not selected:
        raise UserError(f"--first: {first or 0}: the list has {counted(len(every), 'file')}")
    print(f"{len(selected):,} of the {counted(len(every), 'file')} listed")
    return selected


def _fetch(what: str, list_files: ListFiles, output: Path, glob: str, options: Options) -> None:
    """Fetches what `list_files` returns, and reports. `glob`: those below `output` that a corpus is built from."""
    # requests, which all three need, takes 0.25 s to import
    from data_pipeline.tools.fetch import catalogues
    from data_pipeline.tools.fetch.client import Client
    from data_pipeline.tools.fetch.many import check_room, fetch_files

    if not options.contact.isprintable() or not options.contact.isascii():
        raise UserError("--contact: expected one line of ASCII")
    note = partial(print, file=sys.stderr, flush=True)
    client = Client(options.rate, options.tries, contact=options.contact, note=note)
    files = _select(lambda: list_files(catalogues, client), options)
    sizes = [file.size for file in files if file.size is not None]
    print(
        f"{what}: {counted(len(files), 'file')}{f', {human_size(sum(sizes))}' if sizes else ''} -> {output}", flush=True
    )
    check_room(files, output)
    started = time.monotonic()
    outcome = fetch_files(files, output, client, options.connections, options.recheck)
    took = f"{human_size(outcome.received)} in {duration(time.monotonic() - started)}"
    print(f"{output}: {counted(outcome.fetched, 'file')} fetched ({took}), {outcome.present:,} already there")
    if outcome.failed:
        lines = [f"{path}: {reason}" for path, reason in sorted(outcome.failed.items())]
        more = len(lines) - _MOST_FAILURES_LISTED
        listed = lines[:_MOST_FAILURES_LISTED] + ([f"and {more:,} more"] if more > 0 else [])
        raise FailedError(
            "\n".join([f"{len(lines):,} of {counted(len(files), 'file')} could not be fetched:", *listed])
        )
    print(f'Next: data-pipeline build CORPUS.yaml "sources.0.path={output}/{glob}"')
