"""The files that Common Crawl, the Hugging Face hub and Wikimedia publish, with their published sizes and checksums."""

import gzip
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import huggingface_hub

from data_pipeline.foundation.errors import FailedError, UserError, one_line
from data_pipeline.foundation.json_file import parse_json

Read = Callable[[str, str], bytes]
"""(address, what to say if nothing is there) -> content"""


@dataclass(frozen=True)
class PublishedFile:
    """A file in a publisher's list: its address, its place below the output directory, its bytes, and its checksum as
    "sha256:…", "sha1:…" or "md5:…". The last two are None if the publisher gives none.

    Lists come from the network. FailedError refuses a path that could leave the output directory, and names that start
    with a dot, as the folder for partial files does.
    """

    url: str
    path: str
    size: int | None = None
    checksum: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(\w[\w.+=-]*/)*\w[\w.+=-]*", self.path, re.ASCII):
            raise FailedError(f"{self.url}: refused: the list has the path {self.path!r}")


@dataclass(frozen=True)
class _DumpFile:
    size: int | None = None
    sha1: str | None = None
    md5: str | None = None


@dataclass(frozen=True)
class _DumpJob:
    status: str
    files: dict[str, _DumpFile] = field(default_factory=dict)


@dataclass(frozen=True)
class _DumpStatus:
    """dumpstatus.json of a Wikimedia dump."""

    jobs: dict[str, _DumpJob]


def wet_files(read: Read, crawl: str, base_url: str) -> list[PublishedFile]:
    """The text files of a crawl ("CC-MAIN-2019-18"), in the order of its wet.paths.gz, without sizes and checksums."""
    url = f"{base_url}/crawl-data/{crawl}/wet.paths.gz"
    content = read(url, f"no crawl {crawl} with text there; crawls are listed at https://index.commoncrawl.org/")
    try:
        paths = gzip.decompress(content).decode("ascii").split()
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise FailedError(f"{url}: expected a gzip file of paths: {error}") from None
    return [PublishedFile(f"{base_url}/{path}", path) for path in paths]


def c4_files(config: str, split: str, revision: str, base_url: str) -> list[PublishedFile]:
    """The files of a split of C4 in the repository allenai/c4, in its folder `config` ("en"), with sizes and sha256.

    Raises UserError if the hub doesn't have them, FailedError if it doesn't answer.
    """
    where = {"repo_id": "allenai/c4", "repo_type": "dataset", "revision": revision}
    prefix = f"{config}/c4-{split}."
    try:
        entries = list(huggingface_hub.HfApi(base_url).list_repo_tree(**where, path_in_repo=config))
    except Exception as error:  # the hub's own, and those of the HTTP library below it, which changes
        missing = getattr(getattr(error, "response", None), "status_code", None) == 404
        raise (UserError if missing else FailedError)(f"{base_url}: {one_line(error)}") from None
    files = [
        PublishedFile(
            huggingface_hub.hf_hub_url(**where, filename=entry.path, endpoint=base_url),
            entry.path,
            entry.size,
            f"sha256:{entry.lfs.sha256}" if entry.lfs else None,
        )
        for entry in sorted(entries, key=lambda entry: entry.path)
        if entry.path.startswith(prefix)
    ]
    if not files:
        raise UserError(f"{base_url}: allenai/c4 has no files {prefix}*")
    return files


def wikipedia_files(read: Read, wiki: str, date: str, job: str, base_url: str) -> list[PublishedFile]:
    """The files of one job of a dump ("enwiki", "20240101"), in the order of their pages, with sizes and checksums:
    sha1 where published, else md5. Raises UserError if the job doesn't exist, FailedError if it isn't done.
    """
    folder = f"{base_url}/{wiki}/{date}"
    url = f"{folder}/dumpstatus.json"
    content = read(url, f"no dump of {wiki} of {date} there; dates are like 20240101, and old dumps are deleted")
    jobs = parse_json(content, _DumpStatus, url).jobs
    if job not in jobs:
        raise UserError(f"{url}: has no job {job!r}, only {', '.join(sorted(jobs))}")
    if (state := jobs[job].status) != "done":
        raise FailedError(f"{url}: the job {job} is {state!r}, expected 'done'; take an earlier dump, or wait")
    published = []
    for name, file in sorted(jobs[job].files.items(), key=lambda item: _in_order_of_pages(item[0])):
        checksum = f"sha1:{file.sha1}" if file.sha1 else f"md5:{file.md5}" if file.md5 else None
        published.append(PublishedFile(f"{folder}/{name}", name, file.size, checksum))
    return published


def _in_order_of_pages(name: str) -> tuple[list[int], str]:
    """A sort key by part and page numbers: part 10 follows part 9, and an index follows its articles."""
    return [int(number) for number in re.findall(r"\d+", name)], name
