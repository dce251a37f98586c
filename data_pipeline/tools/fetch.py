"""The commands `data-pipeline fetch wet|wikipedia`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.foundation.command import path_argument
from data_pipeline.foundation.errors import FailedError, UserError
from data_pipeline.foundation.formatting import counted, duration, human_size

if TYPE_CHECKING:
    import requests

    from data_pipeline.tools import download

fetch_app = typer.Typer(
    no_args_is_help=True,
    help="Download published files: resumable, checked, polite.",
    epilog="Example: data-pipeline fetch wikipedia enwiki 20240101 data",
)


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise UserError(f"--base-url: {text!r}: expected an address such as https://host/folder")
    return text.rstrip("/")


Output = Annotated[Path, path_argument("OUT", "The folder to write to.")]
Files = Annotated[int | None, typer.Option(min=1, metavar="N", help="Fetch only N files of the list.")]
First = Annotated[int, typer.Option(min=0, help="Position in the list of the first file to fetch, from 0.")]
Connections = Annotated[int, typer.Option(min=1, max=16, help="Number of files to download at the same time.")]
Contact = Annotated[str, typer.Option(help="Your address or web page, sent with each request to the operators.")]
BaseUrl = Annotated[str, typer.Option(parser=_address, metavar="URL", help="A mirror with the same layout.")]


@fetch_app.command(epilog="Example: data-pipeline fetch wet CC-MAIN-2019-18 data/wet --files 10")
def wet(
    crawl: Annotated[str, typer.Argument(metavar="CRAWL", help="The crawl, such as CC-MAIN-2019-18.")],
    output: Output,
    files: Files = None,
    first: First = 0,
    connections: Connections = 4,
    contact: Contact = "",
    base_url: BaseUrl = "https://data.commoncrawl.org",
) -> None:
    """Fetch Common Crawl's extracted text: some 56,000 files of 150 MB.

    They are published without checksums; each is tested as a gzip file.
    """
    from data_pipeline.tools import download  # requests takes 110 ms and pydantic 90, which --help does without

    session = download.open_session(contact)
    listed = download.wet_files(session, crawl, base_url)
    _fetch(listed, session, output, f"crawl-data/{crawl}/**/*.warc.wet.gz", files, first, connections)


@fetch_app.command(epilog="Example: data-pipeline fetch wikipedia enwiki 20240101 data")
def wikipedia(
    wiki: Annotated[str, typer.Argument(metavar="WIKI", help="The wiki, such as enwiki.")],
    date: Annotated[str, typer.Argument(metavar="DATE", help="The date of the dump, such as 20240101.")],
    output: Output,
    job: Annotated[
        str, typer.Option(help="The job of the dump. articlesdump has one bzip2 stream per file and no index.")
    ] = "articlesmultistreamdump",
    files: Files = None,
    first: First = 0,
    connections: Connections = 2,  # Wikimedia limits them per address
    contact: Contact = "",
    base_url: BaseUrl = "https://dumps.wikimedia.org",
) -> None:
    """Fetch a wiki's articles from a Wikimedia dump, in the order of their pages, each index after its articles."""
    from data_pipeline.tools import download  # requests takes 110 ms and pydantic 90, which --help does without

    session = download.open_session(contact)
    listed = download.wikipedia_files(session, wiki, date, job, base_url)
    _fetch(listed, session, output, f"{wiki}-{date}-*.xml*.bz2", files, first, connections)


def _fetch(
    listed: "Sequence[download.PublishedFile]",
    session: "requests.Session",
    output: Path,
    glob: str,
    number: int | None,
    first: int,
    connections: int,
) -> None:
    """Fetches `number` of the files `listed`, and reports. `glob`: those below `output` that a corpus is built from."""
    from data_pipeline.tools import download  # requests takes 110 ms and pydantic 90, which --help does without

    started = time.monotonic()
    files = listed[first:][:number]
    if not files:
        raise UserError(f"--first: {first}: the list has {counted(len(listed), 'file')}")
    size = sum(file.size or 0 for file in files)
    known = f", {human_size(size)}" if size else ""
    print(f"{len(files):,} of the {counted(len(listed), 'file')} listed{known} -> {output}", flush=True)
    done = download.fetch_files(files, output, session, connections)
    present, failed = sum(one.present for one in done), sum(bool(one.problem) for one in done)
    took = f"{human_size(sum(one.received for one in done))} in {duration(time.monotonic() - started)}"
    print(f"{output}: {counted(len(done) - present - failed, 'file')} fetched ({took}), {present:,} already there")
    if failed:
        raise FailedError(f"{failed:,} of {counted(len(files), 'file')} could not be fetched; run the command again")
    print(f'Next: data-pipeline build CORPUS.yaml "sources.0.path={output}/{glob}"')
